"""What a run would do, without doing it: counts, steps, self-tests, and one sample with its mask shown."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec

from rollbook.sft.job import open_job
from rollbook.sft.settings import SftSettings
from rollbook.train.batch import Example
from rollbook.train.processes import Processes


class Preview(msgspec.Struct):
    total_steps: int
    samples: int
    tokens: int
    packed: bool
    messages: list[str]
    pieces: list[tuple[str, bool]]  # sample 0: text, and whether it is learned


def preview(settings: SftSettings) -> Preview:
    """Everything up to the first step; nothing is left behind."""
    messages: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rollbook-preview-") as scratch:
        job = open_job(settings, Path(scratch), Processes(), None, messages.append)
        return Preview(
            total_steps=job.total_steps,
            samples=len(job.corpus),
            tokens=int(job.corpus.lengths.sum()),
            packed=job.model.packs,
            messages=messages,
            pieces=_pieces(job.corpus[0], job.model.tokenizer),
        )


def _pieces(sample: Example, tokenizer: Any) -> list[tuple[str, bool]]:
    """Runs of tokens with the same fate."""
    found: list[tuple[str, bool]] = []
    start = 0
    for place in range(1, len(sample) + 1):
        if place == len(sample) or sample.trained_T[place] != sample.trained_T[start]:
            text = tokenizer.decode(sample.token_T[start:place].tolist())
            found.append((text, bool(sample.trained_T[start])))
            start = place
    return found
