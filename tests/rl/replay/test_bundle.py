"""One micro-batch in a zip file: it replays anywhere, and who opens one need not trust who made it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.rl_runs import settings_of, write_setup, write_tool_setup
from rollbook.errors import BadFileError, RollbookError, UsageError
from rollbook.records.complete import COMPLETE, CompleteMark, file_facts
from rollbook.records.iterations import read_iterations
from rollbook.rl.replay import bundle as bundles
from rollbook.rl.replay import cut
from rollbook.rl.replay.cut import cut_bundle
from rollbook.rl.replay.findings import Stage, Verdict
from rollbook.rl.replay.replay import replay
from rollbook.rl.replay.what_if import what_if
from rollbook.rl.train import train

CHECKPOINT = "checkpoints/000001/"
EXPORT = {"experimental": {"token_export": {}}}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("rl"))


@pytest.fixture(scope="module")
def run(setup: Path) -> Path:
    """Three iterations of four optimiser steps each, in small micro-batches."""
    changes: dict[str, Any] = {"minibatches": 2, "epochs": 2, "micro_batch_tokens": 40}
    train(settings_of(setup, setup / "run", evals=[], iterations=3, **changes), log=lambda _: None)
    return setup / "run"


@pytest.fixture(scope="module")
def whole(run: Path) -> Path:
    cut_bundle(run, 1, run.parent / "whole.zip")
    return run.parent / "whole.zip"


def test_a_bundle_replays_in_an_empty_directory(whole: Path, tmp_path: Path) -> None:
    """The run itself is not needed, nor anything else that is not in the file."""
    (tmp_path / "empty").mkdir()
    copy = tmp_path / "b.zip"
    copy.write_bytes(whole.read_bytes())
    command = [sys.executable, "-m", "rollbook", "replay", str(copy), "--json"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path)}
    shown = subprocess.run(command, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["verdict"] == "equal" and found["first"] is None
    (iteration,) = found["iterations"]
    assert {stage["stage"]: stage["verdict"] for stage in iteration["stages"]} == dict.fromkeys(
        Stage, "equal"
    )
    assert not list((tmp_path / "empty").iterdir())
    assert {entry.name for entry in tmp_path.iterdir()} == {"empty", "b.zip"}  # what was unpacked is gone


def test_a_micro_batch_of_a_later_step_has_the_weights_before_it(run: Path, tmp_path: Path) -> None:
    record = next(one for one in read_iterations(run / "iterations.jsonl") if one.iteration == 2)
    batches = [(step, rows) for step, one in enumerate(record.steps or ()) for rows in one.micro_batches]
    last = len(batches) - 1
    made = cut_bundle(run, 2, tmp_path / "b.zip", micro_batch=last)
    assert (made.optim_step, made.rows) == (batches[last][0], len(batches[last][1]))
    assert made.optim_step == 3
    found = replay(tmp_path / "b.zip")
    assert found.verdict is Verdict.EQUAL and found.run_id is not None
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        line = json.loads(archive.read("iterations.jsonl"))
    assert line["steps"][0]["micro_batches"] == [[[*map(int, row)] for row in _rows(batches[last][1])]]
    assert line["weights_digest_before"] != record.weights_digest_before


def _rows(rows: Any) -> list[tuple[int, int, int]]:
    return [(row.group_idx, row.traj_idx, row.part) for row in rows]


@pytest.mark.parametrize("kind", ["adapters", "tools", "half precision"])
def test_any_run_that_replays_can_be_cut(setup: Path, tmp_path: Path, kind: str) -> None:
    changes: dict[str, Any] = {
        "adapters": {"model": {"lora": {"rank": 2}}, "trainer": EXPORT},
        "tools": write_tool_setup(tmp_path / "tools"),
        "half precision": {"model": {"dtype": "bfloat16"}},
    }[kind]
    train(
        settings_of(setup, tmp_path / "run", **({"evals": [], "iterations": 2} | changes)), log=lambda _: None
    )
    cut_bundle(tmp_path / "run", 1, tmp_path / "b.zip")
    assert replay(tmp_path / "b.zip").verdict is Verdict.EQUAL
    assert what_if(tmp_path / "b.zip", None, "learning_rate=1").recorded.applied == 1
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        for name in archive.namelist():  # nothing of this machine is in it
            assert str(setup).encode() not in archive.read(name), name


def test_a_model_that_is_not_small_is_refused_before_it_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "MOST_BYTES", 1000)
    with pytest.raises(UsageError, match="it is for small models"):
        cut_bundle(run, 1, tmp_path / "b.zip")
    assert not list(tmp_path.iterdir())


def test_only_what_replays_is_cut(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"):
        cut_bundle(run, 1, run / "config.json")
    with pytest.raises(UsageError, match=r"has \d+ micro-batches, counted from 0, and 99 is none"):
        cut_bundle(run, 1, tmp_path / "b.zip", micro_batch=99)
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", run, copy], check=True)
    lines = [json.loads(line) for line in (copy / "iterations.jsonl").read_bytes().splitlines()]
    lines[1]["steps"][0]["loss"] += 1
    (copy / "iterations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RollbookError, match="would expect what was not recorded: loss: iteration 1"):
        cut_bundle(copy, 1, tmp_path / "b.zip")
    assert not (tmp_path / "b.zip").exists()


Files = dict[str, bytes]


def rewritten(whole: Path, target: Path, change: Callable[[Files], Any], *, sealed: bool = True) -> Path:
    """A bundle with other files; `sealed` gives it a mark that names them."""
    with zipfile.ZipFile(whole) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    if sealed:
        for directory in (CHECKPOINT, ""):
            files[f"{directory}{COMPLETE}"] = _mark(files, directory, target.parent)
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return target


def _mark(files: Files, directory: str, scratch: Path) -> bytes:
    facts = {}
    for name, data in files.items():
        if name.startswith(directory) and name != f"{directory}{COMPLETE}":
            (scratch / "one").write_bytes(data)
            facts[name.removeprefix(directory)] = file_facts(scratch / "one")
    return msgspec.json.encode(CompleteMark("now", facts))


def put(name: str, data: bytes = b"x") -> Callable[[Files], Any]:
    return lambda files: files.update({name: data})


def set_key(name: str, **values: Any) -> Callable[[Files], Any]:
    def change(files: Files) -> None:
        files[name] = json.dumps(json.loads(files[name]) | values).encode() + b"\n"

    return change


def test_a_bundle_that_was_only_packed_again_is_still_one(whole: Path, tmp_path: Path) -> None:
    assert replay(rewritten(whole, tmp_path / "b.zip", lambda files: None)).verdict is Verdict.EQUAL


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("../escaped"), "does not belong there"),
        (put("/tmp/escaped"), "does not belong there"),
        (put("checkpoints/000001/../../../escaped.json"), "does not belong there"),
        (put("checkpoints\\000001\\x.json"), "does not belong there"),
        (put(f"{CHECKPOINT}optimizer.pt"), "does not belong there"),
        (put(f"{CHECKPOINT}modeling.py"), "does not belong there"),
        (put("vowels.py"), "does not belong there"),
        (put("Config.json"), "does not belong there"),
        (set_key(f"{CHECKPOINT}config.json", auto_map={"AutoConfig": "x--y.Z"}), "'auto_map', which can"),
        (set_key(f"{CHECKPOINT}tokenizer_config.json", deep=[{"auto_map": 1}]), "can name code"),
        (put(f"{CHECKPOINT}config.json", b"[" * 100_000), "is not valid JSON"),
        (set_key("bundle.json", version=99), "open it with a newer Rollbook"),
        (put("bundle.json", b"{}"), "is not a bundle"),
        (set_key("checkpoints.jsonl", state_path="../elsewhere"), "weights are not where they should be"),
        (set_key("checkpoints.jsonl", state_path="/"), "weights are not where they should be"),
        (set_key("iterations.jsonl", processes=10**9), "does not hold one step"),
        (set_key("iterations.jsonl", iteration=2), "does not hold one step"),
    ],
)  # fmt: skip
def test_what_does_not_belong_into_a_bundle_is_refused(
    whole: Path, tmp_path: Path, change: Callable[[Files], Any], said: str
) -> None:
    with pytest.raises(BadFileError, match=said):
        replay(rewritten(whole, tmp_path / "b.zip", change))
    assert not (tmp_path.parent / "escaped").exists()


def test_a_token_export_outside_of_the_bundle_is_not_read(whole: Path, tmp_path: Path) -> None:
    def change(files: Files) -> None:
        line = json.loads(files["token_exports/manifest.jsonl"])
        line["ranks"][0]["file"] = "rank_1.jsonl"
        files["token_exports/manifest.jsonl"] = json.dumps(line).encode() + b"\n"

    with pytest.raises(BadFileError, match="names a file that is not in it"):
        replay(rewritten(whole, tmp_path / "b.zip", change))
    # Nor one that run.json names.
    outside = tmp_path / "manifest.jsonl"
    outside.write_text("not a manifest\n")
    other = rewritten(whole, tmp_path / "c.zip", set_key("run.json", token_exports=[str(outside)]))
    assert replay(other).verdict is Verdict.EQUAL


def test_a_bundle_that_was_changed_or_cut_is_refused(whole: Path, tmp_path: Path) -> None:
    weights = f"{CHECKPOINT}model.safetensors"
    for change in (put(weights, b"x"), put("base/config.json", b"{}"), lambda files: files.pop("run.json")):
        with pytest.raises(BadFileError, match=r"is not a whole bundle|does not name the files"):
            replay(rewritten(whole, tmp_path / "b.zip", change, sealed=False))
        (tmp_path / "b.zip").unlink()
    data = whole.read_bytes()
    (tmp_path / "b.zip").write_bytes(data[: len(data) // 2])
    with pytest.raises(RollbookError, match="neither a run directory nor a bundle"):
        replay(tmp_path / "b.zip")
    (tmp_path / "b.zip").write_bytes(data[:1000] + b"\0" * 1000 + data[2000:])
    with pytest.raises(BadFileError):
        replay(tmp_path / "b.zip")


def test_a_bundle_that_unpacks_to_too_much_is_refused(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(entry.file_size for entry in zipfile.ZipFile(whole).infolist())
    monkeypatch.setattr(bundles, "MOST_BYTES", size + 20_000)
    assert replay(rewritten(whole, tmp_path / "b.zip", lambda files: None)).verdict is Verdict.EQUAL
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("run.json", b"0" * (size + 30_000))
    assert (tmp_path / "bomb.zip").stat().st_size < 10_000
    with pytest.raises(BadFileError, match="unpacks to more than"):
        replay(tmp_path / "bomb.zip")


def test_a_link_is_refused(whole: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        link = zipfile.ZipInfo("config.json")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(BadFileError, match="not a plain file"):
        replay(tmp_path / "b.zip")
