"""The chunked head and packing give what plain transformers gives, in loss and in every gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.train.batch import Example, Shape, packed_batch, padded_batch
from rollbook.train.loading import load_model
from rollbook.train.model import Model
from rollbook.train.token_math import head_outputs
from tiny_model import LLAMA

VOCABULARY = 61


def tiny(kind: str = "llama", **changes: Any) -> Model:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**LLAMA, "vocab_size": VOCABULARY, "model_type": kind, **changes}
    values.pop("model_type")
    torch.manual_seed(3)
    return Model(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)), tokenizer=None)


def samples_of(lengths: list[int], seed: int) -> list[Example]:
    chance = np.random.default_rng(seed)
    made = []
    for length in lengths:
        trained = chance.random(length) < 0.6
        trained[-1] = True  # something to learn in each
        made.append(Example(chance.integers(0, VOCABULARY, length).astype(np.int32), trained))
    return made


def plain_loss(model: Model, samples: list[Example]) -> torch.Tensor:
    """Sample by sample, with the model's own loss."""
    model.use_packing(False)
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        ids = torch.from_numpy(sample.token_T.astype(np.int64))[None]
        labels = torch.where(torch.from_numpy(sample.trained_T)[None], ids, -100)
        count = int((labels[0, 1:] != -100).sum())
        if count:
            total = total + model.model(input_ids=ids, labels=labels).loss * count
            tokens += count
    return total / tokens


def gradients(model: Model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.model.named_parameters() if p.grad is not None}
    model.model.zero_grad(set_to_none=True)
    return found


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 40), width=st.integers(1, 24), vocabulary=st.integers(2, 80),
    chunk=st.integers(1, 50), seed=st.integers(0, 10_000),
)  # fmt: skip
def test_chunked_logprobs_are_those_of_a_softmax(
    rows: int, width: int, vocabulary: int, chunk: int, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(rows, width, requires_grad=True)
    head = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,))
    weights = torch.randn(rows)  # RL weighs every token differently
    ours = head_outputs(hidden, head, targets, rows=chunk).logprob_N
    (ours * weights).sum().backward()
    mine = (hidden.grad, head.grad)
    hidden.grad = head.grad = None
    theirs = (hidden @ head.T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    (theirs * weights).sum().backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for a, b in zip(mine, (hidden.grad, head.grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
    head_outputs(hidden, head, torch.zeros(5, dtype=torch.int64)).logprob_N.sum().backward()
    assert hidden.grad is not None and head.grad is None


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=6), seed=st.integers(0, 1000), pad=st.booleans()
)
def test_packed_and_padded_batches_train_as_each_sample_alone(
    lengths: list[int], seed: int, pad: bool
) -> None:
    model = tiny()
    samples = samples_of(lengths, seed)
    reference = plain_loss(model, samples)
    reference.backward()
    wanted = gradients(model)
    for packs in (True, False):
        model.use_packing(packs)
        extra: Any = {"shape": Shape(sum(lengths) + 7, 40)} if pad and packs else {}
        batch = (packed_batch if packs else padded_batch)(samples, **extra)
        loss = -model.outputs(batch).logprob_N.mean()
        loss.backward()
        torch.testing.assert_close(loss, reference, rtol=1e-5, atol=1e-5)
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(
                gradient, wanted[name], rtol=1e-3, atol=1e-5, msg=f"{name}, packs={packs}"
            )


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2"])
def test_other_families(kind: str) -> None:
    """A sliding window and a cap on the scores are kept; a cap on the logits is seen, not trained wrongly."""
    from rollbook.train.checks import head_matches, packing_keeps_apart

    changes = {"sliding_window": 8} if kind == "mistral" else {}
    model = tiny(kind, head_dim=16, **changes)
    samples = samples_of([20, 13], 5)
    model.use_packing(True)
    assert packing_keeps_apart(model, samples, torch.device("cpu")) is None
    assert head_matches(model, samples, torch.device("cpu")) == (kind != "gemma2")
    model.chunks_head = kind != "gemma2"
    loss = -model.outputs(packed_batch(samples)).logprob_N.mean()
    torch.testing.assert_close(loss, plain_loss(model, samples), rtol=1e-4, atol=1e-5)


def test_contamination_is_seen() -> None:
    """With an attention that ignores the boundaries, the self-test must not pass."""
    from rollbook.train import attention
    from rollbook.train.checks import packing_keeps_apart

    model = tiny()
    model.use_packing(True)
    from transformers import AttentionInterface

    def leaky(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        options.pop("boundaries", None)
        return attention.attention(module, query, key, value, mask, **options)

    def choose(on: bool) -> None:
        model.base.set_attn_implementation(attention.ATTENTION if on else "sdpa")

    samples = samples_of([12, 15], 1)
    AttentionInterface.register(attention.ATTENTION, leaky)
    try:
        model.base.set_attn_implementation(attention.ATTENTION)
        model.use_packing = choose  # type: ignore[method-assign] # its own would put the right one back
        problem = packing_keeps_apart(model, samples, torch.device("cpu"))
    finally:
        attention.register_attention()
    assert problem is not None and "differ by" in problem


def test_loading_a_model_says_what_is_wrong(tmp_path: Any) -> None:
    from rollbook.errors import UsageError
    from rollbook.train.model_settings import ModelSettings

    with pytest.raises(UsageError, match="no such directory"):
        load_model(ModelSettings(path=str(tmp_path / "nothing")), seed=0, dtype=torch.float32)
