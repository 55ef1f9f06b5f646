"""The keys and values of a fixed number of rows ("slots") that decode together, each at its own position.

The library's caches have one length for all rows, and refilling needs one per row. The model calls `attend`
of a layer's part through the attention function registered in `train/attention.py`: with one prompt it fills
a slot, else every row writes the key and value of its new token and attends over what it has.

Rows do not see each other: the number of rows is fixed, a prompt is computed alone, and the products are
written out, because on a CPU the result of the fused kernel depends on the slot. So the bits that a request
gets depend on the request alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional


class Slots:
    def __init__(self, count: int, length: int, device: torch.device) -> None:
        self.count, self.length, self.device = count, length, device
        self.filling: int | None = None  # the slot that a prompt goes to; None: every row decodes
        self.end = length  # positions from here on are not read
        self.position_S = torch.zeros(count, dtype=torch.long, device=device)
        self.row_S = torch.arange(count, device=device)
        # The same for every layer of a step: where a row may look by window, where it writes by heads.
        self.masks: dict[int | None, Tensor] = {}
        self.places: dict[int, Tensor] = {}
        self._place_L = torch.arange(length, device=device)
        self._layers: dict[int, LayerSlots] = {}

    def layer(self, number: int) -> LayerSlots:
        """The part of one layer."""
        if number not in self._layers:
            self._layers[number] = LayerSlots(self)
        return self._layers[number]

    @property
    def cache_bytes(self) -> int:
        """The memory of all keys and values; layers are allocated when they are first used."""
        return sum(
            cache.numel() * cache.element_size() for layer in self._layers.values() for cache in layer.caches
        )

    def fill(self, slot: int) -> None:
        """The next forward pass is the prompt of `slot`, from position 0."""
        self.filling = slot

    def decode(self, position_S: Tensor, end: int) -> None:
        """The next forward pass is one token per row, at `position_S`; all of these are below `end`."""
        self.filling, self.position_S, self.end = None, position_S, end
        self.masks = {window: self._mask(window) for window in self.masks}
        self.places = {heads: self._places(heads) for heads in self.places}

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Give other slots the first positions of `source`."""
        if not targets or not length:
            return
        target = torch.tensor(targets, device=self.device)
        for layer in self._layers.values():
            keys, values = layer.caches
            keys[target, :, :, :length] = keys[source, :, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def clear(self, slot: int) -> None:
        """Forget values that are no numbers; a weight of zero would not keep them out of the next request."""
        for layer in self._layers.values():
            for cache in layer.caches:
                cache[slot] = 0

    def mask(self, window: int | None) -> Tensor:
        if window not in self.masks:
            self.masks[window] = self._mask(window)
        return self.masks[window]

    def places_of(self, heads: int) -> Tensor:
        if heads not in self.places:
            self.places[heads] = self._places(heads)
        return self.places[heads]

    def _mask(self, window: int | None) -> Tensor:
        """Zero where a row may look, minus infinity elsewhere."""
        place, position = self._place_L[: self.end], self.position_S[:, None]
        hidden = place > position
        if window is not None:
            hidden |= place <= position - window
        mask = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, -math.inf)
        return mask[:, None, None]

    def _places(self, heads: int) -> Tensor:
        """Where in the flat values of so many heads each row writes."""
        row = self.row_S[:, None] * heads + torch.arange(heads, device=self.device)
        return (row * self.length + self.position_S[:, None]).flatten()


class LayerSlots:
    """The keys and values of one layer."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        # Keys (count x heads x width x length) and values (count x heads x length x width), made at the first
        # pass, when the model shows how wide they are. With the positions of the keys last, a product with a
        # query is fast, and none of its sums is over them.
        self.caches: tuple[Tensor, ...] = ()

    def attend(
        self,
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
        slots = self._slots
        if not self.caches:
            self._make(key, value)
        keys, values = self.caches
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if slots.filling is not None:
            length = key.shape[2]
            keys[slots.filling, :, :, :length] = key[0].transpose(1, 2)
            values[slots.filling, :, :length] = value[0]
            return _causal(query, key, value, scale, sliding_window, softcap).transpose(1, 2)
        keys[slots.row_S, :, :, slots.position_S] = key[:, :, 0]
        heads, width = values.shape[1], values.shape[3]
        if values.is_cuda:
            values[slots.row_S, :, slots.position_S] = value[:, :, 0]
        else:  # twice as fast there; on a GPU it would be compiled into a copy of all values
            values.view(-1, width).index_copy_(0, slots.places_of(heads), value.reshape(-1, width))
        rows, query_heads, _, query_width = query.shape
        query = (query * scale).view(rows, heads, -1, query_width)
        scores = (query @ keys[..., : slots.end]).float()
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.add_(slots.mask(sliding_window)).softmax(-1).to(query.dtype)
        return (weights @ values[:, :, : slots.end]).view(rows, 1, query_heads, width)

    def _make(self, key: Tensor, value: Tensor) -> None:
        count, length = self._slots.count, self._slots.length
        (_, heads, _, width), value_width = key.shape, value.shape[3]
        empty = partial(torch.zeros, dtype=key.dtype, device=key.device)
        keys = empty((count, heads, width, length))
        self.caches = (keys, empty((count, heads, length, value_width)))


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
