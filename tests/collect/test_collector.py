"""The life of a collection: fresh, resumed, refused, stopped, failed; and what it leaves behind."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest

from collecting import (
    assert_exactly_once,
    command,
    config,
    expected_keys,
    keys,
    row,
    run,
    script,
    settings,
    small_input,
    start,
    write_rows,
)
from rollbook.collect import collect as collector
from rollbook.collect.collect import collect, dry_run
from rollbook.collect.generated_tasks import write_tasks
from rollbook.collect.manifest import Manifest, read_manifest
from rollbook.envs.arithmetic import Arithmetic
from rollbook.errors import BadFileError, BadLineError, LockedError, UsageError, WriteError
from rollbook.records.jsonl import JsonlWriter
from rollbook.records.progress import Progress, read_progress

WAIT = 60.0
FAILS_SOMETIMES = """
if (pathlib.Path(__file__).parent / "broken").exists():
    raise ValueError("broken")
return "2"
""".strip()


@pytest.fixture(autouse=True)
def _history_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLBOOK_ARTIFACTS", str(tmp_path / "artifacts"))


def until(condition: object, process: subprocess.Popen[str]) -> None:
    assert callable(condition)
    deadline = time.monotonic() + WAIT
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, errors = process.communicate(timeout=WAIT)
    return process.returncode, output + errors


def test_a_collection_and_its_files(tmp_path: Path) -> None:
    small_input(tmp_path, 4)
    config(tmp_path)
    shown: list[str] = []
    progress = collect(
        settings(tmp_path, "num_repeats=3", "prices.input=10", "prices.output=1e6"),
        on_progress=lambda now: shown.append(now.status),
        log=lambda _: None,
    )
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(4, 3))
    assert (progress.status, progress.done, progress.expected, progress.missing) == ("completed", 12, 12, 0)
    assert (progress.reward_mean, progress.output_tokens, progress.cost) == (
        1.0,
        12,
        pytest.approx(12.0, 0.01),
    )
    assert shown[0] == "running" and shown[-1] == "completed"
    assert read_progress(tmp_path / "out_progress.json") == progress
    manifest = read_manifest(tmp_path / "out_manifest.json")
    assert manifest is not None
    assert manifest.coverage == {"expected": 12, "ok": 12, "failed": 0, "missing": 0}
    (session,) = manifest.sessions
    assert session.meaning["agent"]["env"]["name"] == "arithmetic"
    assert (session.output_start, session.rows, session.repeats) == (0, 4, 3)
    assert not list(tmp_path.glob(".*"))


def test_progress_is_right_after_a_resume(tmp_path: Path) -> None:
    small_input(tmp_path, 10)
    config(tmp_path)
    run(tmp_path, "limit=4")
    progress = run(tmp_path)
    assert (progress.done_before, progress.done, progress.missing) == (4, 10, 0)
    assert (progress.reward_count, progress.output_tokens) == (10, 10)  # of all sessions
    manifest = read_manifest(tmp_path / "out_manifest.json")
    assert manifest is not None
    first = len(b"".join((tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)[:4]))
    assert [(one.rows, one.output_start) for one in manifest.sessions] == [(4, 0), (10, first)]
    before = (tmp_path / "out.jsonl").read_bytes()
    again = run(tmp_path)
    assert (again.done_before, again.done, again.status) == (10, 10, "completed")
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_more_repeats_and_fewer(tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    config(tmp_path)
    run(tmp_path)
    assert run(tmp_path, "num_repeats=4").done_before == 3
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(3, 4))
    fewer = run(tmp_path, "num_repeats=2")
    assert (fewer.expected, fewer.done) == (6, 6)
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(3, 4))


def test_a_torn_last_line_is_collected_again(tmp_path: Path) -> None:
    small_input(tmp_path, 5)
    config(tmp_path)
    run(tmp_path)
    output = tmp_path / "out.jsonl"
    output.write_bytes(output.read_bytes()[:-20])
    progress = run(tmp_path)
    assert (progress.done_before, progress.done) == (4, 5)
    assert_exactly_once(output, expected_keys(5))


def test_a_damaged_output_is_not_written_to(tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    config(tmp_path)
    run(tmp_path, "limit=2")
    output = tmp_path / "out.jsonl"
    output.write_bytes(output.read_bytes() * 2)
    damaged = output.read_bytes()
    with pytest.raises(BadLineError, match=r"out\.jsonl:3: line 1 has the same key"):
        run(tmp_path)
    assert output.read_bytes() == damaged


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("agents.a.env.max_value=7", "meaning.agent.env.max_value: "),
        ("agents.a.policy.script=['3']", "meaning.agent.policy.script"),
        ("responses_create_params.temperature=1", "meaning.responses_create_params.temperature"),
        ("num_repeats_add_seed=true", "meaning.num_repeats_add_seed: was False, now True"),
        ("agents.a.max_turns=3", "meaning.agent.max_turns: was 64, now 3"),
    ],
)
def test_drift_is_refused_by_the_keys_that_differ(words: str, key: str, tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    config(tmp_path)
    run(tmp_path, "limit=1")
    before = (tmp_path / "out_manifest.json").read_bytes()
    with pytest.raises(UsageError) as raised:
        run(tmp_path, words)
    assert key in str(raised.value)
    assert "--resume=always" in str(raised.value)
    assert (tmp_path / "out_manifest.json").read_bytes() == before
    assert run(tmp_path, words, "resume=always").done == 2


def test_a_built_in_environment_has_a_version_and_resumes_from_a_digest_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_input(tmp_path, 3)
    config(tmp_path)
    run(tmp_path, "limit=1")
    path = tmp_path / "out_manifest.json"
    manifest = orjson.loads(path.read_bytes())
    (session,) = manifest["sessions"]
    assert session["meaning"]["agent"]["env"] == {"name": "arithmetic", "version": 1}
    session["meaning"]["agent"]["env"] = {"name": "arithmetic", "source_sha256": "of the words of its day"}
    path.write_bytes(orjson.dumps(manifest))
    assert run(tmp_path, "limit=2").done_before == 1
    monkeypatch.setattr(Arithmetic, "version", 2)
    for stored in ({"version": 1}, {"source_sha256": "of the words of its day"}):
        session["meaning"]["agent"]["env"] = {"name": "arithmetic", **stored}
        path.write_bytes(orjson.dumps(manifest))
        with pytest.raises(UsageError, match=r"meaning\.agent\.env\.version: was 1, now 2"):
            run(tmp_path)


def test_how_fast_and_where_may_change_freely(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    config(tmp_path)
    run(tmp_path, "limit=1")
    words = ("num_samples_in_parallel=1", "retry.timeout=9", "agents.a.policy.delay=0.001")
    assert run(tmp_path, *words).done == 2


def test_resume_never(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    config(tmp_path)
    run(tmp_path, "resume=never")
    with pytest.raises(UsageError, match=r"out\.jsonl exists; choose another"):
        run(tmp_path, "resume=never")


def test_an_output_that_is_not_ours_is_left_as_it_is(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    config(tmp_path)
    (tmp_path / "out.jsonl").write_bytes(b'{"somebody": "else"}\n{"no": "newline"}')
    with pytest.raises(UsageError, match="is no output of `rollbook collect`"):
        run(tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes().endswith(b'{"no": "newline"}')


def test_always_looks_keys_up_when_the_input_is_another(tmp_path: Path) -> None:
    small_input(tmp_path, 4)
    config(tmp_path)
    run(tmp_path)
    write_rows(tmp_path / "in.jsonl", [row("t3", "changed"), row("new"), row("t0")])
    progress = run(tmp_path, "resume=always")
    assert (progress.done_before, progress.done, progress.expected) == (2, 3, 3)
    assert_exactly_once(tmp_path / "out.jsonl", {*expected_keys(4), "new#0"})
    assert run(tmp_path).done_before == 3  # by the new manifest


def test_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    config(tmp_path)
    run(tmp_path)
    (tmp_path / "out_manifest.json").write_text("{")
    with pytest.raises(BadFileError, match=r"out_manifest\.json: not a manifest"):
        run(tmp_path)


def test_tasks_of_the_environments_own(tmp_path: Path) -> None:
    config(tmp_path)
    words = ("input_jsonl_fpath=null", "limit=3")
    assert run(tmp_path, *words).done == 3
    tasks = (tmp_path / "out_tasks.ndjson").read_bytes()
    assert run(tmp_path, "input_jsonl_fpath=null", "limit=5").done_before == 3
    assert (tmp_path / "out_tasks.ndjson").read_bytes().startswith(tasks)
    with pytest.raises(UsageError, match=r"meaning\.seed: was 0, now 1"):
        run(tmp_path, *words, "seed=1")
    with pytest.raises(UsageError, match="the environment now makes other tasks"):
        run(tmp_path, "input_jsonl_fpath=null", "limit=9", "seed=1", "resume=always")
    assert run(tmp_path, "input_jsonl_fpath=null", "limit=5").done == 5
    with pytest.raises(UsageError, match="input_jsonl_fpath is missing"):
        run(tmp_path, "input_jsonl_fpath=null")


def test_tasks_that_cannot_be_made_to_the_end_leave_the_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "out_tasks.ndjson"
    write_tasks(path, (row(f"t{number}") for number in range(3)))
    before = path.read_bytes()

    def fails() -> Iterator[dict[str, object]]:
        yield from (row(f"t{number}") for number in range(4))
        assert path.read_bytes() == before, "the new ones are not written aside"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_tasks(path, fails(), old=path)
    for others in ([row("t0")], [row("t0"), row("other"), row("t2")]):
        with pytest.raises(UsageError, match="the environment now makes other tasks"):
            write_tasks(path, others, old=path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    write_tasks(path, (row(f"t{number}") for number in range(9)), old=path)
    assert path.read_bytes().startswith(before) and lines_in(path) == 9


def test_a_slow_disk_loses_no_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sync is still waiting for it when everything is collected."""
    small_input(tmp_path, 20)
    config(tmp_path, script(tmp_path, "await asyncio.sleep(random.uniform(0.0, 0.2))\nreturn '2'"))
    sync, counted = JsonlWriter._sync_now, []

    def slow(writer: JsonlWriter) -> None:
        time.sleep(0.05)
        sync(writer)

    monkeypatch.setattr(JsonlWriter, "_sync_now", slow)
    monkeypatch.setattr(collector, "_REPORT_EVERY_S", 0.01)
    progress = collect(
        settings(tmp_path), log=lambda _: None, on_progress=lambda now: counted.append(now.done)
    )
    assert (progress.status, progress.done) == ("completed", 20)
    assert counted == sorted(counted)


