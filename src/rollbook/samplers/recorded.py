"""Decoding steps on a GPU: compiled, recorded once as a CUDA graph for each length, and run again.

A small model is held up by the processor that launches its kernels, not by the GPU; a recorded step is one
launch. Before the first step of a length the same step is taken twice and taken back, so that every step that
counts is a recorded one and a resumed run gets the same bits. Blocks and the draw are compiled one by one, so
the warm-up is seconds. Where compiling fails, steps are recorded as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from rollbook.samplers.decode import Draw, Rows, decode_step, draw_tokens
from rollbook.samplers.model import SampledModel
from rollbook.samplers.slots import Slots

_log = logging.getLogger("rollbook")

Step = Callable[..., None]  # (end, filtered=...)


def open_steps(model: SampledModel, slots: Slots, rows: Rows) -> Step:
    """How the steps of an engine are taken."""
    if slots.device.type == "cuda":
        return RecordedSteps(model, slots, rows)
    return partial(decode_step, model.logits, slots, rows)


class RecordedSteps:
    def __init__(self, model: SampledModel, slots: Slots, rows: Rows) -> None:
        self._model, self._slots, self._rows = model, slots, rows
        self._graphs: dict[tuple[int, bool], Any] = {}
        self._draw: Draw | None = torch.compile(draw_tokens, dynamic=False)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, end: int, *, filtered: bool = False) -> None:
        if (end, filtered) not in self._graphs:
            self._warm(end, filtered)
            self._graphs[end, filtered] = self._record(end, filtered)
        self._graphs[end, filtered].replay()

    def _warm(self, end: int, filtered: bool) -> None:
        """What has to be made at a first time is made now: keys and values, masks, compiled kernels."""
        new_stream: Any = torch.cuda.Stream
        stream, current = new_stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            with self._rows.unchanged():
                decode_step(self._model.logits, self._slots, self._rows, end, filtered=filtered)
            if self._draw is not None:
                self._warm_compiled(end, filtered)
        current.wait_stream(stream)

    def _warm_compiled(self, end: int, filtered: bool) -> None:
        try:
            with self._rows.unchanged():
                self._step(end, filtered)
        except Exception as error:  # there is no compiler, or it does not understand the model
            _log.warning("sampling without compiled kernels: %s: %s", type(error).__name__, error)
            self._draw = None

    def _record(self, end: int, filtered: bool) -> Any:
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(end, filtered)
        return graph

    def _step(self, end: int, filtered: bool) -> None:
        with self._compiled_blocks():
            decode_step(self._model.logits, self._slots, self._rows, end, filtered=filtered, draw=self._draw)

    @contextmanager
    def _compiled_blocks(self) -> Iterator[None]:
        """The trainer never sees them."""
        blocks = self._model.blocks if self._draw is not None else []
        for block in blocks:
            block.compile(dynamic=False)
        try:
            yield
        finally:
            for block in blocks:
                block._compiled_call_impl = None
