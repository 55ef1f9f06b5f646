"""Rows as datasets of the field have them: collected, trained on and drawn as tasks, under any names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from collecting import ROLLBOOK, results, write_rows
from recorded import python
from rollbook.collect.input import read_input
from rollbook.envs.dataset_rows import read_dataset_row
from rollbook.envs.source import EnvironmentSource
from rollbook.errors import BadFileError, BadLineError, UsageError
from rollbook.records import json_array
from rollbook.records.columns import Columns
from rollbook.records.identity import task_digest, task_id
from rollbook.rl.settings import load_settings as load_rl
from rollbook.rl.tasks import read_pools
from rollbook.sft.conversations import read_conversations
from rollbook.sft.settings import DatasetSettings
from rollbook.sft.settings import load_settings as load_sft

ASKED = [{"role": "user", "content": "What is 1 + 1?"}]
REPLY = {"role": "assistant", "content": "2"}
FRAGE = {"frage": {"text": "What is 1 + 1?"}, "antwort": "2"}
NAMES = {"prompt": "frage.text", "answer": "antwort"}
# A row, the names of its columns, and what has to be said of it.
SHAPES: list[tuple[dict[str, Any], dict[str, str], str]] = [
    (
        {"question": "What is 1 + 1?", "answer": "2"},
        {},
        "took question for the prompt, answer for the expected",
    ),
    ({"prompt": "What is 1 + 1?", "expected_answer": "2"}, {}, ""),
    ({"prompt": ASKED, "answer": "2"}, {}, "took answer for the expected answer"),
    ({"messages": ASKED, "expected_answer": 2}, {}, ""),
    ({"messages": [*ASKED, REPLY]}, {}, "took the last reply for the expected answer"),
    (FRAGE, NAMES, "took frage.text for the prompt, antwort for the expected answer"),
    ({"talk": ASKED, "a": "2"}, {"messages": "talk", "answer": "a"}, "took talk for the prompt, a for the"),
]
EXACT = {"env": {"name": "dataset", "grader": "exact"}, "policy": {"kind": "scripted", "script": ["2"]}}


def collect(directory: Path, *words: str) -> Any:
    (directory / "rollbook.yaml").write_text(yaml.safe_dump({"agents": {"a": EXACT}}))
    config = f"--config={directory / 'rollbook.yaml'}"
    output = f"output_jsonl_fpath={directory / 'out.jsonl'}"
    artifacts = f"--artifacts={directory / 'artifacts'}"
    return python(*ROLLBOOK[1:], "collect", config, artifacts, "agent_name=a", output, *words)


@pytest.mark.parametrize(("row", "names", "said"), SHAPES)
def test_collected(row: dict[str, Any], names: dict[str, str], said: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [row])
    ran = collect(tmp_path, f"input_jsonl_fpath={source}", *(f"columns.{k}={v}" for k, v in names.items()))
    assert ran.returncode == 0, ran.stderr
    told = [line for line in (ran.stdout + ran.stderr).splitlines() if "took " in line]
    assert len(told) == (1 if said else 0)
    assert all(said in line for line in told)
    (line,) = results(tmp_path / "out.jsonl")
    assert line["reward"] == 1.0
    assert line["responses_create_params"]["input"][0]["content"] == "What is 1 + 1?"
    assert line.items() >= {key: row[key] for key in row.keys() - {"expected_answer"}}.items()
    audit = python(*ROLLBOOK[1:], "audit", tmp_path / "out.jsonl")
    assert audit.returncode == 0, audit.stdout


@pytest.mark.parametrize(("row", "names", "said"), SHAPES)
def test_drawn_as_tasks_of_rl(row: dict[str, Any], names: dict[str, str], said: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [row])
    env: dict[str, Any] = {"name": "dataset", "tasks": str(source), **({"columns": names} if names else {})}
    config = {"log_path": str(tmp_path / "run"), "model": {"path": "none"}, "environments": [env]}
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(config))
    log: list[str] = []
    (pool,) = read_pools(load_rl(tmp_path / "rl.yaml"), log.append).training
    task = pool.task(0)
    assert task.messages == ASKED
    assert str(task.row["expected_answer"]) == "2"
    assert any(said in line for line in log)


def test_ids_are_those_of_the_rows_as_they_are_given(tmp_path: Path) -> None:
    """A row of any usual shape is one task in its file, in a collection, as a task of RL, and in queries."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [
        {"role": "system", "content": "Be short."},
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        {"role": "user", "content": [{"type": "text", "text": "and?"}]},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    rows = [
        {"question": "Q1", "answer": "1"},
        {"prompt": "Q2"},
        {"messages": talk, "tools": [tool]},
        {"instruction": "Q3", "id": 7},
        {"input": "Q4", "task_id": "t"},
    ]
    items = list(read_input(write_rows(tmp_path / "in.jsonl", rows)).items(1))
    for row, item in zip(rows, items, strict=True):
        converted = json.loads(item.line)
        assert (item.task_id, task_digest(converted)) == (task_id(row), task_digest(row))
        assert EnvironmentSource({"name": "arithmetic"}).task(row).id == task_id(row)


def test_a_row_with_parameters_is_sent_byte_for_byte(tmp_path: Path) -> None:
    text = '{"responses_create_params":  {"input": "Q"}, "answer": 1.50, "question": "other"}\n'
    (tmp_path / "in.jsonl").write_text(text)
    (item,) = read_input(tmp_path / "in.jsonl").items(1)
    assert item.line.decode() == text.rstrip("\n")