def test_failures_are_typed_records_without_rewards(tmp_path: Path) -> None:
    small_input(tmp_path, 6)
    config(tmp_path, script(tmp_path, FAILS_SOMETIMES))
    (tmp_path / "broken").touch()
    progress = run(tmp_path, "retry.bad_answer=2", "retry.first_wait_s=0.001")
    assert (progress.status, progress.failed, progress.missing) == ("failed", 6, 6)
    assert (progress.failures, progress.reward_mean) == ({"bad_answer": 12}, None)
    failures = [orjson.loads(line) for line in (tmp_path / "out_failures.ndjson").read_bytes().splitlines()]
    assert {failure["_rb_key"] for failure in failures} == expected_keys(6)
    for failure in failures:
        assert (failure["kind"], len(failure["attempts"])) == ("bad_answer", 2)
        assert "ValueError: broken" in failure["message"]
        assert "reward" not in failure
    (tmp_path / "broken").unlink()
    assert run(tmp_path).missing == 0
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(6))


def test_too_many_failures_stop_it_after_enough_samples(tmp_path: Path) -> None:
    small_input(tmp_path, 60)
    config(tmp_path, script(tmp_path, FAILS_SOMETIMES))
    (tmp_path / "broken").touch()
    words = ("retry.bad_answer=1", "num_samples_in_parallel=1", "max_failure_rate=0.3", "min_samples=20")
    progress = run(tmp_path, *words)
    assert (progress.status, progress.failed) == ("failed", 20)
    assert "20 of 20 rollouts failed, more than max_failure_rate=0.3" in (progress.reason or "")


