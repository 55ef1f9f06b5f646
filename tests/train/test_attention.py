"""Packed attention computes no mask: a model that is given one that matters is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.core import VOCABULARY, core_model
from rollbook.train.attention import UnsupportedAttentionError

TOKENS = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
RIGHT = LEFT.flip(1)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 4},
    "gemma2": {"head_dim": 16, "sliding_window": 4},
}


@pytest.mark.parametrize("mask", [LEFT, RIGHT, LEFT.bool()], ids=["left", "right", "bool"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_padding_mask_is_refused(kind: str, mask: torch.Tensor) -> None:
    model = core_model(kind, **FAMILIES[kind]).model
    with pytest.raises(UnsupportedAttentionError, match="would ignore the padding mask: pack the sequences"):
        model(input_ids=TOKENS, attention_mask=mask)


def test_generation_of_padded_prompts_is_refused() -> None:
    """Its logits were off by 0.22 where nobody refused it."""
    model = core_model().model
    with pytest.raises(UnsupportedAttentionError, match="would ignore the padding mask"):
        model.generate(
            input_ids=TOKENS, attention_mask=LEFT, max_new_tokens=2, do_sample=False, pad_token_id=0
        )


def test_a_mask_over_pairs_of_tokens_is_refused() -> None:
    blocks = torch.ones(1, 1, 9, 9).tril().bool()
    blocks[..., 5:, :5] = False
    with pytest.raises(UnsupportedAttentionError, match="does not know attention_mask"):
        core_model().model(input_ids=TOKENS[:1], attention_mask=blocks)


def test_a_mask_that_hides_nothing_changes_nothing() -> None:
    model = core_model().model.eval()
    with torch.no_grad():
        assert torch.equal(
            model(input_ids=TOKENS, attention_mask=torch.ones_like(LEFT)).logits,
            model(input_ids=TOKENS).logits,
        )


def test_padded_rows_have_their_own_logits_where_packing_is_off() -> None:
    """What the refusal advises: the model's own attention heeds the mask."""
    wrapped = core_model()
    wrapped.use_packing(False)
    model = wrapped.model.eval()
    with torch.no_grad():
        positions = (LEFT.cumsum(1) - 1).clamp(min=0)
        padded = model(input_ids=TOKENS, attention_mask=LEFT, position_ids=positions).logits
        alone = model(input_ids=TOKENS[:1, 3:]).logits
    assert torch.allclose(padded[:1, 3:], alone, atol=1e-5)
