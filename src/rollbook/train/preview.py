"""What a run would do, without doing it: counts, steps, self-tests, and one sample with its mask shown."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec

from rollbook.train.batch import Example
from rollbook.train.processes import Processes
from rollbook.train.settings import SftSettings
from rollbook.train.sft import Run


class Preview(msgspec.Struct):
    total_steps: int
    samples: int
    tokens: int
    packed: bool
    said: list[str]
    pieces: list[tuple[str, bool]]  # sample 0: text, and whether it is learned


def preview(settings: SftSettings, output_dir: Path) -> Preview:
    """Everything up to the first step; nothing is left behind."""
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rollbook-preview-") as scratch:
        run = Run(settings, Path(scratch), output_dir, Processes(), None, said.append)
        sample = run.corpus[0]
        return Preview(
            total_steps=run.total_steps,
            samples=len(run.corpus),
            tokens=int(run.corpus.lengths.sum()),
            packed=run.model.packs,
            said=said,
            pieces=_pieces(sample, run.model.tokenizer),
        )


def _pieces(sample: Example, tokenizer: Any) -> list[tuple[str, bool]]:
    """Runs of tokens with the same fate."""
    found: list[tuple[str, bool]] = []
    start = 0
    for place in range(1, len(sample.token_T) + 1):
        if place == len(sample.token_T) or sample.trained_T[place] != sample.trained_T[start]:
            text = tokenizer.decode(sample.token_T[start:place].tolist())
            found.append((text, bool(sample.trained_T[start])))
            start = place
    return found