def test_a_few_failures_do_not_stop_it(tmp_path: Path) -> None:
    small_input(tmp_path, 20)
    body = "if 'fail' in request.messages[0]['content']:\n    raise ValueError('broken')\nreturn '2'"
    rows = [row(f"t{number}", "fail" if number < 5 else "fine") for number in range(20)]
    write_rows(tmp_path / "in.jsonl", rows)
    config(tmp_path, script(tmp_path, body))
    progress = run(tmp_path, "retry.bad_answer=1", "max_failure_rate=0.3", "min_samples=6")
    assert progress.failed in range(1, 6)
    full = run(tmp_path, "retry.bad_answer=1", "max_failure_rate=0.3", "min_samples=30")
    assert (full.done, full.failed, full.reason) == (15, 5, None)


def test_stop_after_drains(tmp_path: Path) -> None:
    small_input(tmp_path, 1000)
    config(tmp_path, script(tmp_path, "await asyncio.sleep(0.02)\nreturn '2'"))
    progress = run(tmp_path, "stop_after=0.3s", "num_samples_in_parallel=4")
    assert 0 < progress.done < 1000
    assert (progress.status, progress.in_flight, progress.reason) == (
        "interrupted",
        0,
        "stop_after=0.3s is over",
    )
    assert len(keys(tmp_path / "out.jsonl")) == progress.done


