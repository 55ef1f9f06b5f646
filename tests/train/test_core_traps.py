"""The traps of training that others fell into, by the number under which docs list them; each on the real
engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.core import CPU, core_engine, core_model, sampled_examples, step_gradients
from rollbook.train.batch import Example, pack, packed_batch, padded_batch
from rollbook.train.engine import Engine
from rollbook.train.losses import CrossEntropy, Dppo, ImportanceSampling, PpoClip, ReferenceKl
from rollbook.train.model import Model
from rollbook.train.token_math import head_outputs, logit_outputs

RL_LOSSES = [ImportanceSampling(), PpoClip(), Dppo()]


def by_hand(model: Model, example: Example) -> torch.Tensor:
    """log softmax of the library's own logits over the temperature, for each token but the first."""
    token_1T = torch.from_numpy(example.token_T.astype(np.int64))[None]
    temperature_T = example.columns_T.get("temperature", np.ones(len(example), np.float32))
    model.use_packing(False)
    logits_TV = model.model(input_ids=token_1T, use_cache=False).logits[0, :-1]
    model.use_packing(True)
    scaled_TV = logits_TV / torch.from_numpy(temperature_T[1:, None])
    return scaled_TV.log_softmax(-1).gather(1, token_1T[0, 1:, None]).squeeze(1)


