"""A large input is checked by several processes: the same rows, ids and line numbers as by one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from collecting import write_rows
from rollbook import forked
from rollbook.collect import input_pass
from rollbook.collect.input_check import InputCheck
from rollbook.collect.input_pass import Part, check_part
from rollbook.collect.input_rows import Agents, Checked, needed_field
from rollbook.collect.plan import Plan
from rollbook.errors import UsageError
from rollbook.records.row_blocks import line_parts
from supervision import is_gone, poll

NAMED = b'{"id":"%d","responses_create_params":{"input":"q %d"}}'
UNNAMED = b'{"answer":%d,"responses_create_params":{"input":[{"role":"user","content":"q %d"}]}}'
BAD = b'{"id":"%d","responses_create_params":{"output":"%d"}}'


def by_several(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(input_pass, "_PART_BYTES", 200)
    for module in (forked, input_pass):  # whatever threads other tests have left
        monkeypatch.setattr(module, "is_alone", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


def checked(path: Path) -> list[str] | str:
    """The ids of all rows, each looked up by its number, or what is wrong with them."""
    try:
        plan = Plan(path, limit=None, repeats=1)
    except UsageError as error:
        return str(error)
    ids = [plan.id_of(row) for row in range(plan.rows)]
    assert ids == [item.task_id for item in plan.items(None)]
    return ids


@hypothesis_settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lines=st.lists(st.sampled_from([NAMED, NAMED, NAMED, UNNAMED, BAD, b"", b"  ", b"not %d %d"])),
    has_last_newline=st.booleans(),
    processes=st.integers(2, 4),
)
def test_parts_find_what_one_pass_finds(
    lines: list[bytes], has_last_newline: bool, processes: int, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    whole = [line % (number, number) if b"%" in line else line for number, line in enumerate(lines)]
    path.write_bytes(b"\n".join(whole) + (b"\n" if has_last_newline else b""))
    alone = checked(path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        by_several(monkeypatch, processes)
        assert checked(path) == alone


def test_a_bad_row_in_every_part_is_named_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [(BAD if number in (3, 40, 97) else NAMED) % (number, number) for number in range(100)]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    by_several(monkeypatch, 3)
    message = checked(path)
    assert isinstance(message, str)
    assert "3 rows" in message
    for number in (4, 41, 98):
        assert f"in.jsonl:{number}: it has no required field `input`" in message


def test_a_part_whose_process_is_killed_is_checked_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(NAMED % (number, number) + b"\n" for number in range(100)))
    alone = checked(path)
    here = os.getpid()
    done_here: list[int] = []

    def check_or_die(path: Path, start: int = 0, *rest: Any) -> Part:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        done_here.append(start)
        return check_part(path, start, *rest)

    monkeypatch.setattr(input_pass, "check_part", check_or_die)
    by_several(monkeypatch, 3)
    assert checked(path) == alone
    parts = line_parts(path, 200)
    assert len(parts) > 3
    assert sorted(done_here) == [start for start, _ in parts]


def test_a_check_that_nobody_waits_for_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(NAMED % (number, number) + b"\n" for number in range(100)))
    begun = tmp_path / "begun"
    begun.mkdir()

    def note_and_sleep(*_: Any) -> None:
        (begun / str(os.getpid())).touch()
        time.sleep(60)

    monkeypatch.setattr(input_pass, "check_part", note_and_sleep)
    by_several(monkeypatch, 3)
    check = InputCheck(path, None)
    poll(lambda: len(list(begun.iterdir())) == 3)
    check.close()
    check.close()
    pids = [int(path.name) for path in begun.iterdir()]
    assert os.getpid() not in pids
    poll(lambda: all(is_gone(pid) for pid in pids))


def test_a_limit_reads_no_further_than_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b"".join(NAMED % (number, number) + b"\n" for number in range(10)) + b"never looked at\n"
    )
    by_several(monkeypatch, 2)
    assert Plan(path, limit=10, repeats=1).rows == 10


def test_what_sends_requests_does_not_wait_for_numpy() -> None:
    code = "import sys, rollbook.cli.collect_command, rollbook.collect.history, rollbook.collect.collector"
    found = [sys.executable, "-c", f"{code}; sys.exit('numpy' in sys.modules)"]
    assert subprocess.run(found, timeout=60).returncode == 0


def test_a_collection_by_command_is_checked_by_another_process(tmp_path: Path) -> None:
    """Which loads what it needs: the one that sends never does, until something is done."""
    (tmp_path / "rollbook.yaml").write_text(
        "agents: {a: {env: {name: 'env.py:grade'}, policy: {kind: scripted, script: ['1']}}}\n"
    )
    (tmp_path / "env.py").write_text(
        "import sys\n"
        "from rollbook.envs import single_turn\n"
        "@single_turn\n"
        "def grade(task, answer):\n"
        "    return float('numpy' in sys.modules)\n"
    )
    (tmp_path / "in.jsonl").write_bytes(NAMED % (1, 1) + b"\n")
    words = ["agent_name=a", "input_jsonl_fpath=in.jsonl", "output_jsonl_fpath=out.jsonl"]
    command = [sys.executable, "-m", "rollbook", "collect", *words]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    assert json.loads((tmp_path / "out.jsonl").read_text())["reward"] == 0.0


def test_rows_of_a_dataset_without_an_expected_answer_are_refused_together(tmp_path: Path) -> None:
    good = [{"id": f"t{number}", "answer": {"is": number}} for number in range(3)]
    lines = [*good, {"id": "none"}, {"id": "null", "answer": None}, {"id": 7, "answer": ["a"]}]
    asked = {"responses_create_params": {"input": "q"}}
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({**line, **asked}) + "\n" for line in lines))
    env = {"name": "dataset", "answer_key": "answer.is"}

    def result(env: dict[str, str]) -> Checked:
        return InputCheck(path, None, agents=Agents("a", needs=needed_field(env))).result()

    with pytest.raises(UsageError) as refused:
        result(env)
    assert "2 rows" in str(refused.value)
    assert "in.jsonl:4: it has no required field `answer`" in str(refused.value)
    assert re.search(r"in\.jsonl:5: expected .*, got `null` - at `answer`", str(refused.value))
    for other in ({"grader": "regex"}, {"name": "own.py:Env"}, {"answer_key": "id"}):
        assert len(result({**env, **other}).hashes) == 8 * len(lines)


def test_rows_of_another_shape_are_shown_a_good_one_once(tmp_path: Path) -> None:
    others = [{"prompt": "2 + 2?"}, {"messages": []}, {"question": "2 + 2?", "answer": "4"}]
    path = write_rows(tmp_path / "in.jsonl", others * 10)
    with pytest.raises(UsageError, match="30 rows") as refused:
        InputCheck(path, None).result()
    said = str(refused.value)
    (example,) = [part for part in said.splitlines() if "a good row is like this: " in part]
    write_rows(path, [json.loads(example.partition("like this: ")[2])])
    assert InputCheck(path, None).result().problems == []
