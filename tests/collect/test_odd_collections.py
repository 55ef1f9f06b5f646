"""Odd inputs, outputs, environments and moments to be stopped at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
import xxhash

from collecting import (
    COLLECT,
    PATIENCE,
    ROLLBOOK,
    assert_exactly_once,
    command,
    config,
    expected_keys,
    keys,
    results,
    row,
    run,
    script,
    settings,
    small_input,
    start,
    words,
    write_rows,
)
from rollbook.collect import collect as collector
from rollbook.collect.manifest import read_manifest
from rollbook.collect.output import Found, verify
from rollbook.collect.settings import encode_settings
from rollbook.errors import Interrupted, UsageError
from rollbook.policies.scripted import ScriptedPolicy
from rollbook.records.jsonl import JsonlWriter
from rollbook.rollouts.types import Completion, Request
from rollbook.runs.frames import frame


def failures(directory: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (directory / "out_failures.ndjson").read_bytes().splitlines()]


def with_env(directory: Path, source: str) -> None:
    (directory / "env.py").write_text(f"from rollbook.envs import Environment, single_turn\n\n{source}\n")
    agent = {"env": {"name": f"{directory / 'env.py'}:e"}, "policy": {"kind": "scripted", "script": ["2"]}}
    (directory / "rollbook.yaml").write_bytes(orjson.dumps({"agents": {"a": agent}}))


def test_an_input_that_cannot_be_read_is_refused_in_words(tmp_path: Path) -> None:
    config(tmp_path)
    (tmp_path / "in.jsonl").mkdir()
    with pytest.raises(UsageError, match=r"in\.jsonl: cannot be read: Is a directory"):
        run(tmp_path)


def test_a_byte_order_mark_is_named(tmp_path: Path) -> None:
    config(tmp_path)
    path = small_input(tmp_path, 2)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    with pytest.raises(UsageError, match=r"in\.jsonl:1: begins with a byte order mark; remove it: sed"):
        run(tmp_path)


@pytest.mark.parametrize("output", [".", "folder", "/dev/full"])
def test_an_output_that_is_no_file_is_refused(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    small_input(tmp_path)
    config(tmp_path)
    with pytest.raises(UsageError, match="is not a file; write it like"):
        run(tmp_path, f"output_jsonl_fpath={output}")


@pytest.mark.parametrize(
    "word", ["retry.timeout=0", "retry.first_wait_s=-1", "retry.longest_wait_s=.inf", "max_failure_rate=7"]
)
def test_settings_that_make_no_sense_are_refused(word: str, tmp_path: Path) -> None:
    small_input(tmp_path)
    config(tmp_path)
    with pytest.raises(UsageError, match=word.partition("=")[0]):
        run(tmp_path, word)


def test_putting_in_order_keeps_a_link_to_the_output(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", (row(f"t{number}") for number in (2, 1, 0)))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "elsewhere" / "real.jsonl")
    config(tmp_path)
    run(tmp_path, "limit=2")
    small_input(tmp_path, 3)
    run(tmp_path, "resume=always", "ordered=true")
    assert (tmp_path / "out.jsonl").is_symlink()
    assert keys(tmp_path / "elsewhere" / "real.jsonl") == ["t0#0", "t1#0", "t2#0"]


def test_a_failure_says_where_in_the_environment(tmp_path: Path) -> None:
    small_input(tmp_path, 1)
    with_env(tmp_path, "@single_turn\ndef e(task, answer):\n    return {}[answer]")
    run(tmp_path)
    assert failures(tmp_path)[0]["message"] == f"e.step: KeyError: '2' ({tmp_path / 'env.py'}:5)"


def test_an_environment_that_exits_is_a_failure_of_its_row(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    with_env(tmp_path, "@single_turn\ndef e(task, answer):\n    raise SystemExit(9)")
    assert run(tmp_path).failures == {"environment": 2}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", "importing .*env.py failed: ZeroDivisionError: division by zero .*env.py:3"),
        ("raise SystemExit(4)", "importing .*env.py failed: SystemExit: 4"),
        (
            "class e(Environment):\n    def __init__(self):\n        raise OSError('no database')",
            "cannot be made: OSError: no database .*env.py:5",
        ),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_in_words(
    source: str, message: str, tmp_path: Path
) -> None:
    small_input(tmp_path, 1)
    with_env(tmp_path, source)
    with pytest.raises(UsageError, match=message):
        run(tmp_path)


def test_what_an_environment_prints_is_not_in_the_result(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    with_env(tmp_path, "@single_turn\ndef e(task, answer):\n    print('hello')\n    return 1")
    done = command(tmp_path, "--json")
    assert orjson.loads(done.stdout)["done"] == 2
    assert done.stderr.count("hello") == 2


def test_a_failure_has_the_task_index_of_its_row(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", [row("t0", _ng_task_index=70)])
    config(tmp_path, script(tmp_path, "raise ValueError('no')"))
    run(tmp_path, "retry.bad_answer=1")
    assert failures(tmp_path)[0]["_ng_task_index"] == 70


def test_many_failures_are_durable_without_a_sync_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync_now = JsonlWriter._sync_now

    def noted(writer: JsonlWriter) -> None:
        synced.append(writer.path.name)
        sync_now(writer)

    monkeypatch.setattr(JsonlWriter, "_sync_now", noted)
    small_input(tmp_path, 300)
    config(tmp_path, script(tmp_path, "raise ValueError('no')"))
    progress = run(tmp_path, "retry.bad_answer=1", "max_failure_rate=1")
    assert progress.failed == len(failures(tmp_path)) == 300
    assert 1 <= synced.count("out_failures.ndjson") < 100


def test_the_mean_reward_of_a_resumed_collection_is_that_of_the_file(tmp_path: Path) -> None:
    rows = [row("t0"), row('say "#"', _ng_task_index=9), row("t2", expected_answer="3"), row("t3")]
    write_rows(tmp_path / "in.jsonl", rows)
    config(tmp_path)
    run(tmp_path, "limit=3")
    for _ in range(2):
        progress = run(tmp_path)
        assert (progress.reward_mean, progress.reward_count) == (0.75, 4)
        stored = orjson.loads((tmp_path / "out_progress.json").read_bytes())
        assert stored["reward_count"] == 4
        assert stored["reward_std"] == pytest.approx(0.5)
        assert stored["reward_std_error"] == pytest.approx(0.25)


def test_a_failure_holds_no_password_of_an_address(tmp_path: Path) -> None:
    small_input(tmp_path, 1)
    address = "http://someone:Tr0ub4dor-and-3@127.0.0.1:9/v1"
    config(tmp_path, {"kind": "openai", "base_url": address, "model": "m"})
    said: list[str] = []
    run(tmp_path, "retry.connect=1", said=said)
    (failure,) = failures(tmp_path)
    assert "127.0.0.1:9" in failure["message"]
    assert "Tr0ub4dor" not in str(failure) + str(said)


@pytest.mark.parametrize("claimed", [-1, 2**32, 2**63])
def test_tokens_that_nobody_can_believe_do_not_end_it(
    claimed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act = ScriptedPolicy.act

    async def claiming(policy: ScriptedPolicy, request: Request) -> Completion:
        completion = await act(policy, request)
        completion.usage.input_tokens = claimed
        return completion

    monkeypatch.setattr(ScriptedPolicy, "act", claiming)
    small_input(tmp_path, 3)
    config(tmp_path)
    tokens = run(tmp_path, "limit=2").input_tokens
    assert tokens == 2 * min(max(0, claimed), 2**31 - 1)
    assert run(tmp_path).input_tokens == tokens // 2 * 3


def test_tokens_and_cost_are_those_of_all_sessions(tmp_path: Path) -> None:
    small_input(tmp_path, 6)
    config(tmp_path, {"kind": "scripted", "script": ["so it is 2"]})
    prices = ("prices.input=10", "prices.output=100")
    whole = run(tmp_path, *prices)
    assert whole.output_tokens == 6 * 4
    (tmp_path / "out.jsonl").unlink()
    first = run(tmp_path, *prices, "limit=4")
    assert 0 < first.output_tokens < whole.output_tokens
    second = run(tmp_path, *prices)
    assert second.done_before == 4
    for name in ("input_tokens", "output_tokens", "cost", "reward_mean", "reward_count"):
        assert getattr(second, name) == getattr(whole, name), name


@pytest.mark.parametrize("workers", [1, 2])
def test_a_drain_lets_go_of_what_a_limit_holds_back(workers: int, tmp_path: Path) -> None:
    small_input(tmp_path, 50)
    config(tmp_path)
    words = (f"workers={workers}", "requests_per_minute=4", "num_samples_in_parallel=20")
    process = start(tmp_path, *words)  # all twenty would take five minutes
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "out.jsonl").exists() or not results(tmp_path / "out.jsonl"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    said = process.communicate(timeout=60)
    assert process.returncode == 3, said
    assert failures(tmp_path) == []
    run(tmp_path)
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(50))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_while_the_finished_file_is_checked_keeps_nothing_from_being_complete(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    small_input(tmp_path, 3)
    config(tmp_path)

    def interrupted(*arguments: Any) -> Found:
        os.kill(os.getpid(), number)
        return verify(*arguments)

    monkeypatch.setattr(collector, "verify", interrupted)
    before = signal.getsignal(number)
    progress = run(tmp_path)
    assert (progress.status, progress.missing) == ("completed", 0)
    assert f"{number.name}: checking what was collected" in capfd.readouterr().err
    assert signal.getsignal(number) == before
    content = (tmp_path / "out.jsonl").read_bytes()
    manifest = orjson.loads((tmp_path / "out_manifest.json").read_bytes())
    assert manifest["output_xxh3_128"] == xxhash.xxh3_128_hexdigest(content)
    assert (manifest["output_bytes"], manifest["coverage"]["missing"]) == (len(content), 0)


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_second_signal_ends_the_check_of_the_finished_file(
    earlier: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`earlier`: of the two, how many come while the last rollout runs."""
    small_input(tmp_path, 3)
    sends = f"os.kill({os.getpid()}, 15)\n" if earlier else ""
    config(tmp_path, script(tmp_path, f"{sends}return '2'"))

    def interrupted(*_: Any) -> None:
        for _ in range(2 - earlier):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(collector, "verify", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted):
        run(tmp_path, "limit=1")
    assert signal.getsignal(signal.SIGTERM) == before
    monkeypatch.undo()
    config(tmp_path, script(tmp_path, "return '2'"))
    assert run(tmp_path, "resume=always").missing == 0


