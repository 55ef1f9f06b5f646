"""Rollouts of several turns, odd ones among them, and optimiser steps on them with the token export on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from helpers.core import VOCABULARY
from rollbook.records.token_files import RunIdentity
from rollbook.records.token_places import files_of
from rollbook.records.token_settings import TokenExportSettings
from rollbook.train.batch import Batch, Example, ExampleKey
from rollbook.train.engine import Engine
from rollbook.train.export import TokenExport
from rollbook.train.losses import Loss, LossOutput
from rollbook.train.processes import Processes
from rollbook.train.token_math import TokenOutputs
from rollbook.train.token_records import Noted


def examples(seed: int, lengths: list[int], odd: bool = True) -> list[Example]:
    """Rollouts of several turns, some without an advantage, some of them with numbers that are not finite."""
    chance = np.random.default_rng(seed)
    made = []
    for number, length in enumerate(lengths):
        trained_T = chance.random(length) < 0.6
        trained_T[-1] = True
        sampled_T = (chance.normal(size=length) * 0.4 - np.log(VOCABULARY)).astype(np.float32)
        advantage = np.float32(0.0 if number % 3 == 2 else chance.normal())
        if odd and number % 4 == 1:
            sampled_T[-1] = chance.choice([np.nan, -np.inf])
        turn_T = np.where(np.arange(length) < length // 2, 0, 1).astype(np.int32)
        columns_T = {
            "reward": np.full(length, float(number), np.float32),
            "advantage": np.full(length, advantage, np.float32),
            "sampled_logprob": sampled_T,
            "reference_logprob": sampled_T + np.float32(0.1),
            "temperature": np.full(length, 0.7, np.float32),
            "turn": turn_T,
            "version": np.full(length, 4, np.int32),
        }
        token_T = chance.integers(0, VOCABULARY, length).astype(np.int32)
        made.append(Example(token_T, trained_T, columns_T, ExampleKey("train", 3, number // 2, number % 2)))
    return made


class Watched:
    """An export, and beside it what the loss was seen to use."""

    def __init__(self, export: TokenExport) -> None:
        self.export = export
        self.seen: dict[tuple[int, int, int, int], dict[str, float]] = {}

    def at(self, iteration: int, step: int) -> Any:
        take = self.export.seen(iteration, step, {0: Noted("task-0", "sums")})

        def both(batch: Batch, outputs: TokenOutputs, loss: LossOutput) -> None:
            for n in range(batch.trained_tokens):
                key = batch.keys[int(batch.example_N[n])]
                assert key is not None
                facts = {name: float(fact_N[n]) for name, fact_N in loss.facts_N.items()}
                facts["logprob"] = float(outputs.logprob_N.detach()[n])
                facts["entropy"] = math.nan if outputs.entropy_N is None else float(outputs.entropy_N[n])
                self.seen[step, key.group, key.trajectory, int(batch.offset_N[n])] = facts
            take(batch, outputs, loss)

        return both


def exported(
    root: Path, tokenizer: Any, engine: Engine, batches: list[list[Batch]], loss: Loss, **given_settings: Any
) -> Watched:
    """One iteration of several optimiser steps, exported."""
    settings = TokenExportSettings(**given_settings)
    identity = RunIdentity("run-1", 1)
    with TokenExport(
        settings, root, identity, tokenizer, Processes(), seed=0, alert=lambda *_: None
    ) as export:
        watched = Watched(export)
        steps = [
            engine.step(step, loss, 0.0, seen=watched.at(3, number)) for number, step in enumerate(batches)
        ]
        export.commit(3, loss, steps, batch=4)
        export.end_part(is_last=False)
    return watched


def lines(root: Path) -> list[dict[str, Any]]:
    found = []
    for file in files_of(root / "token_exports" / "manifest.jsonl"):
        data = file.path.read_bytes()[: file.end]
        found += [json.loads(line) for line in data.splitlines()]
    return found
