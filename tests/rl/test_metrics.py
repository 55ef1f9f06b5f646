"""Every metric of docs/metrics.md against numbers worked out by hand."""

from __future__ import annotations

import json
import math
import statistics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.metric_docs import documented_keys
from rollbook.records.metrics import encode_metrics
from rollbook.records.rollout_stats import RolloutStats
from rollbook.records.rollouts import summarize, summarize_failure
from rollbook.records.turns import Turn
from rollbook.rl import metrics
from rollbook.rl.groups import Group, select
from rollbook.rl.noise import NOTHING, measure_noise
from rollbook.rl.opening import Trainer
from rollbook.rollouts.trajectory import trajectory_of
from rollbook.rollouts.types import Episode
from rollbook.train.batch import Batch, Example, ExampleKey, packed_batch
from rollbook.train.engine import StepOutput
from rollbook.train.losses import Loss, LossInputs, PpoClip
from rollbook.train.metrics import RATIO_SQUARED, Kind, Sums, Tally, joined, token_metrics
from rollbook.train.processes import Processes
from rollbook.train.token_math import TokenOutputs


def turn(tokens: list[int], reward: float, *, finish: str = "stop", prompt: int = 2) -> Turn:
    return Turn(
        messages=[{"role": "assistant", "content": "x"}],
        reward=reward,
        metrics={"correct": reward, "calls": float(len(tokens))},
        prompt_token_ids=[1] * prompt,
        token_ids=tokens,
        logprobs=[-math.log(2)] * len(tokens),
        temperature=1.0,
        policy_version=0,
        finish_reason=finish,
    )


def episode(*turns: Turn) -> Episode:
    asked = [{"role": "user", "content": "q"}]
    return Episode(prompt=asked, turns=list(turns), stop_reason=str(turns[-1].finish_reason))


def iteration() -> list[Group]:
    """Twelve rollouts were asked for: a mixed group, a good one, a bad one, a lone one, a surplus one, one
    that failed."""
    cut = episode(turn([5, 6, 8], 0.0, finish="length"))
    return [
        Group(0, [episode(turn([5, 6], 0.0), turn([7], 1.0)), cut]),
        Group(1, [episode(turn([5], 1.0)), episode(turn([5], 1.0)), None]),
        Group(2, [episode(turn([5], 0.25)), episode(turn([6], 0.25))]),
        Group(3, [episode(turn([5], 1.0)), None]),
        Group(4, [episode(turn([5], 0.0)), episode(turn([6], 1.0))]),
        Group(5, [None]),
    ]


def rollout_metrics(prefix: str = "") -> dict[str, float]:
    """As the run makes them; the last group is of another environment."""
    stats = RolloutStats()
    for group in iteration():
        stats.expect(len(group.episodes))
        for index, played in enumerate(group.episodes):
            ids: dict[str, Any] = {
                "run_id": "r", "split": "train", "iteration": 0, "group_idx": group.group_idx,
                "traj_idx": index, "tags": ["sums" if group.group_idx == 4 else "words"],
            }  # fmt: skip
            if played is not None:
                stats.add(summarize(trajectory_of(played), **ids))
            elif group.group_idx == 1:  # the other one never came
                stats.add(summarize_failure("timeout: the episode took longer than 1 s", None, **ids))
    return stats.metrics(prefix)


