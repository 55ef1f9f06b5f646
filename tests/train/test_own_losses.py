"""A loss of a user's own that fails or returns something else: named with its file, and no step is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rollbook
from helpers.core import core_engine, sampled_examples
from helpers.rl_runs import config_of, write_setup
from rollbook.runs.divergence import DivergedError
from rollbook.train.batch import pack
from rollbook.train.losses import ImportanceSampling, LossError, LossInputs, LossOutput


class Odd(ImportanceSampling, tag="odd"):
    """Importance sampling, and then something else."""

    what: str = "nothing"

    def __call__(self, given: LossInputs) -> Any:
        made = super().__call__(given)
        if self.what == "raises":
            raise KeyError("advantages")
        return {
            "none": None,
            "a number": 1.0,
            "a tensor": made.loss_sum,
            "the mean as a float": LossOutput(float(made.loss_sum), made.facts_N),
            "a loss per token": LossOutput(given.logprob_N, made.facts_N),
            "detached": LossOutput(made.loss_sum.detach(), made.facts_N),
            "no facts": LossOutput(made.loss_sum, None),
            "a fact that is a float": LossOutput(made.loss_sum, {"ratio": 1.0}),
            "a fact of another shape": LossOutput(made.loss_sum, {"ratio": given.logprob_N[:-1]}),
            "nan": LossOutput(made.loss_sum * torch.nan, made.facts_N),
        }[self.what]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("raises", r"failed: KeyError: 'advantages' \(.*test_own_losses\.py:\d+\)"),
        ("none", r"returned a NoneType; it must return a LossOutput\(loss_sum, facts_N\)"),
        ("a number", "returned a float; it must return a LossOutput"),
        ("a tensor", "returned a Tensor; it must return a LossOutput"),
        ("the mean as a float", "returned a loss_sum of type float; it must be a tensor"),
        (
            "a loss per token",
            r"returned a loss_sum of shape \[\d+\]; it must be one number",
        ),
        ("detached", "returned a loss_sum without a gradient"),
        ("no facts", "returned facts of type NoneType; they must be a dict"),
        ("a fact that is a float", "returned the fact 'ratio' as a float; it must be a tensor"),
        ("a fact of another shape", r"returned the fact 'ratio' of shape \[\d+\]; it must be \[\d+\]"),
    ],
)
def test_function_and_file_are_named(what: str, why: str) -> None:
    engine = core_engine()
    before = [weight.detach().clone() for weight in engine.model.parameters()]
    batches = pack(sampled_examples([5, 7]), 64)
    with pytest.raises(LossError, match=rf"^the loss Odd\.__call__ \(.*test_own_losses\.py:\d+\) {why}"):
        engine.step(batches, Odd(what=what), learning_rate=0.1)
    for weight, old in zip(engine.model.parameters(), before, strict=True):
        assert torch.equal(weight, old)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("rl"))


@pytest.mark.parametrize(
    ("what", "error", "why"),
    [
        ("raises", LossError, r"the loss Odd\.__call__ \(.*\) failed: KeyError: 'advantages'"),
        ("nan", DivergedError, r"were not finite.* The loss was computed by Odd\.__call__ \(.*:\d+\)"),
    ],
)
def test_the_run_has_failed_and_its_record_says_why(
    what: str, error: type[Exception], why: str, setup: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = config_of(setup, run, evals=[], iterations=6, max_nonfinite_steps=1)
    with pytest.raises(error, match=why):
        rollbook.rl(config, loss=Odd(what=what), log=lambda _: None)
    (attempt,) = json.loads((run / "run.json").read_text())["attempts"]
    assert attempt["outcome"] == "failed"
    assert "Odd.__call__" in attempt["error"]
