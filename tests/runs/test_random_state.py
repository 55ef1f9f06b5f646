"""A loop that is killed and resumed draws the random numbers that it would have drawn."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rollbook import Run, open_run
from rollbook.errors import BadFileError
from rollbook.records.complete import is_complete

EVERY_SECOND = 2


def draw() -> dict[str, float]:
    np.random.standard_normal(3)  # an odd number: a second one is kept for the next call
    torch.randn(3)
    return {
        "random": random.gauss(0, 1),
        "numpy": float(np.random.standard_normal()),
        "torch": float(torch.rand(())),
    }


def scramble() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(random.SystemRandom().randrange(2**31))


def train(
    path: Path, *, die_after: int | None = None, before_the_loop: Callable[[Run], object] | None = None
) -> None:
    run = Run(path, resume=True, code=path.parent)
    if before_the_loop is not None:
        before_the_loop(run)
    for i in range(run.next_iteration, 6):
        run.log_metrics(draw(), step=i)
        if i % EVERY_SECOND == 1:
            with run.checkpoint(f"{i + 1:06d}", batch=i + 1):
                pass
        if i == die_after:
            run._opened.close()  # gone without a word
            return
    run.close()


def drawn(path: Path) -> list[tuple[float, ...]]:
    return [tuple(row[name] for name in ("random", "numpy", "torch")) for row in open_run(path).metrics]


@pytest.mark.parametrize("die_after", [0, 1, 2, 4, 5])
def test_a_resumed_loop_draws_what_it_would_have_drawn(tmp_path: Path, die_after: int) -> None:
    for name in ("whole", "killed"):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(7)
        train(tmp_path / name, die_after=die_after if name == "killed" else None)
    if die_after == 0:  # no checkpoint yet: the loop starts over, with the seeds it sets itself
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(7)
    else:
        scramble()
    train(tmp_path / "killed")
    assert drawn(tmp_path / "killed") == drawn(tmp_path / "whole")


def test_the_state_can_be_restored_right_before_the_loop(tmp_path: Path) -> None:
    random.seed(7)
    train(tmp_path, die_after=4)
    before = drawn(tmp_path)
    said: list[bool] = []

    def prepare(run: Run) -> None:
        scramble()
        said.append(run.restore_random_state())

    train(tmp_path, before_the_loop=prepare)
    assert said == [True]
    assert drawn(tmp_path)[:5] == before
    with Run(tmp_path / "other") as run:
        assert not run.restore_random_state()


def test_the_state_is_part_of_the_checkpoint_and_no_pickle(tmp_path: Path) -> None:
    train(tmp_path)
    directory = tmp_path / "checkpoints/000006"
    assert is_complete(directory, verify=True)
    assert set(json.loads((directory / "random_state.json").read_bytes())) >= {"random", "numpy", "torch"}
    (directory / "random_state.json").write_bytes(b"\x80\x04cos\nsystem\n.")
    (directory / "COMPLETE").write_text("")
    with pytest.raises(BadFileError, match="is not the state of random generators"):
        Run(tmp_path, resume=True)


def test_a_state_that_the_loop_saved_itself_stays(tmp_path: Path) -> None:
    with Run(tmp_path) as run, run.checkpoint("one", batch=1) as directory:
        (directory / "random_state.json").write_text("{}")
    assert (tmp_path / "checkpoints/one/random_state.json").read_text() == "{}"


def test_recording_imports_no_numpy_or_torch(tmp_path: Path) -> None:
    code = f"""
import sys, rollbook
run = rollbook.Run({str(tmp_path)!r})
with run.checkpoint("one", batch=1): pass
run.close()
rollbook.Run({str(tmp_path)!r}, resume=True).close()
sys.exit(f"imported {{heavy}}" if (heavy := {{"torch", "numpy"}} & set(sys.modules)) else 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_module_that_another_thread_is_still_importing_has_no_state_yet(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import threading\nbegun, go_on = threading.Event(), threading.Event()\n"
        "import __main__\n__main__.half = globals()\nbegun.set()\ngo_on.wait(60)\n"
    )
    code = f"""
import sys, threading, time
sys.path.insert(0, {str(tmp_path)!r})
thread = threading.Thread(target=__import__, args=["torch"])
thread.start()
while "half" not in globals(): time.sleep(0.001)
half["begun"].wait(60)
from rollbook.runs.random_state import capture_random_state
print(sorted(capture_random_state()))
half["go_on"].set()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['random']", done.stderr