REWARDS = (1, 0, 1, 1, 0.25, 0.25, 1, 0, 1)
ROLLOUTS = {
    "env/all/reward/total": sum(REWARDS) / 9,
    "env/all/reward/std": statistics.stdev(REWARDS),
    "env/all/reward/std_error": statistics.stdev(REWARDS) / 3,
    # First over the turns of a rollout: 0.5, then 0, 1, 1, 0.25, 0.25, 1, 0, 1.
    "env/all/correct": 5 / 9,
    "env/all/calls": (1.5 + 3 + 7) / 9,
    "env/all/by_group/frac_mixed": 2 / 5,
    "env/all/by_group/frac_all_good": 2 / 5,  # the lone one too: all that is known of it is good
    "env/all/by_group/frac_all_bad": 1 / 5,
    "env/all/stop/stop": 8 / 9,
    "env/all/stop/length": 1 / 9,
    "env/all/rollouts/expected": 12,
    "env/all/rollouts/ok": 9,
    "env/all/rollouts/failed": 1,
    "env/all/rollouts/missing": 2,
    "env/words/reward/total": (1 + 0 + 1 + 1 + 0.25 + 0.25 + 1) / 7,
    "env/words/rollouts/failed": 1,
    "env/sums/reward/total": 1 / 2,
    "env/sums/by_group/frac_mixed": 1.0,
    "ac_tokens_per_turn": (2 + 1 + 3 + 7) / 10,
    "env/all/ob_tokens_per_turn": (2 + 6 + 2 + 7 * 2) / 10,  # the second turn has seen 2, 2 and 2 more
}
SAMPLING = {
    "groups/drawn": 6,
    "groups/trained": 1,
    "groups/constant": 2,
    "groups/lone": 1,
    "groups/surplus": 1,
    "groups/truncated": 0,
    "groups/failed": 1,
    "rollouts/trained": 2,
    "truncated/count": 1,
    "truncated/share": 1 / 9,
    "truncated/reply": 1 / 9,
    "truncated/episode": 0,
    "duplicates/share": 2 / 9,
    # Two rollouts of three tokens, 1/8 each; six of one token beside another one; a lone one has no other.
    "duplicates/expected": (2 * 0.125 + 6 * 0.5 + 0) / 9,
    "tokens/sampled": 2 + 1 + 3 + 7,
    "tokens/trained": 6,
}


def test_what_is_measured_of_the_rollouts() -> None:
    measured = rollout_metrics()
    assert {key: measured[key] for key in ROLLOUTS} == pytest.approx(ROLLOUTS)
    assert set(measured) - set(ROLLOUTS) >= {"env/all/turns_per_episode"}
    of_eval = rollout_metrics("test/")
    assert of_eval["test/env/all/reward/total"] == measured["env/all/reward/total"]
    assert all(key.startswith("test/") for key in of_eval)


def test_what_is_measured_of_sampling_and_selection() -> None:
    groups = iteration()
    selection = select(groups, split="train", iteration=0, at_most=1, advantage="mean", truncated="train")
    assert metrics.of_sampling(groups, selection, 3) == pytest.approx(SAMPLING)
    room = {
        "truncated/reply": 0,
        "truncated/episode": 1 / 9,
    }  # of replies of four it had no room for a whole one
    assert metrics.of_sampling(groups, selection, 4) == pytest.approx(SAMPLING | room)
    nothing = [Group(0, [None, None])]
    none = select(nothing, split="train", iteration=0, at_most=1, advantage="mean", truncated="train")
    shares = ("truncated/share", "truncated/reply", "truncated/episode")
    assert not metrics.of_sampling(nothing, none, 3).keys() & set(shares)  # of no rollout nothing is known


def tokens() -> tuple[LossInputs, TokenOutputs]:
    """Four tokens: mu 1/2, 1/4, 1/2, 1/10 and pi 1/2, 1/2, 1/4, 1/10; so r is 1, 2, 1/2, 1."""
    mu_N, pi_N = torch.tensor([0.5, 0.25, 0.5, 0.1]), torch.tensor([0.5, 0.5, 0.25, 0.1])
    columns_N = {"sampled_logprob": mu_N.log(), "advantage": torch.tensor([1.0, 1.0, -1.0, 1.0])}
    outputs = TokenOutputs(pi_N.log(), torch.tensor([0.1, 0.2, 0.3, 0.8]))
    return LossInputs(outputs.logprob_N, torch.zeros(4, dtype=torch.int64), columns_N), outputs


LN2 = math.log(2)
FACTS = {
    "entropy": 0.35,
    "entropy_sampled": (LN2 + 2 * LN2 + LN2 + math.log(10)) / 4,
    "kl_sample_train_v1": 0.0,  # d is 0, -ln 2, ln 2, 0
    "kl_sample_train_v2": LN2**2 / 4,
    "kl_sample_train_v3": 0.125,  # r - 1 - ln r is 0, 1 - ln 2, ln 2 - 1/2, 0
    "logprob_diff": LN2 / 2,
    "logprob_diff_max": LN2,
    "logprob_diff_over_1": 0.0,
    "logprob_diff_over_5": 0.0,
    "ratio": 4.5 / 4,
    "ratio_min": 0.5,
    "ratio_max": 2.0,
    "kept": 0.5,
    "clipped_high": 0.25,  # r = 2 with a positive advantage
    "clipped_low": 0.25,  # r = 1/2 with a negative one
    "clamped": 0.0,
    "ess": 4.5**2 / (4 * (1 + 4 + 0.25 + 1)),
}


