"""Attention that stays inside each sequence of a packed batch.

Registered with transformers under a name of its own, so any model that takes its attention from there can
use it. On a GPU it is PyTorch's own variable-length flash attention; elsewhere one causal attention a
sequence, which is the same by construction.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

PACKED = "rollbook_packed"


def register_packed_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED, packed_attention)
    # Sequences are kept apart by their boundaries; a mask over all pairs of tokens is never made.
    AttentionMaskInterface.register(PACKED, lambda *_, **__: None)


def packed_attention(
    module: nn.Module,
    query: Tensor,  # 1 x heads x T x width
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    boundaries: Tensor | None = None,
    longest: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The shapes are those of transformers' attention functions: the output is 1 x T x heads x width."""
    if softcap is not None:
        raise NotImplementedError("attention with a soft cap cannot be packed")
    if boundaries is None or longest is None:  # not a packed batch: generation, a probe
        output = _causal(query, key, value, scaling, sliding_window, dropout)
        return output.transpose(1, 2), None
    if (
        _varlen is not None
        and query.is_cuda
        and not dropout
        and query.dtype in (torch.bfloat16, torch.float16)
    ):
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        parts = (part[0].transpose(0, 1) for part in (query, key, value))
        output = _varlen(*parts, boundaries, longest, scaling, window)
        return output[None], None
    outputs = []
    ends = boundaries.tolist()
    for start, end in pairwise(ends):
        if start == end:
            continue
        inside = slice(start, end)
        outputs.append(
            _causal(
                query[:, :, inside], key[:, :, inside], value[:, :, inside], scaling, sliding_window, dropout
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, dropout: float
) -> Tensor:
    length, known = query.shape[2], key.shape[2]
    mask = None
    if (window is not None and known > window) or length != known:
        places = torch.arange(known - length, known, device=query.device)[:, None]
        others = torch.arange(known, device=query.device)[None, :]
        mask = others <= places
        if window is not None:
            mask &= others > places - window
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


def _find_varlen() -> Any:
    """PyTorch's variable-length attention, whose arguments changed from release to release."""
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
