"""The memory on the host that values of a micro-batch are copied into: a few buffers, used again and again.

Of a device the copy does not wait: it has an event after which the values are there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class HostCopy(NamedTuple):
    """Values on their way to the host."""

    values_QN: Tensor  # there after `wait`: one row for each quantity, float32
    buffer: Tensor  # all of the memory that they are in
    copied: Any  # the event of a device; None where they are there already

    def wait(self) -> Tensor:
        if self.copied is not None:
            self.copied.synchronize()
        return self.values_QN


class HostBuffers:
    """As many as are in use at once; one that is given back is used for the next copy that fits."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._guard = threading.Lock()

    @torch.no_grad()
    def copy(self, rows: Sequence[Tensor]) -> HostCopy:
        """The rows, one under the other, in one copy."""
        device, size = rows[0].device, len(rows) * len(rows[0])
        buffer = self._take(size, is_pinned=device.type == "cuda")
        values_QN = buffer[:size].view(len(rows), -1) if size else buffer[:0].view(len(rows), 0)
        whole = [row.float() for row in rows]
        if device.type == "cpu":
            torch.stack(whole, out=values_QN)
            return HostCopy(values_QN, buffer, None)
        values_QN.copy_(torch.stack(whole), non_blocking=True)
        event: Any = torch.cuda.Event
        copied = event()
        copied.record()
        return HostCopy(values_QN, buffer, copied)

    def give_back(self, copy: HostCopy) -> None:
        """Its values have been used, and may be overwritten."""
        with self._guard:
            self._free.append(copy.buffer)

    def _take(self, size: int, *, is_pinned: bool) -> Tensor:
        with self._guard:
            for number, buffer in enumerate(self._free):
                if buffer.numel() >= size:
                    return self._free.pop(number)
            self._free.clear()  # too small: larger ones take their place
        return torch.empty(size, dtype=torch.float32, pin_memory=is_pinned)