def measured_facts(given: LossInputs, outputs: TokenOutputs) -> tuple[float, dict[str, float]]:
    made = PpoClip()(given)
    tally = Tally()
    tally.add(made.loss_sum, token_metrics(given.columns_N, outputs, made))
    loss, sums = tally.total(Processes(), len(given.logprob_N))
    return loss, sums.means()


def test_what_is_measured_of_the_trained_tokens() -> None:
    loss, means = measured_facts(*tokens())
    assert means == pytest.approx(FACTS)
    assert loss == pytest.approx(-1 - 1.28 + 0.8 - 1)


def test_shares_of_tokens_that_are_far_off() -> None:
    """d of 6, 2, -25 and 0: over 1, over 5, and a ratio that is cut at exp(20)."""
    mu_N = torch.tensor([-1.0, -1.0, -26.0, -1.0])
    pi_N = torch.tensor([-7.0, -3.0, -1.0, -1.0])
    given = LossInputs(
        pi_N, torch.zeros(4, dtype=torch.int64), {"sampled_logprob": mu_N, "advantage": torch.zeros(4)}
    )
    _, means = measured_facts(given, TokenOutputs(pi_N, None))
    wanted = {
        "logprob_diff": 33 / 4,
        "logprob_diff_max": 25.0,
        "logprob_diff_over_1": 0.75,
        "logprob_diff_over_5": 0.5,
        "clamped": 0.25,
        "ratio_max": math.exp(20),
        "kl_sample_train_v1": -17 / 4,
    }
    assert {key: means[key] for key in wanted} == pytest.approx(wanted)
    assert "entropy" not in means


KINDS = {"ratio_min": Kind.MIN} | dict.fromkeys(("ratio_max", "logprob_diff_max"), Kind.MAX)


def step(loss: float, norm: float, *, tokens: int = 4, applied: bool = True, **means: float) -> StepOutput:
    """A step of so many tokens whose metrics are `FACTS`, but for those that are given."""
    facts = {name: value for name, value in (FACTS | means).items() if name != "ess"}
    facts[RATIO_SQUARED] = means.get("squared", (1 + 4 + 0.25 + 1) / 4)
    facts.pop("squared", None)
    kinds = {name: KINDS.get(name, Kind.MEAN) for name in facts}
    values = {name: value * tokens if kinds[name] is Kind.MEAN else value for name, value in facts.items()}
    return StepOutput(loss, norm, applied, tokens, 9, 10, Sums(tokens, kinds, values))


def test_what_is_measured_of_the_steps() -> None:
    """Agreement of the first step, where the weights are those that sampled; the rest of all steps, by their
    tokens."""
    later = {
        "kept": 0.0, "clipped_high": 0.25, "ratio": 9.0, "ratio_max": 12.0, "ratio_min": 0.75,
        "squared": 100.0, "entropy": 7.0, "kl_sample_train_v3": 7.0, "logprob_diff_max": 7.0,
    }  # fmt: skip
    steps = [step(0.5, 1.0), step(-0.1, 3.0, tokens=12, applied=False, **later)]
    changed = {
        "loss/kept": 4 * 0.5 / 16,
        "loss/clipped_high": 0.25,
        "loss/ratio": (4.5 + 12 * 9.0) / 16,
        "loss/ratio_max": 12.0,
    }
    assert metrics.of_training(steps, 1e-4) == pytest.approx(training_metrics() | changed)
    assert metrics.of_training([], 1e-4) == {"optim/lr": 1e-4, "optim/steps": 0}


def test_sums_of_steps_keep_what_is_no_number_and_refuse_other_facts() -> None:
    broken = step(0.0, 1.0, ratio_max=math.nan, ratio=math.inf)
    measured = metrics.of_training([broken, step(0.0, 1.0)], 1e-4)
    assert math.isnan(measured["loss/ratio_max"]) and measured["loss/ratio"] == math.inf
    assert measured["loss/ratio_min"] == 0.5
    nothing = Sums(0, {"kept": Kind.MEAN}, {"kept": 0.0})
    assert math.isnan(nothing.means()["kept"])
    assert joined([nothing, Sums(4, {"kept": Kind.MEAN}, {"kept": 3.0})]).means() == {"kept": 0.75}
    with pytest.raises(ValueError, match="same facts"):
        joined([nothing, Sums(4, {}, {})])


