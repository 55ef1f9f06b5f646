"""Odd input is read for what it is or refused by file and line, the same in every command."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollbook.cli.data import tidy_end
from rollbook.cli.main import main
from rollbook.data.coverage import planned_by
from rollbook.data.filter import filter_rows
from rollbook.data.job import DataJob
from rollbook.data.pairs import pairs
from rollbook.data.profile import profile
from rollbook.data.rl import rl
from rollbook.data.sft import sft
from rollbook.data.stats import stats
from rollbook.errors import BadFileError, BadLineError, UsageError
from rollbook.query.session import Session
from rollbook.records.rows import read_rows


def row(task: str, repeat: int, reward: Any, **more: Any) -> dict[str, Any]:
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": f"r{repeat}"}],
    }
    return {
        "_rb_key": f"{task}#{repeat}",
        "reward": reward,
        "responses_create_params": {"input": [{"role": "user", "content": f"what is {task}?"}]},
        "response": {"output": [said]},
        **more,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def values(path: Path) -> list[dict[str, Any]]:
    return [row.value() for row in read_rows(path)]


def ask(path: Path, question: str) -> list[tuple[Any, ...]]:
    return [line for batch in Session([path]).run(question).batches for line in batch]


def command(words: list[str | Path]) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


def test_true_is_one_and_text_is_no_reward_everywhere(tmp_path: Path) -> None:
    rewards = [True, False, 1, "1", "good", None, True]
    source = write(tmp_path / "in.jsonl", [row("a", place, one) for place, one in enumerate(rewards)])
    (reward,) = stats([source], fields=["reward"]).fields
    assert (reward.ok, reward.mean) == (4, 0.75)
    kept = filter_rows([source], tmp_path / "kept.jsonl", where="reward >= 0.5")
    assert (kept.rows_out, kept.counts) == (3, {"dropped": 1, "unanswerable": 3})
    equal = filter_rows([source], tmp_path / "equal.jsonl", where="reward == 1")
    assert equal.rows_out == 3
    made = sft([source], tmp_path / "sft.jsonl", min_reward=0.5)
    assert (made.rows_out, made.counts["without_reward"]) == (3, 3)
    assert profile([source], None).details["pass_at_k"]["1"]["mean"] == 0.75
    found = pairs([source], tmp_path / "pairs.jsonl", per_task=9)
    assert (found.rows_out, found.counts["without_reward"]) == (1, 3)
    for question in ("select count(reward), avg(reward)", "select count(reward), avg(reward), count(row)"):
        (answer,) = ask(source, f"{question} from rollouts")
        assert answer[:2] == (4, 0.75)


def deep_rows(path: Path) -> Path:
    deep: Any = 1
    for _ in range(300):
        deep = {"a": deep}
    flat = {"_rb_key": "a#0", "reward": 1.0, "many": [[]] * 400}
    lines = [json.dumps(row) for row in (flat, {"_rb_key": "b#0", "reward": 1.0, "deep": deep})]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("words", [["dedup"], ["profile"], ["rl"]])
def test_a_row_too_deep_to_be_taken_apart_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    source = deep_rows(tmp_path / "in.jsonl")
    assert command(["data", *words, source, "-o", tmp_path / "out.jsonl"]) == 1
    assert "in.jsonl:2: is nested more than 250 levels deep" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["filter", "--where", "reward > 0"],
        ["merge"],
        ["merge", "--duplicates", "first"],
        ["sample", "--fraction", "1"],
    ],
)
def test_a_row_of_any_depth_is_copied(tmp_path: Path, words: list[str]) -> None:
    source = deep_rows(tmp_path / "in.jsonl")
    assert command(["data", *words, source, "-o", tmp_path / "out.jsonl"]) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == source.read_bytes()


ODD_LINES = {
    b'{"x": "\\ud800"}': "not valid JSON",
    b'\xef\xbb\xbf{"x": 1}': "not valid JSON",
}


@pytest.mark.parametrize("line", ODD_LINES)
def test_lines_that_are_refused_are_named(
    tmp_path: Path, line: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [row("a", 0, 1.0)])
    source.write_bytes(line + b"\n" + source.read_bytes())
    out = tmp_path / "out.jsonl"
    for words in (
        ["merge", source, "-o", out],
        ["filter", source, "--where", "reward > 0", "-o", out],
        ["stats", source],
        ["sft", source, "-o", out],
        ["pairs", source, "-o", out],
        ["profile", source, "-o", out],
        ["dedup", source, "-o", out],
        ["sample", source, "--fraction", "1", "-o", out],
    ):
        assert command(["data", *words]) == 1, words
        assert f"{source}:1: {ODD_LINES[line]}" in capsys.readouterr().err
        assert not out.exists()


def test_a_number_too_large_to_be_one_is_taken_by_every_command(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [row("a", 0, 1.0), row("a", 1, 0.0)])
    source.write_bytes(
        b'{"_rb_key": "b#0", "reward": 1e999}\n{"prompt": "p", "x": 1e999}\n' + source.read_bytes()
    )
    out = tmp_path / "out.jsonl"
    for words in (
        ["merge", source, "-o", out],
        ["filter", source, "--where", "reward > 0", "-o", out],
        ["stats", source],
        ["sft", source, "-o", out],
        ["pairs", source, "-o", out],
        ["profile", source, "-o", out],
        ["dedup", source, "-o", out],
        ["sample", source, "--fraction", "1", "-o", out],
    ):
        assert command(["data", *words]) == 0, words
        out.unlink(missing_ok=True)
    assert ask(source, "select count(*), count(reward) from rollouts") == [(4, 2)]


def test_a_query_for_whole_rows_leaves_no_line_out(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [row("a", 0, 1.0)])
    source.write_bytes(source.read_bytes() + b'{"x": "\\ud800"}\n')
    with pytest.raises(BadLineError, match=r"in\.jsonl:2: not valid JSON"):
        ask(source, "select row from rollouts")


def test_bare_nan_and_carriage_returns_are_read(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [row("a", repeat, float(repeat)) for repeat in range(3)])
    text = source.read_bytes().replace(b'"reward":0.0', b'"reward":NaN').replace(b"\n", b"\r\n")
    source.write_bytes(text)
    assert sft([source], tmp_path / "sft.jsonl").counts == {"without_reward": 1}
    assert pairs([source], tmp_path / "pairs.jsonl").rows_out == 1
    assert stats([source], fields=["reward"]).fields[0].mean == 1.5


@pytest.mark.parametrize(
    "wrong",
    [
        {"responses_create_params": {"input": 5}},
        {"responses_create_params": {"input": ["hi", 3]}},
        {"responses_create_params": None},
        {"response": None},
        {"response": "text"},
        {"response": {"output": ["x", None]}},
        {"response": {"output": [{"type": "message", "role": "assistant", "content": [5]}]}},
    ],
)
def test_what_is_no_conversation_is_counted(tmp_path: Path, wrong: dict[str, Any]) -> None:
    rows = [row("a", 0, 1.0), row("a", 1, 0.0) | wrong, row("a", 2, 0.5)]
    source = write(tmp_path / "in.jsonl", rows)
    made = sft([source], tmp_path / "sft.jsonl")
    assert made.rows_out == 2
    assert made.counts in ({"without_prompt": 1}, {"nothing_answered": 1})
    assert pairs([source], tmp_path / "pairs.jsonl").rows_out == 1


@pytest.mark.parametrize(
    "tools", [["text"], "text", [{"type": "function", "function": "f"}], [{"name": "f", "parameters": "p"}]]
)
@pytest.mark.parametrize("as_format", ["messages", "llamafactory"])
def test_tools_that_are_none_are_counted(tmp_path: Path, tools: Any, as_format: Any) -> None:
    rows = [row("a", 0, 1.0), row("a", 1, 0.0)]
    rows[0]["responses_create_params"]["tools"] = tools
    source = write(tmp_path / "in.jsonl", rows)
    made = sft([source], tmp_path / "sft.jsonl", as_format=as_format)
    assert (made.rows_out, made.counts) == (1, {"unreadable_tools": 1})
    assert pairs([source], tmp_path / "pairs.jsonl").counts["unreadable_tools"] == 1


@pytest.mark.parametrize("calls", [["text"], 5, [{"function": "f"}]])
def test_calls_in_a_prompt_that_are_none_are_counted(tmp_path: Path, calls: Any) -> None:
    wrong = row("a", 0, 1.0)
    wrong["responses_create_params"]["input"].append({"role": "assistant", "tool_calls": calls})
    made = sft([write(tmp_path / "in.jsonl", [wrong])], tmp_path / "sft.jsonl")
    assert made.counts == {"without_prompt": 1}


@pytest.mark.parametrize("arguments", ['{"n": 123456789012345678901234567890}', '{"n": "\\ud800"}'])
def test_arguments_that_cannot_be_written_again_stay_text(tmp_path: Path, arguments: str) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    source = write(tmp_path / "in.jsonl", [row("a", 0, 1.0, response={"output": [call]})])
    sft([source], tmp_path / "sft.jsonl")
    (made,) = values(tmp_path / "sft.jsonl")
    assert made["messages"][-1]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("tokens", [2**63, -1, True])
def test_a_count_of_tokens_that_is_none_is_missing(tmp_path: Path, tokens: int) -> None:
    usage = {"input_tokens": tokens, "output_tokens": 5}
    odd = row("a", 0, 1.0)
    odd["response"]["usage"] = usage
    source = write(tmp_path / "in.jsonl", [odd])
    assert sft([source], tmp_path / "sft.jsonl").rows_out == 1
    profile([source], tmp_path / "profile.jsonl")
    (line,) = values(tmp_path / "profile.jsonl")
    assert (line["mean/input_tokens"], line["mean/output_tokens"]) == (None, 5)


def test_a_repeat_too_large_to_be_one(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [row("a", 10**30, 1.0), {"_ng_rollout_index": True, "id": "b"}])
    assert profile([source], None).details["tasks"] == 2


def test_a_queue_ends_a_command_tidily() -> None:
    with pytest.raises(SystemExit) as ended, tidy_end():
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            raise RuntimeError("Query interrupted") from None  # as DuckDB does
    assert ended.value.code == 128 + signal.SIGTERM
    with pytest.raises(RuntimeError, match="another"), tidy_end():
        raise RuntimeError("another")


def test_bytes_in_parquet_are_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"raw": [b"caf\xc3\xa9"], "in": [[b"x"]]}), tmp_path / "in.parquet")
    assert values(tmp_path / "in.parquet") == [{"raw": "caf\u00e9", "in": ["x"]}]
    pq.write_table(pa.table({"raw": [b"\xff"]}), tmp_path / "in.parquet")
    with pytest.raises(BadFileError, match=r"in\.parquet: .*not valid UTF8"):
        values(tmp_path / "in.parquet")


def test_numbers_in_parquet_that_are_not_finite_are_null(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [float("nan"), 1.5], "n": [2**63 - 1, 0]}), tmp_path / "in.parquet")
    filter_rows([tmp_path / "in.parquet"], tmp_path / "out.jsonl", where="true")
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line) for line in lines] == [{"x": None, "n": 2**63 - 1}, {"x": 1.5, "n": 0}]


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {name: {"type": "text"}}}}}
    for name in ("f", "g")
]
CALLS = [
    {"type": "function", "function": {"name": "f", "arguments": arguments}}
    for arguments in ({"x": 1}, {"y": "z"})
]


def test_tools_and_arguments_come_out_of_parquet_as_they_went_in(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}], "tools": [tool]}
        for call, tool in zip(CALLS, TOOLS, strict=True)
    ]
    path = tmp_path / "out.parquet"
    with DataJob("copy", [write(tmp_path / "in.jsonl", rows)], path) as job:
        for one in job.rows():
            job.write(one.data)
    assert values(path) == rows
    # Other readers have the text of them, as OpenAI's format has arguments, and no key is made up.
    first, second = pq.read_table(path).to_pylist()
    assert first["messages"][0]["tool_calls"][0]["function"]["arguments"] == '{"x":1}'
    assert second["messages"][0]["tool_calls"][0]["function"]["arguments"] == '{"y":"z"}'
    assert [json.loads(one["tools"]) for one in (first, second)] == [[tool] for tool in TOOLS]


def test_files_that_would_share_a_manifest(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [row("a", 0, 1.0)])
    filter_rows([source], tmp_path / "x.jsonl", where="reward > 0")
    with pytest.raises(
        UsageError, match=r"x_manifest\.json belongs to .*x\.jsonl, and x\.parquet would share"
    ):
        filter_rows([source], tmp_path / "x.parquet", where="reward > 0")
    manifest = json.loads((tmp_path / "x_manifest.json").read_text())
    manifest["details"] = {"plans": {"some input": [7, 7]}}
    (tmp_path / "x_manifest.json").write_text(json.dumps(manifest))
    write(tmp_path / "x.ndjson", [row("a", 0, 1.0)])  # of another hand: the manifest does not tell of it
    assert planned_by([tmp_path / "x.jsonl"]).tasks == 7
    assert planned_by([tmp_path / "x.ndjson"]).tasks is None
    assert ask(tmp_path, "select run, count(*) from rollouts group by run order by run") == [
        ("in", 1),
        ("x", 1),
    ]
    (tmp_path / "x.jsonl").unlink()  # what it told of is gone, so the name is free
    assert filter_rows([source], tmp_path / "x.parquet", where="reward > 0").rows_out == 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["sft", "--min-reward", "2"], "below min reward 2; lower --min-reward"),
        (["filter", "--where", "reward > 2"], "dropped 2; loosen --where"),
        (["pairs", "--min-gap", "5"], "lower --min-gap"),
        (["rl", "--band", "0.9..1"], "widen --band"),
    ],
)
def test_a_dataset_without_rows_is_said_aloud(
    tmp_path: Path, words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [row("a", 0, 1.0), row("a", 1, 0.0)])
    name, *options = words
    assert command(["data", name, source, *options, "-o", tmp_path / "out.jsonl"]) == 0
    said = capsys.readouterr().err
    assert "out.jsonl is empty: none of 2 rows is left" in said
    assert hint in said


METRICS = ["correct", "length"]


def test_a_task_row_has_only_what_is_the_tasks(tmp_path: Path) -> None:
    rows = [
        row(task, repeat, 1.0, correct=True, answer=7, length=repeat - 2, hint=task, _rb_metrics=METRICS)
        for task in "ab"
        for repeat in range(2)
    ]
    source = write(tmp_path / "in.jsonl", rows)
    rl([source], tmp_path / "rl.jsonl")
    numbers = {"task_id", "pass_rate", "num_rollouts", "mean_reward", "std_reward"}
    for made in values(tmp_path / "rl.jsonl"):
        assert made.keys() == numbers | {"responses_create_params", "answer", "hint"}
    profile([source], tmp_path / "profile.jsonl")
    assert [line["sample"].keys() for line in values(tmp_path / "profile.jsonl")] == [
        {"responses_create_params", "answer", "hint"}
    ] * 2


@pytest.mark.parametrize("index", [True, 1 << 63, "3"])
def test_an_index_that_is_none_is_none(tmp_path: Path, index: Any) -> None:
    source = write(tmp_path / "in.jsonl", [{**row("a", 0, 1.0), "_ng_task_index": index}])
    assert profile([source], tmp_path / "out.jsonl").rows_out == 1
    assert "_ng_task_index" not in orjson.loads((tmp_path / "out.jsonl").read_bytes())


@pytest.mark.parametrize(
    "words",
    [
        ["dedup"],
        ["filter", "--where", "reward >= 0"],
        ["merge"],
        ["merge", "--duplicates", "first", "--ordered"],
        ["pairs"],
        ["profile"],
        ["rl"],
        ["sample", "--fraction", "0.5"],
        ["sample", "--fraction", "0.5", "--by-task", "--shuffle"],
        ["sft", "--best-of", "1"],
        ["split", "a=0.5", "b=0.5"],
        ["mix"],
    ],
    ids=" ".join,
)
def test_a_command_reads_what_was_there_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Beside a collection that goes on, whose last line may be half there."""
    rows = [
        row(f"t{task}", repeat, repeat / 4, _ng_task_index=task) for task in range(9) for repeat in range(4)
    ]
    name, *options = words
    for directory in ("still", "growing"):
        (tmp_path / directory).mkdir()
        for number in range(2):
            write(tmp_path / directory / f"{number}.jsonl", rows[number::2])
    more = b"".join(orjson.dumps(row("new", repeat, 1.0)) + b"\n" for repeat in range(5)) + b'{"_rb_key":"h'
    enter = DataJob.__enter__

    def append_and_enter(self: DataJob) -> DataJob:
        for path in self.paths:
            path.write_bytes(path.read_bytes() + more * ("growing" in str(path)))
        return enter(self)

    monkeypatch.setattr(DataJob, "__enter__", append_and_enter)
    for directory in ("still", "growing"):
        files = [str(path) for path in sorted((tmp_path / directory).iterdir())]
        output = tmp_path / directory / ("parts" if name == "split" else "out/x.jsonl")
        inputs = [f"a={files[0]}:0.5", f"b={files[1]}:0.5"] if name == "mix" else files
        assert command(["data", name, *inputs, *options, "-o", output]) == 0
    made = {
        directory: {
            path.name: path.read_bytes()
            for path in (tmp_path / directory).rglob("*.jsonl")
            if path.parent.name in ("out", "parts")
        }
        for directory in ("still", "growing")
    }
    assert made["still"] == made["growing"]
    assert any(made["still"].values())
