"""A step: the mean over all trained tokens however it is cut, void when not finite, exact in its copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollbook.train.batch import Example, packed_batch
from rollbook.train.checkpointing import rotate
from rollbook.train.engine import Engine
from rollbook.train.losses import CrossEntropy, Loss, LossInputs, LossOutput
from rollbook.train.model import Model
from rollbook.train.optimizer import Optimizer
from rollbook.train.processes import Processes
from rollbook.train.sampling import epoch_order, rows_of_epoch
from rollbook.train.schedule import learning_rate
from rollbook.train.settings import TrainingSettings
from rollbook.train.trainer_files import TrainerFiles, new_state, own_state
from tiny_model import LLAMA, write_config

SETTINGS = TrainingSettings(output_dir="x", learning_rate=0.01)
NLL = CrossEntropy()


def engine(dtype: torch.dtype = torch.float32) -> Engine:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = {key: value for key, value in LLAMA.items() if key != "model_type"}
    config = AutoConfig.for_model("llama", vocab_size=61, **values)
    model = Model(AutoModelForCausalLM.from_config(config, dtype=dtype), tokenizer=None)
    model.use_packing(True)
    return Engine(model, Optimizer(model.parameters(), SETTINGS.optimizer), Processes())


def samples() -> list[Example]:
    chance = np.random.default_rng(0)
    return [
        Example(chance.integers(0, 61, size).astype(np.int32), np.arange(size) > size // 2)
        for size in (5, 30, 12, 3)
    ]


def weights(made: Engine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in made.model.parameters()]


def test_how_a_batch_is_cut_changes_nothing() -> None:
    whole, parts = engine(), engine()
    some = samples()
    one = whole.step([packed_batch(some)], NLL, 0.01)
    two = parts.step([packed_batch(some[:1]), packed_batch(some[1:])], NLL, 0.01)
    assert two.loss == pytest.approx(one.loss, rel=1e-5)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    for a, b in zip(weights(whole), weights(parts), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


class Broken(Loss, tag="broken", frozen=True, kw_only=True):
    """A loss of a user's own, which is nowhere registered."""

    def __call__(self, given: LossInputs) -> LossOutput:
        return LossOutput(given.logprob_N.sum() * float("nan"), {})


def test_a_step_that_is_not_finite_is_void() -> None:
    made = engine()
    before = weights(made)
    result = made.step([packed_batch(samples())], Broken(), 0.01)
    assert not result.applied and np.isnan(result.loss)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(made), strict=True))
    assert made.step([packed_batch(samples())], NLL, 0.01).applied
    assert all(torch.isfinite(weight).all() for weight in weights(made))


def test_small_updates_are_not_lost_in_bfloat16() -> None:
    """At this rate one step is less than the last bit of a bfloat16 weight; a hundred are not."""
    made = engine(torch.bfloat16)
    before = weights(made)
    for _ in range(100):
        made.step([packed_batch(samples())], NLL, 2e-5)
    moved = sum(int((a != b).sum()) for a, b in zip(before, weights(made), strict=True))
    assert moved > 0.5 * sum(weight.numel() for weight in before[-3:])


def test_the_log_shouts_and_never_says_zero(tmp_path: Path) -> None:
    state = new_state(3, epochs=1.0, settings=SETTINGS)
    with TrainerFiles(tmp_path, state) as files:
        files.train_point(1, {"loss": 2.0, "learning_rate": 0.1, "grad_norm": 1.0, "epoch": 0.3}, 10)
        files.train_point(
            2, {"loss": float("nan"), "learning_rate": 0.1, "grad_norm": float("inf"), "epoch": 0.6}, 20
        )
        files.alert("gradients are not finite", "step 2", 2)
    lines = [json.loads(line) for line in (tmp_path / "trainer_log.jsonl").read_text().splitlines()]
    assert lines[1]["loss"] is None and lines[1]["nonfinite"] == ["loss", "grad_norm"]
    kept = json.loads((tmp_path / "trainer_state.json").read_text())
    assert kept["log_history"][1]["loss"] is None
    assert "not finite" in (tmp_path / "alerts.jsonl").read_text()
    assert (tmp_path / "training_loss.png").exists()  # for a run that never finished


