"""Collections that are refused, in words that say what to type; and what is told of those that are not."""

from __future__ import annotations

import asyncio
import gzip
import os
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from collecting import (
    command,
    config,
    keys,
    results,
    row,
    run,
    script,
    settings,
    small_input,
    words,
    write_rows,
)
from fake_servers import Told, chat_answer, serving
from rollbook.cli.collection_status import progress_of_output, report_of_output
from rollbook.cli.main import main
from rollbook.collect.collect import collect, dry_run
from rollbook.errors import LockedError, RollbookError, UsageError
from rollbook.records.locks import FileLock

SCRIPTED = {"kind": "scripted", "script": ["2"]}


def files_of(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {"in.jsonl", "rollbook.yaml"}


@pytest.mark.parametrize(
    "agent",
    [
        {"env": {"name": "dataset", "grader": "fuzzy"}, "policy": SCRIPTED},
        {
            "env": {"name": "arithmetic"},
            "policy": {"base_url": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": "NO_SUCH_VARIABLE"},
        },
        {"env": {"name": "arithmetic"}},
    ],
    ids=["grader", "key", "policy"],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_refused_agent_leaves_no_files(agent: dict[str, Any], workers: int, tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    (tmp_path / "rollbook.yaml").write_text(yaml.safe_dump({"agents": {"a": agent}}))
    with pytest.raises(UsageError):
        run(tmp_path, f"workers={workers}")
    assert files_of(tmp_path) == set()


def test_a_refused_agent_that_would_make_its_tasks_leaves_no_files(tmp_path: Path) -> None:
    agent = {"env": {"name": "arithmetic"}}
    (tmp_path / "rollbook.yaml").write_text(yaml.safe_dump({"agents": {"a": agent}}))
    with pytest.raises(UsageError, match="needs a policy"):
        run(tmp_path, "input_jsonl_fpath=null", "limit=3")
    assert files_of(tmp_path) == set()


def test_a_collection_that_is_refused_by_the_lock_does_not_change_the_tasks_of_the_other(
    tmp_path: Path,
) -> None:
    config(tmp_path)
    tasks = tmp_path / "out_tasks.ndjson"
    tasks.write_text("of the first\n")
    lock = FileLock(tmp_path / "out.jsonl")
    try:
        with pytest.raises(LockedError):
            run(tmp_path, "input_jsonl_fpath=null", "limit=3", "seed=1")
    finally:
        lock.release()
    assert tasks.read_text() == "of the first\n"


def test_tasks_of_our_own_are_left_alone_when_other_settings_are_refused(tmp_path: Path) -> None:
    config(tmp_path)
    own = ("input_jsonl_fpath=null", "max_failure_rate=1")
    run(tmp_path, *own, "limit=3")
    before = (tmp_path / "out_tasks.ndjson").read_bytes()
    with pytest.raises(UsageError, match="temperature"):
        run(tmp_path, *own, "limit=5", "responses_create_params.temperature=1")
    assert (tmp_path / "out_tasks.ndjson").read_bytes() == before


def test_a_file_that_is_called_as_the_tasks_would_be_is_not_written_over(tmp_path: Path) -> None:
    config(tmp_path)
    mine = write_rows(tmp_path / "out_tasks.ndjson", [row("mine")])
    before = mine.read_bytes()
    own = settings(tmp_path, "input_jsonl_fpath=null", "limit=3")
    for begin in (collect, dry_run):
        with pytest.raises(UsageError, match=r"out_tasks\.ndjson exists.* add input_jsonl_fpath="):
            begin(own)
    assert mine.read_bytes() == before


def test_tasks_that_a_killed_session_left_are_gone_on_with(tmp_path: Path) -> None:
    config(tmp_path)
    own = ("input_jsonl_fpath=null", "limit=3", "max_failure_rate=1")
    run(tmp_path, *own)
    (tmp_path / "out.jsonl").unlink()
    (tmp_path / "out_manifest.json").unlink()
    assert run(tmp_path, *own).done == 3


@pytest.mark.parametrize("name", ["out.jsonl", "out_failures.ndjson"])
def test_an_input_that_the_collection_would_write_to_is_refused(name: str, tmp_path: Path) -> None:
    config(tmp_path)
    mine = write_rows(tmp_path / name, [row("mine")])
    before = mine.read_bytes()
    with pytest.raises(UsageError, match=f"input_jsonl_fpath=.*{name} is a file that a collection into"):
        run(tmp_path, f"input_jsonl_fpath={mine}", "resume=always")
    assert mine.read_bytes() == before


def test_an_output_of_others_is_no_output_to_go_on_with(tmp_path: Path) -> None:
    small_input(tmp_path)
    config(tmp_path)
    theirs = write_rows(tmp_path / "out.jsonl", [row("theirs", reward=1.0)])
    before = theirs.read_bytes()
    with pytest.raises(UsageError, match=r"is no output of .*; choose another output_jsonl_fpath$"):
        run(tmp_path, "resume=always")
    assert theirs.read_bytes() == before


def test_an_environment_whose_code_was_edited_is_told_as_that(tmp_path: Path) -> None:
    small_input(tmp_path)
    grader = tmp_path / "grader.py"
    head = "from rollbook.envs.base import single_turn\n@single_turn\ndef grade(task, answer):\n"
    agent = {"env": {"name": f"{grader}:grade"}, "policy": SCRIPTED}
    (tmp_path / "rollbook.yaml").write_text(yaml.safe_dump({"agents": {"a": agent}}))
    grader.write_text(f"{head}    return 1.0\n")
    run(tmp_path, "limit=1")
    grader.write_text(f"{head}    return 0.5\n")
    with pytest.raises(UsageError, match="code was edited; rollbook data reverify grades"):
        run(tmp_path)


def test_what_yaml_has_and_records_have_not_is_text(tmp_path: Path) -> None:
    text = "agents: {a: {env: {name: e.py:E, weights: {1: 0.5}, since: 2024-01-01}, policy: {most: %s}}}\n"
    (tmp_path / "rollbook.yaml").write_text(text % "[1.5]")
    agent = settings(tmp_path).agent
    assert (agent.env["weights"], agent.env["since"]) == ({"1": 0.5}, "2024-01-01")
    (tmp_path / "rollbook.yaml").write_text(text % "[.inf]")
    with pytest.raises(UsageError, match=r"agents\.a\.policy\.most\.0 must be a finite number"):
        settings(tmp_path)


def test_an_agent_without_any_turn_is_refused(tmp_path: Path) -> None:
    small_input(tmp_path)
    agent = {"env": {"name": "arithmetic"}, "policy": SCRIPTED, "max_turns": 0}
    (tmp_path / "rollbook.yaml").write_text(yaml.safe_dump({"agents": {"a": agent}}))
    with pytest.raises(UsageError, match="max_turns is 0; it must be at least 1"):
        run(tmp_path)


def test_a_refused_collection_leaves_no_new_directory(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", [{"id": "t0"}])
    config(tmp_path)
    with pytest.raises(UsageError, match=r"in\.jsonl:1: "):
        run(tmp_path, f"output_jsonl_fpath={tmp_path / 'new' / 'deep' / 'out.jsonl'}")
    assert files_of(tmp_path) == set()


@pytest.mark.parametrize(
    ("agents", "said"),
    [
        (["a", "b"], "agents: "),
        ({"a": 3}, r"agents\.a: "),
        ({"b": {"env": "arithmetic", "policy": SCRIPTED}, "a": {"env": {}}}, r"agents\.b\.env: "),
    ],
)
def test_agents_of_another_shape_are_refused_by_their_name(agents: Any, said: str, tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    (tmp_path / "rollbook.yaml").write_text(yaml.safe_dump({"agents": agents}))
    with pytest.raises(UsageError, match=said):
        run(tmp_path)


@pytest.mark.parametrize("name", ["1", "2026-01-01", "1e3"])
def test_an_agent_may_be_called_what_yaml_takes_for_something_else(name: str, tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    agent = yaml.safe_dump({"env": {"name": "arithmetic"}, "policy": SCRIPTED}, default_flow_style=True)
    (tmp_path / "rollbook.yaml").write_text(f"agents:\n  {name}: {agent}")
    assert run(tmp_path, f"agent_name={name}").missing == 0


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("engine=rayy", "engine: .*'rayy'.* local, ray"),
        ("resume=sometimes", "resume: .*'sometimes'.* never, if-possible, always"),
        ("agents.a.policy.kind=openai", "policy"),
        ("prices.input=-1", "prices"),
    ],
)
def test_a_value_that_is_not_among_those_possible(word: str, said: str, tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    config(tmp_path)
    with pytest.raises(UsageError, match=said):
        run(tmp_path, word, *(["prices.output=1"] if word.startswith("prices") else []))


def two_agents(directory: Path) -> None:
    agent = {"env": {"name": "arithmetic"}, "policy": SCRIPTED}
    (directory / "rollbook.yaml").write_text(yaml.safe_dump({"agents": {"a": agent, "b": agent}}))


@pytest.mark.parametrize("blank", [b"", b"\n"], ids=["by the block", "by the line"])
def test_rows_of_another_agent_are_refused_by_their_lines(blank: bytes, tmp_path: Path) -> None:
    """A row's own agent would win where these files come from; here one agent does all rows."""
    two_agents(tmp_path)
    path = write_rows(
        tmp_path / "in.jsonl",
        [row("t0", agent_ref={"name": "a"}), row("t1", agent_ref={"name": "b"}), row("t2")],
    )
    path.write_bytes(path.read_bytes() + blank)
    with pytest.raises(UsageError, match=r"1 row .*\n.*in\.jsonl:2: its agent_ref names 'b'; .*agent_name=b"):
        run(tmp_path)
    assert files_of(tmp_path) == set()
    assert run(tmp_path, "limit=1").done == 1


@pytest.mark.parametrize("blank", [b"", b"\n"], ids=["by the block", "by the line"])
def test_agents_that_are_not_known_here_are_named_once(blank: bytes, tmp_path: Path) -> None:
    two_agents(tmp_path)
    refs: list[Any] = [{"name": "x"}, {"name": "x", "type": "y"}, {"name": 3}, "b", None, {"name": "a"}]
    rows = [row(f"t{number}", agent_ref=ref) for number, ref in enumerate(refs)]
    path = write_rows(tmp_path / "in.jsonl", rows)
    path.write_bytes(path.read_bytes() + blank)
    said: list[str] = []
    assert run(tmp_path, said=said).done == 6
    assert len(said) == 1
    assert "agent_ref x, which `agents:` does not define; agent a runs them" in said[0]


def test_words_may_be_quoted_and_null_is_none(tmp_path: Path) -> None:
    """As the shell recipes have them: "+input_jsonl_fpath='my tasks.jsonl'", +input_jsonl_fpath=null."""
    small_input(tmp_path, 2).rename(tmp_path / "my tasks.jsonl")
    config(tmp_path)
    assert run(tmp_path, f"+input_jsonl_fpath='{tmp_path}/my tasks.jsonl'", '+agent_name="a"').done == 2
    assert settings(tmp_path, "+input_jsonl_fpath=null", "limit=3").input_jsonl_fpath is None


def test_null_stands_for_the_default(tmp_path: Path) -> None:
    config(tmp_path, num_repeats=3)
    given = settings(tmp_path, "+num_samples_in_parallel=null", "num_repeats=null", "retry=null")
    assert given == settings(tmp_path, "num_repeats=1")
    with pytest.raises(UsageError, match="num_repeats is empty"):
        settings(tmp_path, "num_repeats=")
    with pytest.raises(UsageError, match="unknown key 'num_repeat'"):
        settings(tmp_path, "num_repeat=null")


@pytest.mark.parametrize(
    ("word", "meant"), [("temperature=0.5", "temperature=0.5"), ("+max_tokens=9", "max_output_tokens=9")]
)
def test_a_parameter_of_the_model_is_told_where_to_stand(word: str, meant: str, tmp_path: Path) -> None:
    config(tmp_path)
    with pytest.raises(UsageError, match=rf"unknown key .*: responses_create_params\.{meant}$"):
        settings(tmp_path, word)


def test_an_output_without_its_manifest_names_the_way_on(tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    config(tmp_path)
    run(tmp_path, "limit=2")
    (tmp_path / "out_manifest.json").unlink()
    with pytest.raises(UsageError, match="--resume=always"):
        run(tmp_path)
    assert run(tmp_path, "resume=always").done_before == 2


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl"])
def test_a_compressed_input_is_refused_with_what_to_type(name: str, tmp_path: Path) -> None:
    config(tmp_path)
    path = tmp_path / name
    path.write_bytes(gzip.compress(small_input(tmp_path, 3).read_bytes()))
    plain = tmp_path / ("in.jsonl" if name.endswith(".gz") else "plain_in.jsonl")
    with pytest.raises(UsageError, match=re.escape(f"type zcat {path} > {plain} ")):
        run(tmp_path, f"input_jsonl_fpath={path}")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("o.parquet", "/o.jsonl$"),
        ("o.jsonl.gz", "/o.jsonl$"),
        ("o.ZST", "/o.jsonl$"),
        ("o.jsonl.bz2", "/o.jsonl$"),
        ("o.v2.xz", "/o.v2.jsonl$"),
        ("o.csv", "/o.jsonl$"),
        ("o.arrow", "/o.jsonl$"),
    ],
)
def test_an_output_named_as_another_format_is_refused(name: str, said: str, tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    config(tmp_path)
    with pytest.raises(UsageError, match=rf"not as {Path(name).suffix.lower()}; write .*{said}"):
        run(tmp_path, f"output_jsonl_fpath={tmp_path / name}")
    assert files_of(tmp_path) == set()


def test_a_pipe_is_refused_with_what_to_do(tmp_path: Path) -> None:
    config(tmp_path)
    os.mkfifo(tmp_path / "in.jsonl")
    with pytest.raises(UsageError, match=r"in\.jsonl is a pipe, .* write it to a file first"):
        run(tmp_path)


def test_an_input_that_is_an_empty_word_is_not_taken_for_none(tmp_path: Path) -> None:
    """`+input_jsonl_fpath=$INPUT` with a variable that is not set must not collect tasks of our own."""
    config(tmp_path)
    with pytest.raises(UsageError, match="input_jsonl_fpath is empty"):
        run(tmp_path, "+input_jsonl_fpath=", "limit=3")


def test_an_output_below_a_file_is_refused_in_words(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    config(tmp_path)
    with pytest.raises(RollbookError, match="Not a directory"):
        run(tmp_path, f"output_jsonl_fpath={tmp_path / 'in.jsonl' / 'out.jsonl'}")


@pytest.mark.parametrize(
    "params",
    [
        {"input": "q", "tools": "calculator"},
        {"input": "q", "metadata": "x"},
        {"input": "q", "instructions": 3},
        {"input": [5]},
        {"input": [None]},
    ],
)
def test_parameters_of_another_shape_are_named_by_their_line_before_anything_is_sent(
    params: dict[str, Any], tmp_path: Path
) -> None:
    write_rows(tmp_path / "in.jsonl", [row("t0"), row("t1", responses_create_params=params)])
    config(tmp_path)
    with pytest.raises(UsageError, match=r"in\.jsonl:2: "):
        run(tmp_path)
    assert files_of(tmp_path) == set()


@pytest.mark.parametrize(
    "params", [{"input": "q", "tools": ["x"]}, {"input": "q", "metadata": {"extra_body": "{"}}]
)
def test_what_only_shows_when_it_is_asked_is_an_invalid_request(
    params: dict[str, Any], tmp_path: Path
) -> None:
    write_rows(tmp_path / "in.jsonl", [row("t0"), row("t1", responses_create_params=params)])
    policy = {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "m"}
    config(tmp_path, policy)
    assert run(tmp_path, "retry.connect=1").failures == {"connect": 1, "invalid_request": 1}


def test_what_was_not_put_in_order_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "in.jsonl", [row("t0", "fail"), row("t1")])
    body = "if 'fail' in request.messages[0]['content']:\n    raise ValueError('no')\nreturn '2'"
    config(tmp_path, script(tmp_path, body))
    for asked, said in ((["--ordered"], True), ([], False)):
        with pytest.raises(SystemExit) as ended:
            main(["collect", *words(tmp_path, "retry.bad_answer=1", *asked)])
        assert ended.value.code == 3
        assert ("not in input order yet" in capsys.readouterr().out) is said
    assert keys(tmp_path / "out.jsonl") == ["t1#0"]


@pytest.mark.parametrize("name", ["rollouts.json", "rollouts", "out.jsonl", "rollouts_progress.json"])
def test_the_status_of_an_output_of_any_ending(name: str, tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    config(tmp_path)
    run(tmp_path, f"output_jsonl_fpath={tmp_path / name.replace('_progress', '')}")
    progress = progress_of_output(str(tmp_path / name))
    assert progress is not None
    assert report_of_output(progress)["status"] == "completed"
    assert progress_of_output(str(tmp_path / "in")) is None


def test_an_answer_that_a_filter_cut_off_is_incomplete(tmp_path: Path) -> None:
    small_input(tmp_path, 1)
    answer = chat_answer("2")
    answer["choices"][0]["finish_reason"] = "content_filter"

    async def collected() -> None:
        async with serving(Told(answer)) as url:
            config(tmp_path, {"kind": "openai", "base_url": url, "model": "m"})
            await asyncio.to_thread(command, tmp_path)

    asyncio.run(collected())
    (result,) = results(tmp_path / "out.jsonl")
    assert result["stop_reason"] == "content_filter"
    assert result["response"]["status"] == "incomplete"
    assert result["response"]["incomplete_details"] == {"reason": "content_filter"}


def test_a_judge_is_not_among_what_the_limits_and_prices_count(tmp_path: Path) -> None:
    """As docs/collect.md says: its tokens stand in the rows, under names of their own."""
    small_input(tmp_path, 3)
    used = {"usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}}

    async def collected() -> str:
        async with serving(Told(chat_answer("VERDICT: CORRECT") | used)) as url:
            env = {"name": "dataset", "grader": "judge", "judge": {"base_url": url, "model": "j"}}
            agents = {"agents": {"a": {"env": env, "policy": SCRIPTED}}}
            (tmp_path / "rollbook.yaml").write_text(yaml.safe_dump(agents))
            prices = ("prices.input=0", "prices.output=1000000")
            return (await asyncio.to_thread(command, tmp_path, *prices, "--json")).stdout

    progress = orjson.loads(asyncio.run(collected()))
    assert (progress["output_tokens"], progress["cost"]) == (3, 3.0)
    assert [result["judge_output_tokens"] for result in results(tmp_path / "out.jsonl")] == [5, 5, 5]