def test_a_second_collector_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    small_input(tmp_path, 1000)
    config(tmp_path, script(tmp_path, "await asyncio.sleep(0.05)\nreturn '2'"))
    first = start(tmp_path, "num_samples_in_parallel=2")
    try:
        until(lambda: lines_in(tmp_path / "out.jsonl") > 2, first)
        with pytest.raises(LockedError, match=f"is being written by another process .pid {first.pid}, "):
            run(tmp_path)
        second = command(tmp_path)
        assert second.returncode == 1
        assert f"pid {first.pid}" in second.stderr
    finally:
        first.terminate()
        code, _ = end(first)
    assert code == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_leaves_it_resumable(number: signal.Signals, tmp_path: Path) -> None:
    small_input(tmp_path, 40)
    config(tmp_path, script(tmp_path, "await asyncio.sleep(0.1)\nreturn '2'"))
    process = start(tmp_path, "num_samples_in_parallel=4")
    until(lambda: lines_in(tmp_path / "out.jsonl") >= 4, process)
    process.send_signal(number)
    code, said = end(process)
    assert code == 3
    assert f"{number.name}: starting no new rollouts" in said
    assert f"{number.name} received; rerun the same command to resume" in said
    done = read_progress(tmp_path / "out_progress.json").done
    assert done == len(keys(tmp_path / "out.jsonl")) < 40
    config(tmp_path, script(tmp_path, "await asyncio.sleep(0.1)\nreturn '2'"))
    again = command(tmp_path, "num_samples_in_parallel=40")
    assert again.returncode == 0, again.stderr
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(40))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_signal_stops_at_once(workers: int, tmp_path: Path) -> None:
    small_input(tmp_path, 8)
    body = "pathlib.Path(__file__).with_name('asked').touch()\nawait asyncio.sleep(3600)"
    config(tmp_path, script(tmp_path, body))
    process = start(tmp_path, "num_samples_in_parallel=4", f"workers={workers}")
    until((tmp_path / "asked").exists, process)
    process.terminate()
    assert process.stderr is not None
    assert any("waiting for 4 in flight" in line for line in process.stderr)
    process.terminate()
    code, said = end(process)
    assert code == 130
    assert "stopped at once; rerun the same command to resume" in said
    assert "Traceback" not in said
    assert read_progress(tmp_path / "out_progress.json").status == "interrupted"


def test_a_third_signal_ends_what_a_grader_holds_up(tmp_path: Path) -> None:
    small_input(tmp_path, 4)
    (tmp_path / "own.py").write_text(
        "import pathlib\nfrom rollbook.envs import single_turn\n\n@single_turn\ndef endless(task, answer):\n"
        "    pathlib.Path(__file__).with_name('asked').touch()\n    while True:\n        pass\n"
    )
    config(tmp_path)
    process = start(tmp_path, f"agents.a.env.name={tmp_path / 'own.py'}:endless")
    until((tmp_path / "asked").exists, process)
    deadline = time.monotonic() + WAIT
    while process.poll() is None:  # again and again: two at once may be heard as one
        assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    code, said = end(process)
    assert code == 130
    assert "SIGINT: starting no new rollouts" in said and "SIGINT: ended; rerun the same command" in said


