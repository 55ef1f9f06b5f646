"""Symlinks where our own files belong are not written through; an output that a user named may be one."""

from __future__ import annotations

from pathlib import Path

import pytest

from collecting import config, run, small_input
from rollbook.errors import RollbookError, WriteError
from rollbook.records.atomic import write_atomic
from rollbook.records.jsonl import JsonlWriter
from rollbook.records.layout import INDEX_YAML
from rollbook.records.locks import FileLock
from rollbook.runs.jobs.ledger import Ledger, RunStart

PRECIOUS = b'{"precious": true}\n'


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    path = tmp_path / "home" / "victim"
    path.write_bytes(PRECIOUS)
    path.chmod(0o640)
    return path


@pytest.mark.parametrize("sidecar", ["out_progress.json", "out_manifest.json"])
def test_a_sidecar_that_is_replaced_whole_takes_the_place_of_the_link(
    sidecar: str, tmp_path: Path, victim: Path
) -> None:
    if sidecar != "out_manifest.json":  # which is read first, and this is none
        (tmp_path / sidecar).symlink_to(victim)
    else:
        (tmp_path / sidecar).symlink_to(victim.parent / "nothing")
    small_input(tmp_path, 2)
    config(tmp_path)
    assert run(tmp_path).done == 2
    assert not (tmp_path / sidecar).is_symlink()
    assert [path.name for path in victim.parent.iterdir()] == ["victim"]
    assert victim.read_bytes() == PRECIOUS


@pytest.mark.parametrize("sidecar", ["out_failures.ndjson", ".out.jsonl.lock", ".out_failures.ndjson.lock"])
def test_a_sidecar_that_is_appended_to_is_refused(sidecar: str, tmp_path: Path, victim: Path) -> None:
    (tmp_path / sidecar).symlink_to(victim)
    small_input(tmp_path, 2)
    config(tmp_path, {"kind": "scripted", "script": [""]}, retry={"bad_answer": 1})
    with pytest.raises(RollbookError, match=r"symlink|symbolic link"):
        run(tmp_path)
    assert victim.read_bytes() == PRECIOUS
    assert [path.name for path in victim.parent.iterdir()] == ["victim"]


def test_a_file_of_a_run_is_not_written_through_a_link(tmp_path: Path, victim: Path) -> None:
    link = tmp_path / "metrics.jsonl"
    link.symlink_to(victim)
    with pytest.raises(WriteError, match="is a symlink, so its lines would be written to another file"):
        JsonlWriter(link)
    write_atomic(link, b"{}")
    assert (link.read_bytes(), link.is_symlink()) == (b"{}", False)
    assert link.stat().st_mode & 0o777 != 0o777  # which is the mode of every link
    assert victim.read_bytes() == PRECIOUS


def test_a_lock_is_not_taken_through_a_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / ".x.lock").symlink_to(victim)
    with pytest.raises(WriteError, match="cannot be locked"):
        FileLock(tmp_path / "x")
    assert victim.read_bytes() == PRECIOUS


def test_the_history_is_not_written_through_a_link(tmp_path: Path, victim: Path) -> None:
    ledger = Ledger(tmp_path / "artifacts")
    ledger.artifacts.mkdir()
    victim.write_bytes(b"runs: []\n")
    (ledger.artifacts / INDEX_YAML).symlink_to(victim)
    with pytest.raises(WriteError, match=r"index\.yaml is a symlink; remove it"):
        ledger.start(RunStart(name="x", kind="sft"))
    assert victim.read_bytes() == b"runs: []\n"


def test_an_output_that_a_user_named_may_be_a_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "out.jsonl").symlink_to(victim.parent / "real.jsonl")
    small_input(tmp_path, 2)
    config(tmp_path)
    run(tmp_path)
    assert (tmp_path / "out.jsonl").is_symlink()
    assert (victim.parent / "real.jsonl").read_bytes().count(b"\n") == 2
