"""Whatever a server does wrong, a collection ends complete: every key exactly once, no made-up row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from collecting import assert_exactly_once, config, expected_keys, results, row, run, write_rows
from faults.misbehaving_server import FAULTS, MisbehavingServer

ROWS = 12
QUICK = ["retry.first_wait_s=0.01", "retry.longest_wait_s=0.05", "num_samples_in_parallel=6"]
PATIENT = ["retry.bad_answer=9", "retry.timeout=9", "retry.transport=9"]
KINDS = {
    "429": "rate_limit",
    "500": "server_error",
    "garbage": "bad_answer",
    "other": "bad_answer",
    "nothing": "bad_answer",
    "half": "transport",
    "close": "transport",
    "hang": "timeout",
}


def prepared(directory: Path, server: MisbehavingServer, **policy: Any) -> Path:
    write_rows(
        directory / "in.jsonl", (row(f"t{number}", f"1 + 1, number {number}") for number in range(ROWS))
    )
    asked = {"kind": "openai", "base_url": server.url, "model": "m", "total_timeout_s": 1.0, **policy}
    config(directory, asked)
    return directory / "out.jsonl"


@pytest.mark.parametrize("workers", [1, 2])
def test_every_fault_once_for_every_task(workers: int, tmp_path: Path) -> None:
    with MisbehavingServer().serving() as server:
        output = prepared(tmp_path, server)
        progress = run(tmp_path, *QUICK, *PATIENT, "adaptive=false", f"workers={workers}")
    assert (progress.status, progress.missing, progress.failed) == ("completed", 0, 0)
    assert_exactly_once(output, expected_keys(ROWS))
    assert {line["reward"] for line in results(output)} == {1.0}
    assert progress.reward_count == ROWS
    for fault in FAULTS:
        assert server.seen[fault] == ROWS
        assert progress.failures[KINDS[fault]] >= ROWS
    assert (tmp_path / "out_failures.ndjson").read_bytes() == b""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_outlasts_its_budget_is_a_typed_failure(fault: str, tmp_path: Path) -> None:
    kind = KINDS[fault]
    said: list[str] = []
    with MisbehavingServer([fault] * 9).serving() as server:
        output = prepared(tmp_path, server, total_timeout_s=0.3 if fault == "hang" else 60)
        progress = run(tmp_path, *QUICK, "limit=2", f"retry.{kind}=2", said=said)
        assert (progress.status, progress.done, progress.failed) == ("failed", 0, 2)
        assert progress.reward_mean is None
        assert output.read_bytes() == b""
        failures = [
            orjson.loads(line) for line in (tmp_path / "out_failures.ndjson").read_bytes().splitlines()
        ]
        assert {failure["_rb_key"] for failure in failures} == {"t0#0", "t1#0"}
        for failure in failures:
            assert failure["kind"] == kind
            assert [attempt["kind"] for attempt in failure["attempts"]] == [kind, kind]
            assert failure["status"] == (int(fault) if fault.isdigit() else None)
            assert "reward" not in failure
        assert len(said) == 1 and said[0].startswith(f"first {kind} failure: ")
        server._faults, server._left = (), {}  # it recovers
        again = run(tmp_path, *QUICK, *PATIENT)
    assert (again.done, again.missing) == (ROWS, 0)
    assert_exactly_once(output, expected_keys(ROWS))


def test_retry_after_is_waited_out(tmp_path: Path) -> None:
    with MisbehavingServer(["429"], retry_after="1").serving() as server:
        prepared(tmp_path, server)
        progress = run(tmp_path, *QUICK)
    assert progress.missing == 0
    assert progress.elapsed_s >= 1.0  # what the server asked for, not our own 0.05
    assert progress.failures == {"rate_limit": ROWS}


def test_a_server_that_pushes_back_is_given_less(tmp_path: Path) -> None:
    seen: list[int] = []
    with MisbehavingServer(["500", "500", "500"]).serving() as server:
        prepared(tmp_path, server)
        from collecting import settings
        from rollbook.collect.collect import collect

        progress = collect(
            settings(tmp_path, *QUICK),
            log=lambda _: None,
            on_progress=lambda now: seen.append(now.concurrency),
        )
    assert progress.missing == 0
    assert seen[0] == 6 and seen[-1] < 6


def test_nobody_listens(tmp_path: Path) -> None:
    with MisbehavingServer().serving() as server:
        output = prepared(tmp_path, server)
    progress = run(tmp_path, *QUICK, "retry.connect=2")
    assert progress.failures == {"connect": 2 * ROWS}
    assert (progress.failed, output.read_bytes()) == (ROWS, b"")