def test_exit_codes_and_a_log_without_carriage_returns(tmp_path: Path) -> None:
    small_input(tmp_path, 4)
    body = FAILS_SOMETIMES.replace('"broken")\n', '"broken\\r\\x1b[2Jbroken")\n')
    config(tmp_path, script(tmp_path, body))
    (tmp_path / "broken").touch()
    incomplete = command(tmp_path, "retry.bad_answer=1")
    assert incomplete.returncode == 3
    assert "rollouts:   0 of 4, 0.0 %, 4 missing" in incomplete.stdout
    assert "failures:   4 given up; attempts by kind: bad_answer 4" in incomplete.stdout
    (tmp_path / "broken").unlink()
    complete = command(tmp_path)
    assert complete.returncode == 0
    assert "reward:     1 ± 0, mean over 4 rollouts" in complete.stdout
    assert "Collecting rollouts: 4 of 4, " in complete.stderr  # what people look for in a log
    wrong = command(tmp_path, "num_repeat=2")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "did you mean 'num_repeats'?" in wrong.stderr
    for ended in (incomplete, complete, wrong):
        assert "\r" not in ended.stdout + ended.stderr
        assert "\x1b" not in ended.stdout + ended.stderr


def test_json(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    config(tmp_path)
    ended = command(tmp_path, "--json", "--resume=never")
    assert ended.returncode == 0
    assert orjson.loads(ended.stdout)["done"] == 2
    assert ended.stderr == ""


def test_the_manifest_is_there_before_the_first_request(tmp_path: Path) -> None:
    """Lines without a manifest could not be resumed."""
    small_input(tmp_path, 4)
    config(tmp_path)
    began: list[bool] = []
    manifest = tmp_path / "out_manifest.json"
    collect(settings(tmp_path), log=lambda _: None, on_start=lambda _: began.append(manifest.exists()))
    assert began == [True]


def test_without_its_manifest_a_collection_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_input(tmp_path, 4)
    config(tmp_path)

    def fail(manifest: Manifest) -> None:
        raise WriteError(f"{manifest.path}: No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(Manifest, "_write", fail)
        with pytest.raises(WriteError, match="No space left"):
            collect(settings(tmp_path), log=lambda _: None)
    assert lines_in(tmp_path / "out.jsonl") == 0
    collect(settings(tmp_path), log=lambda _: None)
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(4, 1))


def test_the_journal_of_an_earlier_version_is_removed(tmp_path: Path) -> None:
    small_input(tmp_path, 4)
    config(tmp_path)
    run(tmp_path, "limit=2")
    (tmp_path / "out_journal.bin").write_bytes(bytes(64))
    assert run(tmp_path).done_before == 2
    assert not (tmp_path / "out_journal.bin").exists()


def test_it_works_in_a_running_event_loop_and_in_a_thread(tmp_path: Path) -> None:
    small_input(tmp_path, 6)
    config(tmp_path)

    async def notebook() -> Progress:
        return run(tmp_path, "limit=2")

    assert asyncio.run(notebook()).done == 2
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run, tmp_path, "limit=4").result().done == 4


CLOSES = """
import pathlib
from rollbook.envs import Environment, Feedback

class Shared:
    def close(self):
        pathlib.Path(__file__).with_name("closed").touch()

class Own(Environment):
    def __init__(self, shared=None): ...

    @classmethod
    def shared(cls, **settings):
        return {"shared": Shared()}

    def step(self, message):
        return Feedback(reward=1.0)
"""


@pytest.mark.parametrize("begin", ["refused", "dry run", "collected"])
def test_what_an_environment_shares_is_closed_however_it_ends(begin: str, tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    config(tmp_path)
    (tmp_path / "own.py").write_text(CLOSES)
    own = f"agents.a.env.name={tmp_path / 'own.py'}:Own"
    if begin == "refused":
        (tmp_path / "in.jsonl").write_text("{}\n")
        with pytest.raises(UsageError):
            run(tmp_path, own)
    elif begin == "dry run":
        dry_run(settings(tmp_path, own))
    else:
        run(tmp_path, own)
    assert (tmp_path / "closed").exists()
