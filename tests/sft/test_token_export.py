"""The token export of a fine-tuning: the same block, the same files, cut back by a resume."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollbook.errors import UsageError
from rollbook.query.session import Session
from rollbook.records.token_places import token_source
from rollbook.sft.settings import load_settings
from rollbook.sft.train import train
from rollbook.tokens.report import token_report
from tiny_model import sums, write_config


class Killed(BaseException):
    """Nothing in the code catches it."""


def config_in(directory: Path, export: Any) -> Path:
    directory.mkdir(exist_ok=True)
    config = write_config(
        directory, training__max_steps=6, training__save_steps=2, training__logging_steps=1, data__eval=[]
    )
    values = yaml.safe_load(config.read_text())
    values["trainer"] = {"experimental": {"token_export": export}}
    config.write_text(yaml.safe_dump(values))
    return config


def run(directory: Path, *, resume: bool = False, until: str | None = None) -> Path:
    saved = []

    def log(text: str) -> None:
        if until is not None and text.startswith(until):
            saved.append(text)
            if len(saved) == 2:
                raise Killed

    with contextlib.suppress(Killed):
        train(load_settings(directory / "config.yaml"), directory / "artifacts", resume=resume, log=log)
    return directory / "artifacts" / "model" / "demo"


@pytest.mark.parametrize("export", [None, {"format": "parquet"}], ids=["jsonl", "parquet"])
def test_a_resumed_fine_tuning_exports_what_a_whole_one_does(tmp_path: Path, export: Any) -> None:
    def rows(output: Path) -> list[tuple[Any, ...]]:
        answer = Session([output]).run(
            "select iteration, sequence_idx, token_idx, token_id, text, loss_mask, trainer_logprob, entropy "
            "from tokens order by all"
        )
        return [row for batch in answer.batches for row in batch]

    config_in(tmp_path / "whole", export)
    config_in(tmp_path / "killed", export)
    whole = run(tmp_path / "whole")
    run(tmp_path / "killed", until="saved ")
    killed = run(tmp_path / "killed", resume=True)
    assert rows(killed) == rows(whole)
    assert [step.iteration for step in token_source(whole).steps()] == [1, 2, 3, 4, 5, 6]
    report = token_report(token_source(whole))
    assert report.losses == [{"name": "cross_entropy"}]
    assert report.total.trainer_logprob is not None and report.total.trainer_logprob < 0
    assert (report.total.masked, report.total.mismatch_kl, report.total.inference_logprob) == (
        None,
        None,
        None,
    )
    least = [token.trainer_logprob for token in report.top]
    assert least == sorted(least, key=lambda value: math.inf if value is None else value) and len(least) == 10


def with_long_rows(count: int, start: int) -> list[dict[str, Any]]:
    """Every fifth one is dropped, so that the number of a sample is not that of its row."""
    rows = sums(count, start)
    for row in rows[::5]:
        row["messages"][0]["content"] *= 50
    return rows


def test_a_row_of_the_export_is_a_row_of_the_dataset(tmp_path: Path) -> None:
    """Chosen by a hash of its place, so the same ones however they are batched and in every epoch."""
    chosen: dict[str, dict[int, list[tuple[str, int]]]] = {}
    for name, batch in (("large", 5), ("small", 2)):
        directory = tmp_path / name
        config_in(directory, {"fraction": 0.4})
        data = directory / "data"
        data.mkdir()
        for file, start in (("a.jsonl", 0), ("b.jsonl", 30)):
            text = "".join(json.dumps(row) + "\n" for row in with_long_rows(30, start))
            (data / file).write_text(text)
        words = [
            f"data.train=[{data}]", f"training.per_device_train_batch_size={batch}", "data.packing=off",
            "training.max_steps=null", "training.num_train_epochs=2",
        ]  # fmt: skip
        train(load_settings(directory / "config.yaml", words), directory / "artifacts", log=lambda _: None)
        source = token_source(directory / "artifacts" / "model" / "demo")
        steps = list(source.steps())
        assert sum(step.sequences for step in steps) == 2 * 48
        chosen[name] = {0: [], 1: []}
        for piece in source.pieces():
            for sequence in piece.read():
                file, number = Path(str(sequence.data_file)), sequence.data_row or 0
                assert file.parent == data and number % 5 != 1
                question, answer = json.loads(file.read_text().splitlines()[number - 1])["messages"]
                assert f"user\n{question['content']}<" in str(sequence.text)
                assert f"assistant\n{answer['content']}<" in str(sequence.text)
                epoch = int(sequence.iteration > len(steps) / 2)
                chosen[name][epoch].append((file.name, number))
    first = sorted(chosen["large"][0])
    assert 8 <= len(first) == len(set(first)) <= 36 and {file for file, _ in first} == {"a.jsonl", "b.jsonl"}
    assert all(sorted(own) == first for epochs in chosen.values() for own in epochs.values())


def test_what_the_loop_waited_is_in_the_metrics(tmp_path: Path) -> None:
    """Of all steps since the last logged one; without an export nothing is said of it."""
    config = config_in(tmp_path, {})
    words = ["training.logging_steps=2"]
    train(load_settings(config, words), tmp_path / "on", log=lambda _: None)
    off = [*words, "trainer.experimental.token_export=false"]
    train(load_settings(config, off), tmp_path / "off", log=lambda _: None)
    lines = {
        name: [json.loads(line) for line in (tmp_path / name / "model/demo/metrics.jsonl").open()]
        for name in ("on", "off")
    }
    assert [line["step"] for line in lines["on"]] == [2, 4, 6]
    assert all(line["time/token_export"] > 0 for line in lines["on"])
    assert not any("time/token_export" in line for line in lines["off"])


def test_the_block_stands_in_one_place(tmp_path: Path) -> None:
    config = config_in(tmp_path, {"every": 2})
    on = load_settings(config).trainer.token_export
    assert on is not None and on.every == 2
    assert load_settings(config, ["trainer.experimental.token_export=false"]).trainer.token_export is None
    values = yaml.safe_load(config.read_text())
    values["runtime_info"]["input"]["trainer"] = values["trainer"]
    config.write_text(yaml.safe_dump(values))
    with pytest.raises(UsageError, match=r"both at the top \(trainer\) and in runtime_info\.input"):
        load_settings(config)
    del values["trainer"]
    config.write_text(yaml.safe_dump(values))
    assert load_settings(config).trainer.token_export is not None