def sequences(
    engine: Engine, parts: int, examples: list[Example], loss: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A step with so many micro-batches."""
    cut = [list(some) for some in np.array_split(np.arange(len(examples)), parts)]
    return step_gradients(
        engine, [packed_batch([examples[place] for place in some]) for some in cut if some], loss
    )


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert one.keys() == other.keys() and one
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-4, atol=tolerance, msg=name)


def test_t01_logprobs_and_entropy_are_those_of_the_temperature_of_each_token() -> None:
    model, examples = core_model(), sampled_examples([9, 17, 4])
    batch = packed_batch(examples)
    outputs = model.outputs(batch, entropy=True)
    wanted_N, entropy_N = [], []
    model.use_packing(False)
    for example in examples:
        token_1T = torch.from_numpy(example.token_T.astype(np.int64))[None]
        scaled_TV = model.model(input_ids=token_1T).logits[0] / 1.0
        for place in np.flatnonzero(example.trained_T[1:]) + 1:
            spread_V = (scaled_TV[place - 1] / float(example.columns_T["temperature"][place])).log_softmax(-1)
            wanted_N.append(spread_V[int(example.token_T[place])])
            entropy_N.append(-(spread_V.exp() * spread_V).sum())
    torch.testing.assert_close(outputs.logprob_N, torch.stack(wanted_N), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs.entropy_N, torch.stack(entropy_N), rtol=1e-5, atol=1e-5)
    assert outputs.entropy_N is not None and not outputs.entropy_N.requires_grad


def test_t06_every_logprob_is_float32() -> None:
    batch = packed_batch(sampled_examples([9, 5]))
    outputs = core_model(dtype=torch.bfloat16).outputs(batch, entropy=True)
    assert outputs.logprob_N.dtype is torch.float32 and outputs.entropy_N is not None
    assert outputs.entropy_N.dtype is torch.float32
    assert batch.columns_N["sampled_logprob"].dtype is torch.float32


def test_t07_a_token_is_predicted_by_the_row_before_it() -> None:
    """Three tokens by hand; and an advantage on one of them alone moves what that one would move."""
    engine = core_engine()
    token_T, trained_T = np.array([5, 8, 13], np.int32), np.array([False, True, True])
    sampled_T = np.array([np.nan, -4.0, -4.2], np.float32)
    for place in (1, 2):
        advantage_T = np.where(np.arange(3) == place, 1.5, 0.0).astype(np.float32)
        example = Example(token_T, trained_T, {"advantage": advantage_T, "sampled_logprob": sampled_T})
        made, found = step_gradients(engine, [packed_batch([example])], ImportanceSampling())
        logprob = by_hand(engine.model, example)[place - 1]
        loss = -1.5 * (logprob - float(sampled_T[place])).exp() / 2  # two trained tokens
        assert made.loss == pytest.approx(float(loss), rel=1e-5)
        loss.backward()
        wanted = {name: p.grad.clone() for name, p in engine.model.model.named_parameters()}
        engine.optimizer.zero_grad()
        close(found, wanted)


@pytest.mark.parametrize("loss", [*RL_LOSSES, ReferenceKl()], ids=repr)
def test_t08_the_first_step_on_own_samples_is_on_policy_to_the_bit(loss: Any) -> None:
    engine, examples = core_engine(), sampled_examples([9, 17, 4])
    batch = packed_batch(examples)
    with torch.no_grad():
        batch.columns_N["sampled_logprob"] = engine.model.outputs(batch).logprob_N
    means = engine.step([batch], loss, 0.0).means
    exact = {"ratio": 1.0, "ratio_min": 1.0, "ratio_max": 1.0, "kept": 1.0, "ess": 1.0}
    zero = ("clamped", "clipped_high", "clipped_low", "logprob_diff_max", "kl_sample_train_v1")
    wanted = exact | dict.fromkeys((*zero, "kl_sample_train_v2", "kl_sample_train_v3"), 0.0)
    assert {name: means[name] for name in wanted} == wanted


@pytest.mark.parametrize("loss", [CrossEntropy(), *RL_LOSSES], ids=repr)
def test_t09_how_many_micro_batches_there_are_changes_no_gradient(loss: Any) -> None:
    engine, examples = core_engine(), sampled_examples([9, 17, 4, 30, 6, 11, 8])
    whole, wanted = sequences(engine, 1, examples, loss)
    for parts in (3, 7):
        made, found = sequences(engine, parts, examples, loss)
        close(found, wanted)
        assert made.loss == pytest.approx(whole.loss, rel=1e-5)


@pytest.mark.parametrize("loss", [CrossEntropy(), *RL_LOSSES], ids=repr)
def test_t10_and_t24_what_a_tool_says_after_the_last_sample_changes_nothing(loss: Any) -> None:
    """Neither how much of it there is, nor what it is: not the denominator, and no gradient of its own."""
    engine, examples = core_engine(), sampled_examples([9, 17, 4])
    made, wanted = step_gradients(engine, [packed_batch(examples)], loss)
    for length, token in ((5, 3), (10, 3), (10, 4)):
        longer = []
        for example in examples:
            columns_T = {name: np.pad(column, (0, length)) for name, column in example.columns_T.items()}
            token_T = np.concatenate([example.token_T, np.full(length, token, np.int32)])
            longer.append(
                replace(
                    example,
                    token_T=token_T,
                    trained_T=np.pad(example.trained_T, (0, length)),
                    columns_T=columns_T,
                )
            )
        again, found = step_gradients(engine, [packed_batch(longer)], loss)
        close(found, wanted)
        assert again.loss == pytest.approx(made.loss, rel=1e-5)
        assert again.trained_tokens == made.trained_tokens


def test_t11_every_metric_is_the_same_however_the_step_is_cut() -> None:
    engine, examples = core_engine(), sampled_examples([9, 17, 4, 30, 6, 11, 8])
    whole, _ = sequences(engine, 1, examples, PpoClip())
    names = {"entropy", "entropy_sampled", "ratio", "ratio_min", "ratio_max", "ess", "kept", "clipped_low",
            "kl_sample_train_v1", "kl_sample_train_v2", "kl_sample_train_v3", "logprob_diff",
            "logprob_diff_max", "logprob_diff_over_1", "logprob_diff_over_5"}  # fmt: skip
    assert names <= whole.means.keys()
    for parts in (3, 7):
        made, _ = sequences(engine, parts, examples, PpoClip())
        assert made.means == pytest.approx(whole.means, rel=1e-5, abs=1e-9)
        counts = [(one.applied, one.trained_tokens, one.real_tokens) for one in (made, whole)]
        assert counts[0] == counts[1] and made.allocated_tokens == whole.allocated_tokens


def test_t11_every_metric_is_its_formula() -> None:
    engine, example = core_engine(), sampled_examples([40])[0]
    sampled_T = example.columns_T["sampled_logprob"].copy()
    sampled_T[[5, 9]] += (8.0, -2.0)  # some that are far off
    example = replace(example, columns_T={**example.columns_T, "sampled_logprob": sampled_T})
    trained_T = example.trained_T[1:]
    with torch.no_grad():
        pi_N = by_hand(engine.model, example)[torch.from_numpy(trained_T)].double().numpy()
    mu_N = sampled_T[1:][trained_T].astype(np.float64)
    d_N, ratio_N = mu_N - pi_N, np.exp(pi_N - mu_N)
    wanted = {
        "entropy_sampled": -mu_N.mean(),
        "kl_sample_train_v1": d_N.mean(),
        "kl_sample_train_v2": (d_N**2).mean() / 2,
        "kl_sample_train_v3": (ratio_N - np.log(ratio_N) - 1).mean(),
        "logprob_diff": np.abs(d_N).mean(),
        "logprob_diff_max": np.abs(d_N).max(),
        "logprob_diff_over_1": (np.abs(d_N) > 1).mean(),
        "logprob_diff_over_5": (np.abs(d_N) > 5).mean(),
        "ratio": ratio_N.mean(),
        "ratio_min": ratio_N.min(),
        "ratio_max": ratio_N.max(),
        "ess": 1 / ((ratio_N / ratio_N.mean()) ** 2).mean(),
        "kept": 1.0,
        "clamped": 0.0,
    }
    means = engine.step([packed_batch([example])], ImportanceSampling(), 0.0).means
    assert {name: means[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)


def test_a_clipped_token_leaves_the_denominator_alone() -> None:
    """The mean is over all trained tokens, fixed before the loss leaves any out."""
    engine = core_engine()
    examples = [replace(one, columns_T={**one.columns_T, "advantage": np.ones(len(one), np.float32)})
                for one in sampled_examples([30], temperature=False)]  # fmt: skip
    seen = []
    free = engine.step(
        [packed_batch(examples)], ImportanceSampling(), 0.0, seen=lambda *given: seen.append(given)
    )
    clipped = engine.step([packed_batch(examples)], PpoClip(clip_high=0.1), 0.0)
    (_, _, made) = seen[0]
    ratio_N = made.facts_N["ratio"]
    assert 0 < clipped.means["clipped_high"] < 1
    assert free.loss == pytest.approx(-float(ratio_N.mean()), rel=1e-5)
    assert clipped.loss == pytest.approx(-float(ratio_N.clamp(max=1.1).mean()), rel=1e-5)
    assert clipped.means["clipped_high"] == pytest.approx(float((ratio_N > 1.1).double().mean()))


def test_weights_count_in_the_loss_and_in_its_denominator() -> None:
    engine, (example,) = core_engine(), sampled_examples([20], temperature=False)
    weight_T = np.where(np.arange(20) % 2, 0.25, 1.0).astype(np.float32)
    weighted = replace(example, columns_T={**example.columns_T, "weight": weight_T})
    made = engine.step([packed_batch([weighted])], CrossEntropy(), 0.0)
    nll_N = -by_hand(engine.model, example).detach().numpy()[example.trained_T[1:]]
    weight_N = weight_T[1:][example.trained_T[1:]]
    assert made.loss == pytest.approx(float((nll_N * weight_N).sum() / weight_N.sum()), rel=1e-5)
    assert engine.evaluate([packed_batch([weighted])]) == pytest.approx(made.loss, rel=1e-5)
    dead = replace(example, columns_T={"weight": np.zeros(20, np.float32)})
    before = [weight.clone() for weight in engine.model.parameters()]
    void = engine.step([packed_batch([dead])], CrossEntropy(), 1.0)
    assert not void.applied and np.isnan(void.loss)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))


def with_dropout(kind: str) -> Model:
    model = core_model(attention_dropout=0.1)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear", init_lora_weights=False)
        model = Model(get_peft_model(model.model, config), tokenizer=None, is_adapter=True)
        model.use_packing(True)
    if kind == "checkpointing":
        model.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@pytest.mark.parametrize("kind", ["attention", "lora", "checkpointing"])
def test_t21_dropout_is_off_where_it_was_off_in_sampling(kind: str) -> None:
    model = with_dropout(kind)
    batch = packed_batch(sampled_examples([30, 12], temperature=False))
    model.model.eval()
    plain = model.outputs(batch).logprob_N
    for dropout, same in ((False, True), (True, False)):
        engine, seen = core_engine(model, dropout=dropout), []
        for _ in range(2):
            engine.step([batch], ImportanceSampling(), 0.0, seen=lambda *given, to=seen: to.append(given[1]))
        assert torch.equal(seen[0].logprob_N, seen[1].logprob_N) == same
        assert torch.equal(seen[0].logprob_N, plain) == same
    if kind == "checkpointing":  # and memory is still saved
        model.use_dropout(False)
        runs = []
        hook = model.blocks[0].input_layernorm.register_forward_hook(lambda *_: runs.append(1))
        model.outputs(batch).logprob_N.sum().backward()
        hook.remove()
        assert len(runs) == 2


def test_t31_a_rate_of_zero_moves_no_bit() -> None:
    engine = core_engine()
    before = [weight.clone() for weight in engine.model.parameters()]
    made = [engine.step(pack(sampled_examples([9, 17]), 20), ImportanceSampling(), 0.0) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))
    assert made[0] == made[1] == made[2]


def test_forbidden_tokens_have_no_part_in_the_entropy() -> None:
    logits_NV = torch.tensor([[1.0, 2.0, -torch.inf], [0.0, -torch.inf, -torch.inf]], requires_grad=True)
    outputs = logit_outputs(logits_NV, torch.tensor([1, 0]), entropy=True)
    two_V = torch.tensor([1.0, 2.0]).softmax(-1)
    torch.testing.assert_close(
        outputs.entropy_N, torch.stack([-(two_V * two_V.log()).sum(), torch.zeros(())])
    )
    outputs.logprob_N.sum().backward()
    assert logits_NV.grad is not None and torch.isfinite(logits_NV.grad).all()


OWN_LOGITS: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16, "final_logit_softcapping": 0.5},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
}


@pytest.mark.parametrize("kind", OWN_LOGITS)
def test_models_that_make_their_logits_in_their_own_way(kind: str) -> None:
    """A cap, a scale: the same numbers and gradients as from the library's logits, at mixed temperatures."""
    from rollbook.train.checks import head_matches

    model, examples = core_model(kind, **OWN_LOGITS[kind]), sampled_examples([9, 14])
    assert not head_matches(model, examples, CPU)
    model.chunks_head = False
    wanted_N = torch.cat([by_hand(model, one)[torch.from_numpy(one.trained_T[1:])] for one in examples])
    wanted_N.square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.model.named_parameters() if p.grad is not None}
    for batch in (packed_batch(examples), padded_batch(examples)):
        model.use_packing(batch.forward.boundaries is not None)
        model.model.zero_grad(set_to_none=True)
        outputs = model.outputs(batch)
        torch.testing.assert_close(outputs.logprob_N, wanted_N, rtol=1e-5, atol=1e-5)
        outputs.logprob_N.square().sum().backward()
        found = {name: p.grad for name, p in model.model.named_parameters() if p.grad is not None}
        close(found, wanted, tolerance=1e-4)


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_mixed_temperatures_equal_a_plain_softmax(rows: int) -> None:
    chance = torch.Generator().manual_seed(1)
    hidden_NH = torch.randn(23, 8, generator=chance, dtype=torch.float64, requires_grad=True)
    head_VH = torch.randn(31, 8, generator=chance, dtype=torch.float64, requires_grad=True)
    target_N = torch.randint(0, 31, (23,), generator=chance)
    temperature_N = torch.rand(23, generator=chance) * 2 + 0.2
    weight_N = torch.randn(23, generator=chance)
    made = head_outputs(
        hidden_NH.float(), head_VH.float(), target_N, temperature_N=temperature_N, entropy=True, rows=rows
    )
    found = torch.autograd.grad((made.logprob_N * weight_N).sum(), (hidden_NH, head_VH))
    spread_NV = (hidden_NH @ head_VH.T / temperature_N[:, None]).log_softmax(-1)
    logprob_N = spread_NV.gather(1, target_N[:, None]).squeeze(1)
    wanted = torch.autograd.grad((logprob_N * weight_N).sum(), (hidden_NH, head_VH))
    torch.testing.assert_close(made.logprob_N.double(), logprob_N, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        made.entropy_N.double(), -(spread_NV.exp() * spread_NV).sum(-1), rtol=1e-5, atol=1e-5
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
