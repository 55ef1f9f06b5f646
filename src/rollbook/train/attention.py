"""The one attention function that our models run with, in place of the library's: three paths, nothing to
switch.

- packed (`boundaries=`): attention stays inside each sequence of a packed batch. On a GPU it is PyTorch's
  variable-length flash attention; elsewhere one causal attention per sequence, the same by construction.
- slots (`slots` of the module): the sampler's; the object decides what a row attends to. Not a keyword,
  because some families do not pass keywords on.
- plain: one causal attention over the whole row.

It is registered with transformers under a name of its own, so any model that takes its attention from there
can use it. What it would have to ignore it refuses: a padding mask, attention sinks, any keyword it does
not know.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

ATTENTION = "rollbook"

# What models pass on to every attention function and that changes nothing here.
_HARMLESS = frozenset(
    {
        "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
        "output_router_logits", "return_dict", "num_items_in_batch",
    }
)  # fmt: skip


class UnsupportedAttentionError(NotImplementedError):
    """A model asks for something that this attention would get wrong."""


class Slots(Protocol):
    """Keys and values of sequences that are being sampled, of one layer."""

    def attend(
        self,
        query: Tensor,  # B x heads x T x width
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Stores the keys and values of these tokens; returns B x T x heads x width."""


def register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, no_mask)


def no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """Sequences are kept apart by their boundaries; a mask over all pairs of tokens is never made."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedAttentionError(
            "this attention would ignore the padding mask: pack the sequences, "
            "or run the model with its own attention"
        )


def attention(
    module: nn.Module,
    query: Tensor,  # B x heads x T x width; B is 1 when packed
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    boundaries: Tensor | None = None,
    longest: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The shapes are those of transformers' attention functions: the output is B x T x heads x width."""
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _HARMLESS)
    if unknown or attention_mask is not None or is_causal is False:
        names = unknown or (["attention_mask"] if attention_mask is not None else ["is_causal"])
        raise UnsupportedAttentionError(f"this attention does not know {', '.join(names)}")
    slots: Slots | None = module.__dict__.get("slots")
    if slots is not None:
        output = slots.attend(
            query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap
        )
        return output, None
    if boundaries is None or longest is None:
        return _causal(query, key, value, scaling, sliding_window, softcap, dropout).transpose(1, 2), None
    half = query.dtype in (torch.bfloat16, torch.float16)
    if _varlen is not None and query.is_cuda and half and not dropout and softcap is None:
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        parts = (part[0].transpose(0, 1) for part in (query, key, value))
        return _varlen(*parts, boundaries, longest, scaling, window)[None], None
    # Cut by `split`, whose gradient is one concatenation; that of a slice is as long as the whole row.
    lengths = boundaries.diff().tolist()
    sequences = zip(*(torch.split(part, lengths, dim=2) for part in (query, key, value)), strict=True)
    outputs = [
        _causal(query_, key_, value_, scaling, sliding_window, softcap, dropout)
        for query_, key_, value_ in sequences
        if query_.shape[2]
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    length, known = query.shape[2], key.shape[2]
    mask = None
    if (window is not None and known > window) or length != known or softcap is not None:
        places = torch.arange(known - length, known, device=query.device)[:, None]
        others = torch.arange(known, device=query.device)[None, :]
        mask = others <= places
        if window is not None:
            mask &= others > places - window
    if softcap is not None:
        assert mask is not None
        return _soft_capped(query, key, value, mask, scaling, softcap, dropout)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and length > 1,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _soft_capped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    softcap: float,
    dropout: float,
) -> Tensor:
    """Scores go through cap * tanh(score / cap), which no fused kernel of PyTorch does."""
    shared = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    chances = scores.float().masked_fill(~mask, float("-inf")).softmax(-1).to(query.dtype)
    return functional.dropout(chances, p=dropout) @ value


def _find_varlen() -> Any:
    """PyTorch's variable-length attention, whose arguments changed from release to release."""
    if torch.version.cuda is None:  # there is none for a CPU, and importing it takes half a second
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known or "scale" not in known:
        return None

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Tensor,
        longest: int,
        scale: float | None,
        window: tuple[int, int],
    ) -> Tensor:
        # Kernels share a key head among its query heads by themselves; newer releases want that said.
        shares = query.shape[1] != key.shape[1] and "enable_gqa" in known
        options: dict[str, Any] = {"enable_gqa": True} if shares else {}
        output: Any = varlen_attn(
            query, key, value, ends, ends, longest, longest, scale=scale, window_size=window, **options
        )
        return cast(Tensor, output)

    return attend


_varlen = _find_varlen()
