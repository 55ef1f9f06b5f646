"""The data and the arguments of LLaMA-Factory: nothing is lost unsaid, and no setting is dropped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from safetensors.numpy import save_file

from rollbook.data.llamafactory import Unsuitable, conversation_row, dataset_name, read_call
from rollbook.data.output import new_dataset
from rollbook.errors import BadFileError, BadLineError, RollbookError, UsageError
from rollbook.records.rows import Row, read_rows
from rollbook.runs.saved_models import newest_model
from rollbook.sft import llamafactory
from rollbook.sft.conversations import conversation_of
from rollbook.sft.lf_data import write_lf_data
from rollbook.sft.llamafactory import llamafactory_environment, llamafactory_job
from rollbook.sft.settings import SftSettings, TrainingSettings


def said(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    return {"messages": messages, **more}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """Settings that LLaMA-Factory can run, with a program of its name."""
    program = tmp_path / "bin" / "llamafactory-cli"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / "base").mkdir()
    return {
        "engine": "llamafactory",
        "model": {"path": str(tmp_path / "base")},
        "data": {
            "train": [{"path": write(tmp_path / "train.jsonl", [said("1+1?", "2")])}],
            "too_long": "truncate",
        },
        "training": {"output_dir": "demo"},
        "llamafactory": {"command": str(program), "template": "qwen3"},
    }


def settings_of(values: dict[str, Any]) -> SftSettings:
    return msgspec.convert(values, SftSettings)


def llamafactory_command(
    settings: SftSettings, artifacts: Path, *, resume: bool = False, log: Any = lambda _: None
) -> list[str]:
    newest = newest_model(settings.output_dir(artifacts)) if resume else None
    path = newest.path if newest else None
    return llamafactory_job(settings, artifacts, Path("config.yaml"), resume_from=path, log=log).command


def arguments_of(values: dict[str, Any], artifacts: Path, *, resume: bool = False) -> dict[str, Any]:
    command = llamafactory_command(settings_of(values), artifacts, resume=resume)
    assert command[1] == "train"
    made: dict[str, Any] = yaml.safe_load(Path(command[2]).read_text())
    return made


def test_every_layout_becomes_one_and_the_rest_is_counted(tmp_path: Path, values: dict[str, Any]) -> None:
    rows = [
        said("a", "b"),
        said("a", "b", "nobody answered this"),
        {"instruction": "add", "input": "1 1", "output": "2", "system": "Be brief."},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]},
        {"prompt": [{"role": "user", "content": "p"}], "completion": [{"role": "assistant", "content": "c"}]},
        {"messages": [{"role": "user", "content": "x"}, *said("y", "z")["messages"]]},
        {"messages": [{"role": "assistant", "content": "me first"}, *said("y", "z")["messages"]]},
        said("look", "no") | {"messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            {"role": "assistant", "content": "a cat"},
        ]},
    ]  # fmt: skip
    values["data"] |= {
        "train": [{"path": write(tmp_path / "t.jsonl", rows)}],
        "eval": values["data"]["train"],
    }
    data = write_lf_data(settings_of(values), tmp_path / "artifacts")
    assert [[turn["value"] for turn in row["conversations"]] for row in lines(data.train.path)] == [
        ["a", "b"], ["a", "b"], ["add\n1 1", "2"], ["q", "r"], ["p", "c"],
    ]  # fmt: skip
    report = data.train.report
    assert (report.rows, report.samples, report.shortened) == (8, 5, 1)
    assert report.dropped == {
        "turns_do_not_alternate": 1, "begins_with_the_assistant": 1, "parts_that_are_not_text": 1,
    }  # fmt: skip
    assert "dropped, turns do not alternate: 1" in report.summary()
    directory = tmp_path / "artifacts" / "data" / "lf_data"
    assert {path.name for path in directory.iterdir()} == {
        "demo_train.jsonl", "demo_eval.jsonl", "demo_report.json", "dataset_info.json",
    }  # fmt: skip
    info = json.loads((directory / "dataset_info.json").read_text())
    assert info["demo_train"]["file_name"] == "demo_train.jsonl" and "demo_eval" in info
    assert json.loads((directory / "demo_report.json").read_text())["demo_train"]["samples"] == 5


@pytest.mark.parametrize(("weight", "written"), [(1, 10), (2, 20), (0.5, 5), (1.5, 15), (0.1, 1)])
def test_weights_say_how_often_a_row_is_written(
    tmp_path: Path, values: dict[str, Any], weight: float, written: int
) -> None:
    rows = [said(str(number), "x") for number in range(10)]
    values["data"]["train"] = [{"path": write(tmp_path / "t.jsonl", rows), "weight": weight}]
    data = write_lf_data(settings_of(values), tmp_path / "artifacts")
    assert data.train.report.samples == written == len(lines(data.train.path))
    assert data.train.report.left_out_by_weight == max(0, 10 - written)


def test_data_of_which_nothing_is_left_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    rows = [{"messages": [{"role": "assistant", "content": "me"}, {"role": "user", "content": "you"}]}]
    values["data"]["train"] = [{"path": write(tmp_path / "t.jsonl", rows)}]
    with pytest.raises(UsageError, match="begins with the assistant: 1"):
        llamafactory_command(settings_of(values), tmp_path / "artifacts")
    assert not (tmp_path / "artifacts" / "model").exists()


def test_what_is_too_long_is_left_to_it_unless_told(tmp_path: Path, values: dict[str, Any]) -> None:
    del values["data"]["too_long"]
    heard: list[str] = []
    llamafactory_command(settings_of(values), tmp_path / "artifacts", log=heard.append)
    assert "LLaMA-Factory cuts rows off after 1024 tokens" in heard[0]


@pytest.mark.parametrize(
    "reply",
    [
        {"content": ""},
        {"content": "I will look.\n"},
        {"content": "", "reasoning_content": "a < b, so look"},
        {"content": "I will look.", "reasoning_content": "think\n\nagain"},
    ],
)
@pytest.mark.parametrize("argument", ["x", "if a < b: </tool_call><tool_call>", "<think>\nno\n</think>\n\n"])
def test_a_tool_call_comes_back_as_it_was(reply: dict[str, Any], argument: str) -> None:
    function = {"name": "run", "arguments": {"code": argument}}
    message = {"role": "assistant", **reply, "tool_calls": [{"type": "function", "function": function}]}
    row = conversation_row(
        {
            "messages": [
                {"role": "user", "content": "go"},
                message,
                {"role": "tool", "content": "done"},
                {"role": "assistant", "content": "ok"},
            ],
            "tools": [{"type": "function", "function": {"name": "run"}}],
        }
    )
    assert read_call(row["conversations"][1]["value"]) == message
    assert json.loads(row["tools"]) == [{"name": "run", "parameters": {"type": "object", "properties": {}}}]
    line = Row(json.dumps(row).encode(), Path("t.jsonl"), 1)
    assert conversation_of(line).messages[1] == message


def test_text_that_its_parser_would_take_for_a_call_is_refused() -> None:
    function = {"name": "run", "arguments": {}}
    calls = [{"type": "function", "function": function}]
    message = {"role": "assistant", "content": "write <tool_call> first", "tool_calls": calls}
    with pytest.raises(Unsuitable, match="mark_of_a_tool_call"):
        conversation_row({"messages": [{"role": "user", "content": "go"}, message]})


def test_a_call_that_is_no_json_is_an_error_with_its_line() -> None:
    turns = [{"from": "human", "value": "go"}, {"from": "function_call", "value": "run()"}]
    row = Row(json.dumps({"conversations": turns}).encode(), Path("t.jsonl"), 7)
    with pytest.raises(BadLineError, match=r"t\.jsonl:7: cannot be read as sharegpt"):
        conversation_of(row)


def test_columns_do_not_add_arguments_to_a_call(tmp_path: Path) -> None:
    """Parquet gives every row the keys of all rows; who reads it takes them away again."""
    rows = []
    for name, arguments in (("add", {"a": 1}), ("weather", {"city": "Bern"})):
        tool = {"type": "function", "function": {"name": name, "parameters": {"properties": {name: {}}}}}
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        reply = {"role": "assistant", "content": "", "tool_calls": calls}
        rows.append({"messages": [{"role": "user", "content": "go"}, reply], "tools": [tool]})
    with new_dataset(tmp_path / "rows.parquet") as output:
        for row in rows:
            output.write(json.dumps(row).encode())
    found = [conversation_of(row) for row in read_rows(tmp_path / "rows.parquet")]
    assert [made.messages for made in found] == [row["messages"] for row in rows]
    assert [[*made.tools[0]["function"]["parameters"]["properties"]] for made in found] == [
        ["add"],
        ["weather"],
    ]


def test_names_with_dots_stay_apart(tmp_path: Path, values: dict[str, Any]) -> None:
    assert dataset_name(Path("qwen2.5_train.jsonl")) == "qwen2.5_train"
    for name in ("qwen2.5", "qwen2.6"):
        write_lf_data(settings_of(values | {"name": name}), tmp_path)
    info = json.loads((tmp_path / "data" / "lf_data" / "dataset_info.json").read_text())
    assert set(info) == {"qwen2.5_train", "qwen2.6_train"}


def test_a_broken_dataset_info_is_not_written_over(tmp_path: Path, values: dict[str, Any]) -> None:
    info = tmp_path / "data" / "lf_data" / "dataset_info.json"
    info.parent.mkdir(parents=True)
    info.write_text("{half")
    with pytest.raises(BadFileError, match="is not JSON"):
        write_lf_data(settings_of(values), tmp_path)
    assert info.read_text() == "{half"


def test_the_settings_become_its_arguments(tmp_path: Path, values: dict[str, Any]) -> None:
    values["model"] |= {"lora": {"rank": 16}, "gradient_checkpointing": True}
    values["data"] |= {"eval": values["data"]["train"], "train_on": "last", "packing": "on", "max_length": 99}
    values["training"] |= {
        "learning_rate": 1e-4, "lr_scheduler_type": "constant", "max_steps": 7, "eval_steps": 3,
        "save_total_limit": 2, "seed": 5,
    }  # fmt: skip
    values["llamafactory"]["arguments"] = {"flash_attn": "fa2", "report_to": "wandb"}
    made = arguments_of(values, tmp_path / "artifacts")
    wanted = {
        "stage": "sft", "finetuning_type": "lora", "lora_rank": 16, "lora_alpha": 32, "lora_target": "all",
        "bf16": True, "disable_gradient_checkpointing": False, "dataset": "demo_train",
        "eval_dataset": "demo_eval", "dataset_dir": str(tmp_path / "artifacts" / "data" / "lf_data"),
        "template": "qwen3", "cutoff_len": 99, "mask_history": True, "neat_packing": True,
        "learning_rate": 1e-4, "lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.03,
        "max_steps": 7, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 500, "save_total_limit": 2,
        "seed": 5, "output_dir": str(tmp_path / "artifacts" / "model" / "demo"), "plot_loss": True,
        "overwrite_output_dir": True, "flash_attn": "fa2", "report_to": "wandb",
    }  # fmt: skip
    assert {key: made.get(key) for key in wanted} == wanted


def test_no_setting_of_training_is_forgotten(tmp_path: Path, values: dict[str, Any]) -> None:
    changed = {
        "num_train_epochs": 2.5, "max_steps": 11, "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 4, "learning_rate": 0.5, "lr_scheduler_type": "linear",
        "warmup_steps": 6, "weight_decay": 0.25, "adam_beta1": 0.5, "adam_beta2": 0.75, "adam_epsilon": 1e-3,
        "max_grad_norm": 0.125, "logging_steps": 8, "save_steps": 9, "save_total_limit": 12, "eval_steps": 13,
        "seed": 14,
    }  # fmt: skip
    ours = {"max_nonfinite_steps"}  # it has nothing like it: its log is judged when it has ended
    assert {*changed, *ours, "warmup_ratio", "output_dir"} == set(TrainingSettings.__struct_fields__)
    values["data"]["eval"] = values["data"]["train"]
    values["training"] |= changed
    made = arguments_of(values, tmp_path / "artifacts")
    assert {key: made.get(key) for key in changed} == changed


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("model", {"path": None, "config": {"model_type": "llama"}, "tokenizer": "t"}, r"model\.config"),
        ("model", {"tokenizer": "other"}, r"model\.tokenizer"),
        ("model", {"chat_template": "t.jinja"}, r"model\.chat_template"),
        ("model", {"lora": {"alpha": 1.5}}, r"model\.lora\.alpha 1\.5"),
        ("model", {"path": "nowhere"}, r"model\.path: nowhere: no such directory"),
        ("data", {"too_long": "drop"}, r"data\.too_long drop"),
        ("llamafactory", {"arguments": {"learning_rate": 1}}, r"learning_rate follows from training\.learn"),
        ("llamafactory", {"arguments": {"fp16": True}}, r"fp16 follows from model\.dtype"),
        ("llamafactory", {"command": "no-such-cli"}, r"pip install llamafactory"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    tmp_path: Path, values: dict[str, Any], part: str, change: dict[str, Any], named: str
) -> None:
    values[part] |= change
    with pytest.raises(RollbookError, match=named):
        llamafactory_command(settings_of(values), tmp_path / "artifacts")
    assert not (tmp_path / "artifacts" / "model").exists()


def test_part_of_a_dataset_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    values["data"]["train"][0]["weight"] = 0.5
    with pytest.raises(UsageError, match=r"data\.train\[0\]\.weight 0\.5 .*`rollbook data sample`"):
        llamafactory_command(settings_of(values), tmp_path / "artifacts")


def test_float32_is_refused_where_it_would_be_halved(
    tmp_path: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    values["model"]["dtype"] = "float32"
    monkeypatch.setattr(llamafactory, "_has_gpu", lambda: True)
    with pytest.raises(UsageError, match=r"model\.dtype float32"):
        llamafactory_command(settings_of(values), tmp_path / "artifacts")


def test_plain_text_needs_the_template_without_roles(tmp_path: Path, values: dict[str, Any]) -> None:
    rows = [{"prompt": "once upon ", "completion": "a time"}]
    values["data"]["train"] = [{"path": write(tmp_path / "t.jsonl", rows)}]
    with pytest.raises(UsageError, match=r"1 rows are a plain prompt.*llamafactory\.template 'qwen3'"):
        llamafactory_command(settings_of(values), tmp_path / "artifacts")
    values["llamafactory"]["template"] = "empty"
    assert arguments_of(values, tmp_path / "artifacts")["template"] == "empty"


def test_resuming_names_the_newest_complete_checkpoint(tmp_path: Path, values: dict[str, Any]) -> None:
    for step in (5, 10, 15):
        checkpoint = tmp_path / "artifacts" / "model" / "demo" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        save_file({}, checkpoint / "model.safetensors")
        if step != 15:  # killed while it saved
            (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    made = arguments_of(values, tmp_path / "artifacts", resume=True)
    assert made["resume_from_checkpoint"].endswith("checkpoint-10")
    assert not made.get("overwrite_output_dir")


def test_its_environment_finds_its_torchrun_and_takes_text_for_text(values: dict[str, Any]) -> None:
    values["processes"] = 4
    made = llamafactory_environment(settings_of(values))
    assert made["PATH"].split(os.pathsep)[0] == str(Path(values["llamafactory"]["command"]).parent)
    assert (made["NPROC_PER_NODE"], made["FORCE_TORCHRUN"]) == ("4", "1")
    assert made["IMAGE_PLACEHOLDER"] != "<image>"
