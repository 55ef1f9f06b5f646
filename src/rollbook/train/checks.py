"""Before the first step: proofs that training would teach what it should. A failed one refuses to train.

- Packing: the sequences of a packed batch have the losses they have alone. Linear attention and other layers
  that ignore boundaries mix neighbours silently; here it shows.
- Head: chunked log-probabilities are those of the model's own logits. A model that caps or scales its logits
  is run with its own head instead, and that is said.
- Mask: every sample has something to learn, and the stop token is learned, or the model would never stop.

- Copies: where there are several processes, each computes what the one that read the weights does.

The first two compare numbers, and bfloat16 rounds away what they look for: the weights are widened to float32
for them, and are what they were afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rollbook.errors import RollbookError
from rollbook.train.batch import Example, packed_batch, padded_batch
from rollbook.train.model import Model

# Two orders of summation differ by rounding; a neighbour that leaks in changes losses by whole percents.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
_PROBE_TOKENS = 256


class SelfTestError(RollbookError):
    """Training would have gone wrong without anybody seeing it."""


def probes(samples: Sequence[Example]) -> list[Example]:
    """Two short pieces of real data."""
    return [
        Example(sample.token_T[:_PROBE_TOKENS], sample.trained_T[:_PROBE_TOKENS] | True)
        for sample in samples[:2]
    ]


@contextmanager
def in_float32(model: Model) -> Iterator[None]:
    """Widening and rounding back changes no bit of a bfloat16 weight."""
    halves = [
        tensor
        for tensor in chain(model.model.parameters(), model.model.buffers())
        if tensor.dtype is torch.bfloat16
    ]
    try:
        for tensor in halves:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor in halves:
            tensor.data = tensor.data.bfloat16()


def random_probes(vocabulary: int, longest: int | None) -> list[Example]:
    """Two short sequences of any tokens, for jobs whose own data is not there yet."""
    chance = np.random.default_rng(0)
    sizes = (min(_PROBE_TOKENS, longest or _PROBE_TOKENS), min(24, longest or 24))
    tokens = [chance.integers(0, vocabulary, size).astype(np.int32) for size in sizes]
    return [Example(token_T, np.ones(len(token_T), np.bool_)) for token_T in tokens]


def check_packing_and_head(
    model: Model,
    samples: Sequence[Example],
    device: torch.device,
    *,
    packing: Literal["auto", "on", "off"] = "auto",
    log: Callable[[str], None],
) -> None:
    """Pack, and compute the head in chunks, only where this model does it right; says what it does not."""
    model.use_packing(packing != "off")
    if model.packs:
        try:
            problem = packing_keeps_apart(model, samples, device)
        except torch.OutOfMemoryError:
            log("packing checked in bfloat16 only (out of memory)")
            problem = None
        if problem is not None and packing == "on":
            raise SelfTestError(f"{problem}; set data.packing: off")
        if problem is not None:
            log(f"packing is off: {problem}")
            model.use_packing(False)
    if not head_matches(model, samples, device):
        log("using the model's own LM head (it scales, caps or biases the logits)")
        model.chunks_head = False


def packing_keeps_apart(model: Model, samples: Sequence[Example], device: torch.device) -> str | None:
    """None if it does; else what was seen. The model must be set to pack already."""
    problem = _apart(model, samples, device)  # with the kernels that training will use
    if problem is None and model.head_dtype is not torch.float32:
        with in_float32(model):
            problem = _apart(model, samples, device)
    return problem


@torch.no_grad()
def _apart(model: Model, samples: Sequence[Example], device: torch.device) -> str | None:
    was_training = model.model.training
    model.use_dropout(False)
    try:
        together = model.outputs(packed_batch(samples).to(device)).logprob_N
        alone = torch.cat([model.outputs(packed_batch([sample]).to(device)).logprob_N for sample in samples])
        model.use_packing(False)
        plain = torch.cat([model.outputs(padded_batch([sample]).to(device)).logprob_N for sample in samples])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model's own code, asked for something it was not made for
        return f"the model cannot run a packed batch ({type(error).__name__}: {error})"
    finally:
        model.use_packing(True)
        model.use_dropout(was_training)
    tolerance = _TOLERANCE.get(model.head_dtype, 5e-2)
    for name, other in (("alone", alone), ("without packing", plain)):
        worst = float((together - other).abs().max())
        if not worst <= tolerance * max(1.0, float(other.abs().max())):
            return f"log-probabilities packed and {name} differ by {worst:.3g}"
    return None


def head_matches(model: Model, samples: Sequence[Example], device: torch.device) -> bool:
    """Whether the chunked head gives what the model's own logits give."""
    if not model.chunks_head:
        return False
    try:
        with in_float32(model):
            return _same_head(model, samples, device)
    except torch.OutOfMemoryError:
        return _same_head(model, samples, device)


@torch.no_grad()
def _same_head(model: Model, samples: Sequence[Example], device: torch.device) -> bool:
    batch = (packed_batch if model.packs else padded_batch)(samples).to(device)
    was_training = model.model.training
    model.use_dropout(False)
    chunked = model.outputs(batch).logprob_N
    model.chunks_head = False
    try:
        own = model.outputs(batch).logprob_N
    finally:
        model.chunks_head = True
        model.use_dropout(was_training)
    tolerance = _TOLERANCE.get(model.head_dtype, 5e-2)
    return bool(torch.allclose(chunked, own, rtol=tolerance, atol=tolerance))


@torch.no_grad()
def probe_logprobs(model: Model, samples: Sequence[Example]) -> Tensor:
    """What the model gives for the probes, as it will run; all processes call it where it is sharded."""
    was_training = model.model.training
    model.use_dropout(False)
    try:
        batch = (packed_batch if model.packs else padded_batch)(samples)
        return model.outputs(batch.to(model.device)).logprob_N.cpu()
    finally:
        model.use_dropout(was_training)


def compare_logprobs(found_N: Tensor, expected_N: Tensor, dtype: torch.dtype, rank: int) -> None:
    """A process whose weights did not arrive whole would train the others' gradients wrong, silently."""
    apart = float((found_N - expected_N).abs().mean())
    if not apart <= _TOLERANCE.get(dtype, 5e-2) * max(1.0, float(expected_N.abs().mean())):
        raise SelfTestError(
            f"process {rank} computes other log-probabilities than the one that read the weights: they "
            f"differ by {apart:.3g} on average"
        )
