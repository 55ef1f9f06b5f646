"""The audit of collections: every planned rollout once, or failed, or missing, by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import rollbook
from collecting import config, row, run, script, start, write_rows
from helpers.tampered import balanced, cut_line, double_line, drop_line, edit_lines, edit_row, found
from rollbook.audit.result import Kind
from rollbook.cli.main import main

OUTPUT = "out.jsonl"


@pytest.fixture
def collected(tmp_path: Path) -> Path:
    """Ten tasks, three times each."""
    write_rows(tmp_path / "in.jsonl", (row(f"t{number}") for number in range(10)))
    config(tmp_path)
    assert run(tmp_path, "num_repeats=3").missing == 0
    return tmp_path / OUTPUT


def place_of(output: Path, name: str) -> Any:
    return next(place for place in rollbook.audit(output).places if place.name == name)


def test_a_whole_collection_balances(collected: Path) -> None:
    audit = balanced(collected)
    assert (audit.kind, audit.done, audit.expected, audit.unit) == ("collect", 30, 30, "rollouts")
    (place,) = audit.places
    assert (place.name, place.prompts, place.rollouts, place.reward_mean) == ("collected", 10, 30, 1.0)
    assert balanced(collected.parent).done == 30  # by its directory
    assert balanced(collected.with_name("out_manifest.json")).done == 30


def test_a_line_that_was_taken_out_is_missing_by_its_name(collected: Path) -> None:
    key = rollbook_key(collected, 7)
    drop_line(collected, 7)
    audit = rollbook.audit(collected)
    assert key in found(audit, Kind.MISSING, OUTPUT).what
    assert (audit.verdict, audit.exit_code) == ("incomplete", 3)
    assert place_of(collected, "missing").rollouts == 1


def rollbook_key(output: Path, line: int) -> str:
    import json

    key: str = json.loads(output.read_bytes().splitlines()[line - 1])["_rb_key"]
    return key


def test_a_doubled_line_is_named_with_the_first_one(collected: Path) -> None:
    double_line(collected, 7)
    audit = rollbook.audit(collected)
    finding = found(audit, Kind.DOUBLED, OUTPUT, line=8, key=rollbook_key(collected, 7))
    assert "line 7" in finding.what and "sed" in finding.next
    assert (audit.verdict, audit.exit_code) == ("unbalanced", 1)
    assert place_of(collected, "collected").rollouts == 30


def test_a_cut_line_is_unreadable_and_its_rollout_missing(collected: Path) -> None:
    key = rollbook_key(collected, 7)
    cut_line(collected, 7)
    audit = rollbook.audit(collected)
    found(audit, Kind.UNREADABLE, OUTPUT, line=7)
    assert key in found(audit, Kind.MISSING, OUTPUT).what
    assert (audit.verdict, audit.exit_code) == ("unreadable", 1)
    edit_lines(collected, lambda lines: [*lines[:6], *lines[7:]])
    edit_lines(collected, lambda lines: [*lines[:-1], lines[-1][:40]])  # torn at its end
    found(rollbook.audit(collected), Kind.UNREADABLE, OUTPUT, line=29)


def test_lines_of_another_collection_and_without_a_reward_are_named(collected: Path) -> None:
    edit_row(collected, 4, lambda line: line.update(_rb_key="other#0"))
    edit_row(collected, 5, lambda line: line.update(reward=None))
    edit_row(collected, 6, lambda line: line.update(_rb_key="t1#9"))
    audit = rollbook.audit(collected)
    found(audit, Kind.FOREIGN, OUTPUT, line=4, key="other#0")
    found(audit, Kind.DIFFERS, OUTPUT, line=5)
    found(audit, Kind.FOREIGN, OUTPUT, line=6, key="t1#9")  # three repeats were planned


def test_another_input_is_found_by_its_digest(collected: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    content = source.read_bytes()
    source.write_bytes(content.replace(b"What is 1 + 1?", b"What is 2 + 2?", 1))
    found(rollbook.audit(collected), Kind.DIFFERS, "in.jsonl")
    source.write_bytes(content + content.splitlines(keepends=True)[0].replace(b"t0", b"t10"))
    balanced(collected)  # rows were added for a later session
    source.rename(tmp_path / "moved.jsonl")
    audit = rollbook.audit(collected)
    assert audit.verdict == "balanced" and "--input" in audit.unanswered[0]
    drop_line(collected, 7)
    assert "1 of 30" in found(rollbook.audit(collected), Kind.MISSING, OUTPUT).what
    named = rollbook.audit(collected, input=tmp_path / "moved.jsonl")
    assert "#" in found(named, Kind.MISSING, OUTPUT).what


def test_failures_are_accounted_for_and_compared(tmp_path: Path) -> None:
    """Every second task is long and fails sometimes: what failed is told to be the long ones."""
    body = (
        "asked = int(request.messages[0]['content'])\n"
        "act.times = getattr(act, 'times', {})\n"
        "act.times[asked] = act.times.get(asked, 0) + 1\n"
        "if asked % 2 and act.times[asked] < 3:\n"
        "    raise ValueError('the sandbox is gone')\n"
        "return '2 ' * (40 if asked % 2 else 4)"
    )
    write_rows(tmp_path / "in.jsonl", (row(f"t{number}", str(number)) for number in range(20)))
    config(tmp_path, script(tmp_path, body))
    done = run(tmp_path, "num_repeats=4", "retry={bad_answer: 1}", "max_failure_rate=1.0")
    assert done.failed == 20
    audit = balanced(tmp_path / OUTPUT)
    assert {place.name: place.rollouts for place in audit.places} == {"collected": 60, "failed": 20}
    (compared,) = audit.comparisons
    assert compared.name == "failed" and compared.rollouts == 20
    assert compared.tokens is not None and compared.other_tokens is not None
    assert compared.tokens > 1.5 * compared.other_tokens and compared.says.startswith(
        "these are the long ones"
    )


def test_a_collection_that_was_killed_is_incomplete(tmp_path: Path) -> None:
    body = (
        "await asyncio.sleep(0.1)\n"
        "if request.messages[0]['content'] == '9' and pathlib.Path(__file__).with_name('kill').exists():\n"
        "    os.kill(os.getpid(), 9)\n"
        "return '2'"
    )
    write_rows(tmp_path / "in.jsonl", (row(f"t{number}", str(number)) for number in range(20)))
    config(tmp_path, script(tmp_path, body))
    (tmp_path / "kill").touch()
    with start(tmp_path, "num_samples_in_parallel=4") as process:
        assert process.wait(60) == -signal.SIGKILL
    audit = rollbook.audit(tmp_path / OUTPUT)
    assert (audit.verdict, audit.exit_code) == ("incomplete", 3)
    assert audit.done < 20 and all(finding.kind is Kind.MISSING for finding in audit.findings)
    (tmp_path / "kill").unlink()
    assert run(tmp_path).missing == 0
    balanced(tmp_path / OUTPUT)


def test_a_collection_that_runs_is_running(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", (row(f"t{number}", str(number)) for number in range(4)))
    body = (
        "if request.messages[0]['content'] == '3':\n"
        "    pathlib.Path('here').touch()\n"
        "    await asyncio.sleep(60)\n"
        "return '2'"
    )
    config(tmp_path, script(tmp_path, body))
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        with start(tmp_path) as process:
            try:
                while not (
                    all(
                        (tmp_path / name).exists()
                        for name in ("here", "out_progress.json", "out_manifest.json")
                    )
                ):
                    assert process.poll() is None, process.communicate()
                audit = rollbook.audit(tmp_path / OUTPUT)
            finally:
                process.kill()
    finally:
        os.chdir(here)
    assert (audit.verdict, audit.exit_code) == ("running", 3)


def test_what_is_no_collection_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [row("t1")])
    for words, said in (
        (["audit", str(path)], "rows_manifest.json"),
        (["audit", str(tmp_path / "nothing.jsonl")], "no such file"),
        (["audit", str(tmp_path)], "not a run"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