def test_a_signal_while_the_history_is_written_leaves_it_complete(tmp_path: Path) -> None:
    """The command's own end: the signal comes when everything else is recorded."""
    small_input(tmp_path, 3)
    config(tmp_path)
    code = (
        "import os, signal\n"
        "from rollbook.cli.main import main\n"
        "from rollbook.collect.history import History\n"
        "ended = History.ended\n"
        "def interrupted(*arguments):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    ended(*arguments)\n"
        "History.ended = interrupted\n"
        "main()\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, "collect", *words(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    shown = subprocess.run(
        [*ROLLBOOK, "history", "--json", f"--artifacts={tmp_path / 'artifacts'}"],
        capture_output=True,
        timeout=PATIENCE,
        check=True,
    )
    (recorded,) = orjson.loads(shown.stdout)
    assert (recorded["status"], recorded["exit_code"]) == ("completed", 0)


def test_a_worker_whose_collector_is_gone_ends_without_a_word(tmp_path: Path) -> None:
    config(tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        worker = subprocess.run(
            [sys.executable, "-m", "rollbook.collect.worker_main"],
            input=frame(encode_settings(settings(tmp_path))),
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=PATIENCE,
            check=False,
        )
    finally:
        os.close(writing)
    assert (worker.returncode, worker.stderr) == (0, b"")


def test_two_outputs_that_differ_in_their_ending_alone_do_not_share_a_manifest(tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    config(tmp_path)
    run(tmp_path)
    before = (tmp_path / "out_manifest.json").read_bytes()
    with pytest.raises(UsageError, match=r"out_manifest\.json belongs to out\.jsonl"):
        run(tmp_path, f"output_jsonl_fpath={tmp_path / 'out.json'}")
    assert (tmp_path / "out_manifest.json").read_bytes() == before
    assert not (tmp_path / "out.json").exists()
    for name in ("out", "out_manifest", "out_progress"):  # whoever moves all may go on
        for path in tmp_path.glob(f"{name}.*"):
            path.rename(path.with_name(path.name.replace("out", "moved", 1)))
    assert run(tmp_path, f"output_jsonl_fpath={tmp_path / 'moved.jsonl'}").done_before == 3


def test_an_environment_that_goes_to_another_directory_takes_no_file_with_it(tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    (tmp_path / "elsewhere").mkdir()
    with_env(
        tmp_path,
        f"import os\nos.chdir({str(tmp_path / 'elsewhere')!r})\n\n"
        "@single_turn\ndef e(task, answer):\n    return 1",
    )
    words = ("agent_name=a", "input_jsonl_fpath=in.jsonl", "output_jsonl_fpath=out.jsonl")
    for limit in (2, 3):
        done = subprocess.run(
            [*COLLECT, *words, f"limit={limit}"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr.count("not")) == (0, 0), done.stderr
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(3))
    manifest = orjson.loads((tmp_path / "out_manifest.json").read_bytes())
    assert [session["input"] for session in manifest["sessions"]] == ["in.jsonl", "in.jsonl"]
    assert (tmp_path / "artifacts" / "index.yaml").exists()
    assert [*(tmp_path / "elsewhere").iterdir()] == []


def test_settings_that_were_mixed_knowingly_can_be_asked_for_line_by_line(tmp_path: Path) -> None:
    small_input(tmp_path, 5)
    config(tmp_path)
    temperatures = [0.1, 0.1, 0.9, 0.9, 0.1]
    for count, temperature in enumerate(temperatures, 1):
        words = (f"limit={count}", f"responses_create_params.temperature={temperature}", "resume=always")
        run(tmp_path, *words)
    manifest = read_manifest(tmp_path / "out_manifest.json")
    assert manifest is not None and len(manifest.sessions) == 5
    found, start = [], 0
    for line in (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True):
        for byte in (start, start + len(line) - 1):
            session = manifest.session_at(byte)
            assert session is not None
            found.append(session.meaning["responses_create_params"]["temperature"])
        start += len(line)
    assert found[::2] == found[1::2] == temperatures


def manifest_of(directory: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = orjson.loads((directory / "out_manifest.json").read_bytes())
    return manifest


def test_a_session_with_nothing_to_do_changes_the_meaning_of_no_row(tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    config(tmp_path)
    run(tmp_path)
    before = manifest_of(tmp_path)
    assert run(tmp_path, "resume=always", "responses_create_params.temperature=1").done_before == 3
    after = manifest_of(tmp_path)
    for name in ("meaning", "sessions", "coverage", "input_sha256"):
        assert after[name] == before[name]
    assert run(tmp_path).done == 3


def test_another_input_of_which_everything_is_done_does_not_become_that_of_the_rows(tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    config(tmp_path)
    run(tmp_path)
    before = manifest_of(tmp_path)
    other = write_rows(tmp_path / "other.jsonl", [row("t2"), row("t0")])
    assert run(tmp_path, "resume=always", f"input_jsonl_fpath={other}").done_before == 2
    assert manifest_of(tmp_path) == before
    small_input(tmp_path, 4)  # one row more, so that the manifest decides whether it goes on
    assert run(tmp_path).done_before == 3
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(4))


def test_a_session_that_wrote_no_line_leaves_no_meaning_behind(tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    broken = tmp_path / "broken"
    body = f"if pathlib.Path({str(broken)!r}).exists():\n    raise ValueError('no')\nreturn '2'"
    config(tmp_path, script(tmp_path, body))
    run(tmp_path, "limit=1")
    mixed = ("resume=always", "responses_create_params.temperature=1", "retry.bad_answer=1")
    broken.touch()
    assert run(tmp_path, *mixed).failed == 2
    broken.unlink()
    assert run(tmp_path, "limit=2").done == 2  # under the first meaning, the only one that a row has
    assert [session["output_start"] > 0 for session in manifest_of(tmp_path)["sessions"]] == [
        False,
        True,
        True,
    ]
    assert run(tmp_path, *mixed).done == 3
    with pytest.raises(UsageError, match=r"temperature: was 1, now \(absent\)"):
        run(tmp_path)