ARRAY = '[\n  {"question": "What is 1 + 1?",\n   "answer": "2"},\n  {"question": "Q2", "answer": "2"}\n]\n'


def test_a_json_array_is_collected_and_its_elements_are_named(tmp_path: Path) -> None:
    source = tmp_path / "in.json"
    source.write_text(ARRAY)
    ran = collect(tmp_path, f"input_jsonl_fpath={source}")
    assert ran.returncode == 0, ran.stderr
    assert {line["question"]: line["reward"] for line in results(tmp_path / "out.jsonl")} == {
        "What is 1 + 1?": 1.0,
        "Q2": 1.0,
    }
    chain = python(*ROLLBOOK[1:], "lineage", tmp_path / "out.jsonl")
    assert chain.returncode == 0 and "verified" in chain.stdout
    assert python(*ROLLBOOK[1:], "audit", tmp_path / "out.jsonl").returncode == 0
    source.write_text('[{"question": "fine", "answer": "1"},\n\n {"text": "bad"}, 3]')
    with pytest.raises(UsageError) as refused:
        read_input(source)
    assert f"{source}: element 2: it has no" in str(refused.value)
    assert f"{source}: element 3: " in str(refused.value)
    with pytest.raises(
        UsageError, match=r"env.tasks: .*\n  .*in.json: element 2: .*has no .*\n  .*element 3"
    ):
        EnvironmentSource({"name": "dataset", "tasks": str(source)}).check()


def test_a_json_array_of_tasks_and_of_examples(tmp_path: Path) -> None:
    source = tmp_path / "in.json"
    source.write_text(ARRAY)
    rows = EnvironmentSource({"name": "dataset", "tasks": str(source)}).check().rows
    assert rows is not None
    assert [row["question"] for row in rows] == ["What is 1 + 1?", "Q2"]
    (_, first), _ = read_conversations(DatasetSettings(path=str(source)))
    assert first.messages == [*ASKED, REPLY]
    source.write_text('[{"question": "Q", "answer": "A"}, {"text": "bad"}]')
    with pytest.raises(BadLineError, match=r"in\.json: element 2: has none of messages"):
        list(read_conversations(DatasetSettings(path=str(source))))


def test_a_large_or_broken_array_is_refused_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.json"
    source.write_text('[{"question": "Q"')
    with pytest.raises(BadFileError, match="is not a JSON array"):
        read_input(source)
    source.write_text(ARRAY)
    monkeypatch.setattr(json_array, "MOST_BYTES", 10)
    with pytest.raises(UsageError, match=r"jq -c '\.\[\]' .*in\.json > .*in\.jsonl"):
        read_input(source)


@pytest.mark.parametrize(
    ("row", "names", "reply"),
    [
        ({"question": "What is 1 + 1?", "answer": "2"}, {}, "2"),
        ({"question": "What is 1 + 1?", "answer": "so 2", "expected_answer": "2"}, {}, "so 2"),
        (FRAGE, NAMES, "2"),
        ({"talk": [*ASKED, REPLY]}, {"messages": "talk"}, "2"),
    ],
)
def test_learned_from(row: dict[str, Any], names: dict[str, str], reply: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [row, row])
    data = {"train": str(source)}
    config = {"model": {"path": "none"}, "data": data, "training": {"output_dir": "x"}}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(config))
    words = [f"columns.{name}={value}" for name, value in names.items()]
    (dataset,) = load_sft(tmp_path / "sft.yaml", words).data.train
    log: list[str] = []
    for _, conversation in read_conversations(dataset, log.append):
        assert conversation.messages == [*ASKED, {"role": "assistant", "content": reply}]
    (said,) = log
    assert str(source) in said and "took " in said


def test_a_row_without_what_was_named_is_refused_with_its_place(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [FRAGE, {"other": 1}])
    with pytest.raises(UsageError, match=r"in\.jsonl:2: the row has no 'frage\.text'; it has: other"):
        read_input(source, columns=Columns(**NAMES))
    with pytest.raises(BadLineError, match=r"in\.jsonl:2: .*the row has no 'frage\.text'"):
        list(read_conversations(DatasetSettings(path=str(source), columns=Columns(**NAMES))))
    ran = collect(tmp_path, f"input_jsonl_fpath={source}", "columns.promt=frage")
    assert ran.returncode == 2 and "prompt" in ran.stderr


def test_resumed_with_other_columns_is_refused(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"a": "Q1", "b": "Q2", "answer": "2", "id": n} for n in "xy"])
    first = collect(tmp_path, f"input_jsonl_fpath={source}", "columns.prompt=a", "limit=1")
    assert first.returncode == 0, first.stderr
    other = collect(tmp_path, f"input_jsonl_fpath={source}", "columns.prompt=b")
    assert other.returncode == 2 and "columns.prompt: was 'a', now 'b'" in other.stderr


def test_the_expected_answer_wins_over_the_answer() -> None:
    row = {"question": "Q", "answer": "because 4", "expected_answer": "4"}
    assert read_dataset_row(row).row["expected_answer"] == "4"
    assert read_dataset_row(row, Columns(answer="answer")).row["expected_answer"] == "because 4"