def test_resuming_cuts_the_log_and_counts_all_time(tmp_path: Path) -> None:
    state = new_state(10, epochs=1.0, settings=SETTINGS)
    with TrainerFiles(tmp_path, state) as files:
        for step in range(1, 6):
            files.train_point(step, {"loss": 1.0, "learning_rate": 0.1, "epoch": 0.1 * step}, 100 * step)
    stored = json.loads((tmp_path / "trainer_state.json").read_text())
    stored |= {"global_step": 3, "log_history": stored["log_history"][:3]}
    own_state(stored)["elapsed_s"] = 100.0
    with TrainerFiles(tmp_path, stored) as files:
        files.train_point(4, {"loss": 1.0, "learning_rate": 0.1, "epoch": 0.4}, 400)
    lines = [json.loads(line) for line in (tmp_path / "trainer_log.jsonl").read_text().splitlines()]
    assert [line["current_steps"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["elapsed_time"].startswith("0:01:4")
    assert lines[-1]["throughput"] == pytest.approx(4.0, rel=0.05)  # 400 tokens in all the time there was


def test_rotation_spares_the_newest_the_best_and_the_handed_over(tmp_path: Path) -> None:
    for step in range(1, 7):
        path = tmp_path / f"checkpoint-{step}"
        path.mkdir()
        for name in ("model.safetensors", "COMPLETE"):
            (path / name).touch()
    removed = rotate(tmp_path, 2, [tmp_path / "checkpoint-1", tmp_path / "checkpoint-3"])
    assert sorted(path.name for path in removed) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    assert rotate(tmp_path, None, []) == []


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_rates_warm_up_and_go_down(kind: Any) -> None:
    rates = [learning_rate(step, peak=1.0, total=20, warmup=4, kind=kind) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    later = rates[4:]
    assert later == sorted(later, reverse=True) and all(rate > 0 for rate in later)
    assert (rates[-1] == 1.0) == (kind == "constant")


def test_an_epoch_sees_everything_by_weight_and_is_the_same_for_the_same_seed() -> None:
    order = epoch_order([10, 20], [2.0, 0.5], seed=3, epoch=1)
    assert sorted(order[order < 10].tolist()) == sorted([*range(10), *range(10)])
    half = order[order >= 10].tolist()
    assert len(half) == len(set(half)) == 10
    assert order.tolist() == epoch_order([10, 20], [2.0, 0.5], seed=3, epoch=1).tolist()
    assert order.tolist() != epoch_order([10, 20], [2.0, 0.5], seed=3, epoch=2).tolist()
    lengths = np.arange(1, 31)
    rows = rows_of_epoch(order, lengths, capacity=40, packed=True, seed=3, epoch=1)
    assert sorted(number for row in rows for number in row) == sorted(order.tolist())
    assert all(sum(lengths[number] for number in row) <= 40 for row in rows)


def test_a_run_whose_gradients_burst_says_so_and_keeps_its_weights(tmp_path: Path) -> None:
    from rollbook.train.settings import load_settings
    from rollbook.train.sft import train

    config = write_config(
        tmp_path, training__max_steps=4, training__learning_rate=1e30, training__warmup_steps=1, data__eval=[]
    )
    said: list[str] = []
    train(load_settings(config), tmp_path / "artifacts", resume=False, say=said.append)
    assert sum(line.startswith("NOT FINITE: step ") for line in said) == 3
    output = tmp_path / "artifacts/model/demo"
    lines = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]
    assert [line.get("nonfinite") for line in lines[1:4]] == [["grad_norm"]] * 3
    assert len((output / "alerts.jsonl").read_text().splitlines()) == 3
    assert own_state(json.loads((output / "trainer_state.json").read_text()))["nonfinite_steps"] == 3