def training_metrics() -> dict[str, float]:
    of_agreement = ("entropy", "kl_", "logprob_")
    named = {
        name if name.startswith(of_agreement) else f"loss/{name}": value for name, value in FACTS.items()
    }
    return named | {
        "optim/lr": 1e-4,
        "optim/steps": 2,
        "optim/loss": 0.2,
        "optim/grad_norm": 3.0,
        "optim/applied": 0.5,
    }


class Jittery:
    """A model of which a token's logprob depends on how many examples are in its batch: that is its noise.

    It is its own engine and optimiser, too; its gradient is 8 long, and that of the noise 2.
    """

    head_dtype = torch.float32
    weight = 0.0

    def use_dropout(self, on: bool) -> None:
        assert not on

    def batches(self, examples: list[Example], capacity: int) -> list[Batch]:
        assert sum(map(len, examples)) <= capacity
        return [packed_batch(examples[::-1])]  # in another order than they were given

    def add_gradient(self, batch: Batch, loss: Loss, weight: float) -> tuple[TokenOutputs, None]:
        self.weight += weight
        return self.outputs(batch), None

    def gradient_norm(self) -> torch.Tensor:
        return torch.tensor(8.0 if self.weight > 0 else 2.0)

    def zero_grad(self) -> None:
        self.weight = 0.0

    def outputs(self, batch: Batch) -> TokenOutputs:
        size = len(batch.keys)
        noise: dict[tuple[int, int], float] = {(2, 5): 0.1, (2, 6): -0.2}
        values = [noise.get((size, int(token)), 0.0) - float(token) for token in batch.target_N]
        return TokenOutputs(torch.tensor(values), None)


def test_the_noise_floor_is_the_distance_of_the_trainer_from_itself() -> None:
    """Token 5 differs by 0.1, token 6 by -0.2, token 7 not at all; the last example does not fit."""

    def example(number: int, *tokens: int) -> Example:
        key = ExampleKey("train", 0, 0, number)
        return Example(np.array([1, *tokens], np.int32), np.array([False, *[True] * len(tokens)]), key=key)

    jittery: Any = Jittery()
    trainer = Trainer(jittery, jittery, jittery, Processes(), 6, None, "a machine")
    found = measure_noise(trainer, PpoClip(), [example(0, 5, 7), example(1, 6), example(2, 5, 5, 5)])
    k3 = (math.expm1(-0.1) + 0.1 + math.expm1(0.2) - 0.2) / 3
    # Both exp(0.1) and exp(-0.2) are outside [0.9, 1.1].
    wanted = {"noise_floor/k3": k3, "noise_floor/max": 0.2, "noise_floor/outside": 2 / 3}
    assert found.metrics == pytest.approx(wanted, rel=1e-5)
    assert found.noise is not None and jittery.weight == 0
    assert (found.noise.logprob, found.noise.gradient) == (pytest.approx(0.2), 0.25)
    # Alone there is nothing to compare with.
    assert measure_noise(trainer, PpoClip(), [example(0, 5, 7)]) == NOTHING


def test_seconds_of_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("rollbook.rl.metrics.time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = metrics.Clock()
    for stage, seconds in (("eval", 4.0), ("sample", 2.0), ("sample", 1.0)):
        with clock(stage):
            now[0] += seconds
    clock.add("token_export", 0.0)
    now[0] += 0.5
    assert clock.metrics() == {"time/eval": 4.0, "time/sample": 3.0, "time/total": 7.5}
    assert clock.without("eval") == 3.5


def test_every_documented_key_is_checked_here_or_by_a_run() -> None:
    progress = json.loads(encode_metrics({}, 3, 8))
    assert (progress["progress/batch"], progress["progress/done_frac"]) == (3, 0.5)
    of_eval = {"test/env/all/reward/total"}
    noise = {"noise_floor/k3", "noise_floor/max", "noise_floor/outside"}
    # Seconds and the speed made of them: tests/rl/test_run.py finds each in the lines of a run.
    times = {key for key in documented_keys() if key.startswith("time/")} | {"tokens_per_second"}
    checked = {*progress, *of_eval, *noise, *times, *ROLLOUTS, *SAMPLING, *training_metrics()}
    assert documented_keys() - checked == set()
