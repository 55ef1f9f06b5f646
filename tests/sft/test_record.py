"""What a fine-tuning writes, when, and what it never removes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollbook.cli.main import main
from rollbook.runs.reader import open_run
from rollbook.sft.record import SftRecord
from rollbook.sft.resume import Progress
from rollbook.sft.settings import SftSettings, load_settings
from rollbook.sft.train import train
from rollbook.train.engine import Engine
from rollbook.train.model import Model
from tiny_model import sums, write_config


@pytest.fixture
def settings(tmp_path: Path) -> SftSettings:
    return load_settings(write_config(tmp_path, training__save_total_limit=2))


@pytest.fixture
def record(tmp_path: Path, settings: SftSettings) -> Iterator[SftRecord]:
    with SftRecord(tmp_path / "out", settings, tmp_path / "artifacts", Progress(), 10) as opened:
        yield opened


def save(record: SftRecord, step: int) -> None:
    with record.checkpoint(step):
        (record.directory / f".checkpoint-{step}.making" / "model.safetensors").touch()


def test_rotation_spares_the_newest_the_best_and_the_handed_over(record: SftRecord) -> None:
    record.directory.joinpath("handed_over").write_text(f"{(record.directory / 'checkpoint-1').absolute()}\n")
    for step, loss in enumerate([5.0, 4.0, 1.0, 2.0, 3.0, 4.0], 1):
        record.point({"eval_loss": loss, "epoch": 0.1 * step}, Progress(step=step))
        save(record, step)
    left = sorted(path.name for path in record.directory.glob("checkpoint-*"))
    assert left == ["checkpoint-1", "checkpoint-3", "checkpoint-6"]
    assert not list(record.directory.glob(".checkpoint-*"))


def test_a_logged_step_costs_its_lines_and_nothing_else(record: SftRecord) -> None:
    """The state grows with every point: rewriting it at each of them took longer than the steps."""
    for step in range(1, 4):
        record.point({"loss": 1.0, "learning_rate": 0.1, "epoch": 0.1, "grad_norm": 1.0}, Progress(step=step))
    written = {path.name for path in record.directory.iterdir() if not path.name.startswith(".")}
    assert "trainer_log.jsonl" in written
    assert not {"trainer_state.json", "training_loss.png"} & written


def test_a_run_is_a_run_like_any_other(tmp_path: Path) -> None:
    config = write_config(tmp_path, training__max_steps=3, training__save_steps=2, training__eval_steps=2)
    train(load_settings(config), tmp_path / "artifacts", log=lambda _: None)
    run = open_run(tmp_path / "artifacts/model/demo")
    assert run.info.kind == "sft" and run.info.attempts[-1].outcome == "completed"
    rows = run.metrics.by_step()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[-1]["progress/done_frac"] == 1.0 and rows[1]["eval_loss"] > 0 and rows[0]["optim/lr"] > 0
    assert [stored.name for stored in run.checkpoints()] == ["checkpoint-2", "checkpoint-3"]
    assert run.config["training"]["max_steps"] == 3


def test_a_checkpoint_that_is_not_recorded_is_set_aside_on_resume(tmp_path: Path) -> None:
    """A kill between the rename of step 4 and its record: the run goes back to step 2."""
    config = write_config(tmp_path, training__max_steps=4, training__save_steps=2, data__eval=[])
    train(load_settings(config), tmp_path / "artifacts", log=lambda _: None)
    output = tmp_path / "artifacts/model/demo"
    records = (output / "checkpoints.jsonl").read_text().splitlines(keepends=True)
    (output / "checkpoints.jsonl").write_text(records[0])
    heard: list[str] = []
    train(load_settings(config), tmp_path / "artifacts", resume=True, log=heard.append)
    assert f"resuming from {output / 'checkpoint-2'}" in heard
    assert list((output / "superseded").rglob("checkpoint-4"))
    assert list(open_run(output).checkpoints())[-1].name == "checkpoint-4"


def test_a_picture_of_one_metric_leaves_the_handed_over_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, training__max_steps=2, data__eval=[])
    train(load_settings(config), tmp_path / "artifacts", log=lambda _: None)
    output = tmp_path / "artifacts/model/demo"
    before = (output / "training_loss.png").read_bytes()
    monkeypatch.chdir(tmp_path)
    for words in (["demo"], ["artifacts/model/demo"]):
        with pytest.raises(SystemExit) as ended:
            main(["plot", *words, "-m", "lr"])
            raise SystemExit(0)
        assert not ended.value.code
    assert (output / "training_loss.png").read_bytes() == before
    assert (output / "lr.png").read_bytes().startswith(b"\x89PNG")


def test_an_evaluation_is_packed_as_training_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled up to the size of compiled training it was nine times the work."""
    monkeypatch.setattr(Model, "compile_blocks", lambda self, *, cuda_graphs: None)  # too slow for a test
    config = write_config(tmp_path, training__max_steps=1, model__compile="on", data__max_length=128)
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(64)))
    seen: list[Any] = []
    evaluate = Engine.evaluate

    def look(engine: Engine, batches: Any) -> float:
        seen.extend(batches)
        return evaluate(engine, seen)

    monkeypatch.setattr(Engine, "evaluate", look)
    train(load_settings(config), tmp_path / "artifacts", log=lambda _: None)
    assert sum(len(batch.keys) for batch in seen) == 64
    assert len(seen) < 64 / 4  # rows of several samples, of which a batch has four
    assert sum(batch.real_tokens for batch in seen) == sum(batch.allocated_tokens for batch in seen)
