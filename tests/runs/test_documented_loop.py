"""The loop of docs/record-your-loop.md, killed in every one of its iterations: what it leaves is no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers import preloaded
from helpers.equal_runs import differences
from helpers.places import REPOSITORY

# Each attempt is a fork of it that runs the page's loop, and most kill themselves on the way.
HARNESS = """
import os, random, signal, sys
from pathlib import Path
import numpy, torch, rollbook
from rollbook.runs.rollout_log import GroupLog

loop, how = Path("loop.py").read_text(), sys.argv[1]
torch.set_num_threads(1)

def kill_at(place, iteration):
    def kill(now):
        if now:
            os.kill(os.getpid(), signal.SIGKILL)
    log_metrics, add, checkpoint = rollbook.Run.log_metrics, GroupLog.add, rollbook.Run.checkpoint
    added = [0]
    def own_add(self, *given):
        summary = add(self, *given)
        added[0] += summary.iteration == iteration
        kill(place == "sampling" and added[0] == 77)
        return summary
    def own_log_metrics(self, metrics, step):
        kill(place == "before the metrics" and step == iteration)
        log_metrics(self, metrics, step)
        kill(place == "after the metrics" and step == iteration)
    def own_checkpoint(self, name, *, batch, **more):
        saving = checkpoint(self, name, batch=batch, **more)
        enter, leave = type(saving).__enter__, type(saving).__exit__
        class Saving:
            def __enter__(this):
                return enter(saving)
            def __exit__(this, *error):
                kill(place == "saving" and batch == iteration + 1)
                result = leave(saving, *error)
                kill(place == "after saving" and batch == iteration + 1)
                return result
        return Saving()
    GroupLog.add, rollbook.Run.log_metrics, rollbook.Run.checkpoint = own_add, own_log_metrics, own_checkpoint

PLACES = ["sampling", "before the metrics", "after the metrics", "saving", "after saving"]
attempts = [None] if how == "whole" else [*range(0, 20, int(sys.argv[2])), None]
for attempt in attempts:
    child = os.fork()
    if child == 0:
        random.seed(0)  # the page seeds torch alone, and checkpoints hold the state of every generator
        numpy.random.seed(0)
        if attempt is not None:
            kill_at(PLACES[attempt % len(PLACES)], attempt)
        try:
            exec(compile(loop, "loop.py", "exec"), {"__name__": "__main__"})
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    expected = 0 if attempt is None else -signal.SIGKILL
    assert os.waitstatus_to_exitcode(status) == expected, (attempt, status)
"""


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.faults), 4])
def test_killed_in_every_iteration_it_leaves_what_it_leaves_untouched(tmp_path: Path, every: int) -> None:
    page = (REPOSITORY / "docs" / "record-your-loop.md").read_text()
    first = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert first is not None
    assert "range(run.next_iteration, 20)" in first[1]
    for how in ("whole", "killed"):
        place = tmp_path / how
        place.mkdir()
        (place / "loop.py").write_text(first[1])
        done = preloaded.run("python", "-c", HARNESS, how, every, cwd=place)
        assert done.returncode == 0, done.stdout + done.stderr
    killed, whole = (tmp_path / how / "runs" / "adder" for how in ("killed", "whole"))
    assert differences(killed, whole) == []
    assert (killed / "superseded").is_dir()


def test_the_two_runs_would_differ_if_the_random_state_were_not_restored(tmp_path: Path) -> None:
    """That the comparison above can fail: another seed is another run."""
    page = (REPOSITORY / "docs" / "record-your-loop.md").read_text()
    loop = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert loop is not None
    short = loop[1].replace("20", "2")
    for seed in (0, 1):
        place = tmp_path / str(seed)
        place.mkdir()
        (place / "loop.py").write_text(short.replace("manual_seed(0)", f"manual_seed({seed})"))
        done = preloaded.run("python", "-c", HARNESS, "whole", 1, cwd=place)
        assert done.returncode == 0, done.stdout + done.stderr
    assert differences(tmp_path / "0" / "runs" / "adder", tmp_path / "1" / "runs" / "adder")
