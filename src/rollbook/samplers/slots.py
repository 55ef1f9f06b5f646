"""The keys and values of a fixed number of rows ("slots") that decode together, each at its own position.

The library's caches have one length for all rows, and refilling needs one per row. The model calls `attend`
through the attention function registered in `train/attention.py`: with one prompt it fills a slot, else every
row writes the key and value of its new token and attends over what it has.

Rows do not see each other: the number of rows is fixed, a prompt is computed alone, and the products are
written out, because on a CPU the result of the fused kernel depends on the slot. So the bits that a request
gets depend on the request alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class Slots:
    def __init__(self, count: int, length: int, device: torch.device) -> None:
        self.count, self.length, self.device = count, length, device
        # Per layer: keys (count x heads x width x length) and values (count x heads x length x width). With
        # the positions of the keys last, a product with a query is fast, and none of its sums is over them.
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._filling: int | None = None  # the slot that a prompt goes to; None: every row decodes
        self._end = length  # positions from here on are not read
        self._position_S = torch.zeros(count, dtype=torch.long, device=device)
        self._row_S = torch.arange(count, device=device)
        self._place_L = torch.arange(length, device=device)
        self._masks: dict[int | None, Tensor] = {}
        self._places: dict[int, Tensor] = {}

    @property
    def cache_bytes(self) -> int:
        """The memory of all keys and values; layers are allocated when they are first used."""
        kept = [tensor for layer in self._layers.values() for tensor in layer]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def fill(self, slot: int) -> None:
        """The next forward pass is the prompt of `slot`, from position 0."""
        self._filling = slot

    def decode(self, position_S: Tensor, end: int) -> None:
        """The next forward pass is one token per row, at `position_S`; all of these are below `end`."""
        self._filling, self._position_S, self._end = None, position_S, end
        self._masks.clear()
        self._places.clear()

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Give other slots the first positions of `source`."""
        if not targets or not length:
            return
        target = torch.tensor(targets, device=self.device)
        for keys, values in self._layers.values():
            keys[target, :, :, :length] = keys[source, :, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def clear(self, slot: int) -> None:
        """Forget values that are no numbers; a weight of zero would not keep them out of the next request."""
        for caches in self._layers.values():
            for cache in caches:
                cache[slot] = 0

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """The shapes are those of transformers' attention functions: rows x heads x tokens x width in,
        rows x tokens x heads x width out."""
        keys, values = self._caches(module.layer_idx, key, value)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self._filling is not None:
            length = key.shape[2]
            keys[self._filling, :, :, :length] = key[0].transpose(1, 2)
            values[self._filling, :, :length] = value[0]
            return _causal(query, key, value, scale, sliding_window, softcap).transpose(1, 2)
        keys[self._row_S, :, :, self._position_S] = key[:, :, 0]
        self._write(values, value)
        rows, heads, _, width = query.shape
        query = (query * scale).view(rows, keys.shape[1], -1, width)
        scores = (query @ keys[..., : self._end]).float()
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.add_(self._mask(sliding_window)).softmax(-1).to(query.dtype)
        return (weights @ values[:, :, : self._end]).view(rows, 1, heads, values.shape[-1])

    def _caches(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Made at the first pass, when the model shows how wide its keys and values are."""
        if layer not in self._layers:
            (_, heads, _, width), value_width = key.shape, value.shape[3]
            empty = partial(torch.zeros, dtype=key.dtype, device=self.device)
            keys = empty((self.count, heads, width, self.length))
            self._layers[layer] = (keys, empty((self.count, heads, self.length, value_width)))
        return self._layers[layer]

    def _write(self, cache: Tensor, new: Tensor) -> None:
        heads, width = cache.shape[1], cache.shape[3]
        if heads not in self._places:
            row = self._row_S[:, None] * heads + torch.arange(heads, device=self.device)
            self._places[heads] = (row * self.length + self._position_S[:, None]).flatten()
        cache.view(-1, width).index_copy_(0, self._places[heads], new.reshape(-1, width))

    def _mask(self, window: int | None) -> Tensor:
        """Zero where a row may look, minus infinity elsewhere; the same for every layer of a step."""
        if window not in self._masks:
            place, position = self._place_L[: self._end], self._position_S[:, None]
            hidden = place > position
            if window is not None:
                hidden |= place <= position - window
            mask = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, -math.inf)
            self._masks[window] = mask[:, None, None]
        return self._masks[window]


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attention of a whole prompt over itself."""
    length, shares = query.shape[2], query.shape[1] != key.shape[1]
    windowed = window is not None and length > window
    if softcap is None and not windowed:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=length > 1, scale=scale, enable_gqa=shares
        )
    place = torch.arange(length, device=query.device)
    seen = place <= place[:, None]
    if window is not None:
        seen &= place > place[:, None] - window
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scale, enable_gqa=shares
        )
    rows, heads, _, width = query.shape
    query = (query * scale).view(rows, key.shape[1], -1, length, width)
    scores = (query @ key[:, :, None].transpose(3, 4)).float()
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).to(query.dtype)
    return (weights @ value[:, :, None]).view(rows, heads, length, value.shape[-1])
