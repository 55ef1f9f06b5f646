"""What the trainer disagrees with itself by, measured without a trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.rl_runs import settings_of, write_setup
from rollbook.rl.noise import NOTHING, measure_noise
from rollbook.rl.opening import Trainer, open_trainer
from rollbook.rl.start import Start
from rollbook.train.batch import Example, ExampleKey
from rollbook.train.losses import ImportanceSampling
from rollbook.train.processes import Processes
from rollbook.train.state import weights_digest

LOSS = ImportanceSampling()


def trainer(directory: Path, dtype: str) -> Trainer:
    settings = settings_of(write_setup(directory), directory / "run", model={"dtype": dtype})
    return open_trainer(Start(settings, False), Processes(), lambda _: None)[1]


def examples(count: int) -> list[Example]:
    chance = np.random.default_rng(0)
    made = []
    for number in range(count):
        size = int(chance.integers(5, 20))
        columns = {
            "sampled_logprob": np.full(size, -3.0, np.float32),
            "advantage": np.full(size, chance.normal(), np.float32),
        }
        tokens = chance.integers(0, 30, size).astype(np.int32)
        made.append(Example(tokens, np.arange(size) > 2, columns, ExampleKey("train", 0, 0, number)))
    return made


@pytest.mark.parametrize(("dtype", "digit"), [("float32", 2.0**-23), ("bfloat16", 2.0**-7)])
def test_it_is_about_the_last_digit_and_leaves_nothing_behind(
    tmp_path: Path, dtype: str, digit: float
) -> None:
    made = trainer(tmp_path, dtype)
    before = weights_digest(made.model)
    found = measure_noise(made, LOSS, examples(12))
    assert found.noise is not None
    assert digit <= found.noise.logprob < 100 * digit
    assert digit <= found.noise.gradient < 100 * digit
    assert found.metrics["noise_floor/max"] <= found.noise.logprob
    assert weights_digest(made.model) == before
    assert all(weight.grad is None for weight in [*made.optimizer.weights, *made.model.parameters()])


def test_one_row_cannot_be_in_two_shapes_of_batch(tmp_path: Path) -> None:
    made = trainer(tmp_path, "float32")
    assert measure_noise(made, LOSS, examples(1)) == NOTHING
    assert measure_noise(made, LOSS, []) == NOTHING


def test_what_is_not_a_number_is_not_noise(tmp_path: Path) -> None:
    made = trainer(tmp_path, "float32")
    with torch.no_grad():
        made.model.parameters()[0].fill_(float("nan"))
    assert measure_noise(made, LOSS, examples(3)).noise is None
