"""From the examples of an iteration to optimiser steps, on one process or several.

The plan is made once, by the process that sampled: which examples each optimiser step takes, which process
takes which of them, and in which micro-batches. It follows from the settings and the examples alone, so a
replay makes the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rollbook.records.identity import derive_seed
from rollbook.records.iterations import TrainRow, TrainStep
from rollbook.rl.opening import Trainer
from rollbook.rl.settings import RlSettings
from rollbook.train.batch import Batch, Example
from rollbook.train.engine import StepOutput
from rollbook.train.export import NoTokenExport
from rollbook.train.schedule import learning_rate
from rollbook.train.token_records import Noted

NOISE_FLOOR_EVERY = 10  # iterations


class Share(NamedTuple):
    """What one process trains in an iteration: the micro-batches of each optimiser step."""

    iteration: int
    steps: list[list[Batch]]
    notes: dict[int, Noted]  # by group: what the token export says of it


def plan_steps(
    trainer: Trainer,
    settings: RlSettings,
    examples: Sequence[Example],
    i: int,
    notes: Mapping[int, Noted] | None = None,
) -> list[Share]:
    """The share of each process. All shares have the same number of steps, some perhaps without a batch."""
    shares = [Share(i, [], dict(notes or {})) for _ in range(trainer.processes.count)]
    for chunk in minibatches(examples, settings, i):
        for share, mine in zip(shares, deal(chunk, len(shares)), strict=True):
            longest = max(map(len, mine), default=0)
            capacity = max(trainer.micro_batch_tokens, longest)
            share.steps.append(trainer.model.batches(mine, capacity) if mine else [])
    return shares


def take_steps(
    trainer: Trainer, settings: RlSettings, share: Share | None, export: NoTokenExport
) -> list[StepOutput]:
    if share is None:
        return []
    rate = rate_of(settings, share.iteration)
    return [
        trainer.engine.step(
            batches, settings.loss, rate, seen=export.seen(share.iteration, number, share.notes)
        )
        for number, batches in enumerate(share.steps)
    ]


def finish_export(settings: RlSettings, export: NoTokenExport, i: int) -> float:
    """Commit what was exported of an iteration; returns the seconds that the export took."""
    return export.commit(i, settings.loss, batch=i + 1, ends_part=is_saved_after(settings, i))


def is_saved_after(settings: RlSettings, i: int) -> bool:
    """Whether a checkpoint follows iteration i, unless the run is stopped before."""
    return (i + 1) % settings.save_every == 0 or i + 1 == settings.iterations


def assist(trainer: Trainer, settings: RlSettings, export: NoTokenExport) -> None:
    """What every process but the first does: train what it is sent, until nothing more comes."""
    while (share := trainer.processes.scatter(None)) is not None:
        take_steps(trainer, settings, share, export)
        finish_export(settings, export, share.iteration)


def minibatches(examples: Sequence[Example], settings: RlSettings, i: int) -> list[list[Example]]:
    """The examples of each optimiser step. Where there are several they are dealt anew for each pass."""
    if not examples:
        return []
    if settings.minibatches == 1:
        return [list(examples)] * settings.epochs
    chunks = []
    for epoch in range(settings.epochs):
        chance = np.random.default_rng(derive_seed("minibatches", settings.seed, i, epoch))
        parts = np.array_split(chance.permutation(len(examples)), settings.minibatches)
        chunks += [[examples[place] for place in part.tolist()] for part in parts if len(part)]
    return chunks


def deal(examples: Sequence[Example], processes: int) -> list[list[Example]]:
    """One share per process, of nearly equal numbers of tokens: the longest first, to whoever has least."""
    if processes == 1:
        return [list(examples)]
    shares: list[list[Example]] = [[] for _ in range(processes)]
    tokens = [0] * processes
    for example in sorted(examples, key=len, reverse=True):
        least = tokens.index(min(tokens))
        shares[least].append(example)
        tokens[least] += len(example)
    return shares


def rate_of(settings: RlSettings, i: int) -> float:
    """The learning rate of an iteration."""
    return learning_rate(
        i + 1,
        peak=settings.learning_rate,
        total=settings.iterations,
        warmup=settings.warmup_steps,
        kind=settings.lr_scheduler_type,
    )


def records_of(plan: Sequence[Share], steps: Sequence[StepOutput], rate: float) -> list[TrainStep]:
    """Each step with its rows in the order of training; the micro-batches of all processes, first to last."""
    records = []
    for number, step in enumerate(steps):
        per_process = [share.steps[number] for share in plan]
        records.append(
            TrainStep(
                micro_batches=[_rows(batch) for batches in per_process for batch in batches],
                processes=[len(batches) for batches in per_process] if len(plan) > 1 else None,
                learning_rate=rate,
                loss=step.loss,
                grad_norm=step.grad_norm,
                applied=step.applied,
                trained_tokens=step.trained_tokens,
            )
        )
    return records


def _rows(batch: Batch) -> list[TrainRow]:
    return [TrainRow(key.group, key.trajectory, key.part) for key in batch.keys if key is not None]


@torch.no_grad()
def noise_floor(trainer: Trainer, examples: Sequence[Example]) -> dict[str, float]:
    """How much the trainer disagrees with itself when the same tokens are in a batch of another shape."""
    model, most_tokens = trainer.model, trainer.micro_batch_tokens
    some: list[Example] = []
    for example in examples:
        if sum(map(len, some)) + len(example) > most_tokens:
            break
        some.append(example)
    if len(some) < 2:
        return {}
    model.use_dropout(False)
    device = model.base.device
    (together,) = model.batches(some, most_tokens)
    apart = [model.batches([example], most_tokens)[0] for example in some]
    one_N = model.outputs(together.to(device)).logprob_N
    order = [together.keys.index(example.key) for example in some]
    split = {index: one_N[together.example_N == index] for index in range(len(some))}
    d_N = torch.cat(
        [
            split[index] - model.outputs(batch.to(device)).logprob_N
            for index, batch in zip(order, apart, strict=True)
        ]
    ).double()
    k3 = float((torch.expm1(-d_N) + d_N).mean())
    ratio_N = d_N.exp()
    outside = float(((ratio_N < 0.9) | (ratio_N > 1.1)).double().mean())
    return {"noise_floor/k3": k3, "noise_floor/max": float(d_N.abs().max()), "noise_floor/outside": outside}
