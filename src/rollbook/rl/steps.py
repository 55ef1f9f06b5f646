"""From the rollouts of an iteration to optimiser steps, on one process or several, and what is said of them.

The plan is made once, by the process that sampled: which examples each optimiser step takes, which process
takes which of them, and in which micro-batches. It follows from the settings and the rollouts alone, so a
replay makes the same, with the same functions.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from rollbook.records.identity import derive_seed
from rollbook.records.iterations import ExampleDigest, IterationRecord, TrainRow, TrainStep
from rollbook.records.layout import TRAIN
from rollbook.rl.groups import Group, Selection, select
from rollbook.rl.opening import Trainer
from rollbook.rl.settings import RlSettings
from rollbook.runs.stop_signals import StopSignals
from rollbook.train.batch import Batch, Column, Example, ExampleKey
from rollbook.train.engine import StepOutput
from rollbook.train.export import NoTokenExport
from rollbook.train.processes import Processes
from rollbook.train.schedule import learning_rate
from rollbook.train.token_records import Noted


class Share(NamedTuple):
    """What one process trains in an iteration: the micro-batches of each optimiser step."""

    iteration: int
    steps: list[list[Batch]]
    notes: dict[int, Noted]  # by group: what the token export says of it


class Assembled(NamedTuple):
    """What an iteration trains: the chosen rollouts, and the share of each process."""

    selection: Selection
    plan: list[Share]


def assemble(
    trainer: Trainer,
    settings: RlSettings,
    groups: Sequence[Group],
    i: int,
    *,
    processes: int,
    notes: Mapping[int, Noted] | None = None,
    only: Container[TrainRow] | None = None,
) -> Assembled:
    """From rollouts to micro-batches. `only` leaves out all other rows, where a part is replayed."""
    selection = select(
        groups,
        split=TRAIN,
        iteration=i,
        at_most=settings.groups_per_batch,
        advantage=settings.advantage,
        truncated=settings.truncated,
    )
    if only is not None:
        chosen = [example for example in selection.examples if _row(example) in only]
        selection = selection._replace(examples=chosen)
    return Assembled(selection, plan_steps(trainer, settings, selection.examples, i, processes, notes))


def plan_steps(
    trainer: Trainer,
    settings: RlSettings,
    examples: Sequence[Example],
    i: int,
    processes: int,
    notes: Mapping[int, Noted] | None = None,
) -> list[Share]:
    """The share of each process. All shares have the same number of steps, some perhaps without a batch."""
    shares = [Share(i, [], dict(notes or {})) for _ in range(processes)]
    for chunk in minibatches(examples, settings, i):
        for share, mine in zip(shares, deal(chunk, len(shares)), strict=True):
            longest = max(map(len, mine), default=0)
            capacity = max(trainer.micro_batch_tokens, longest)
            share.steps.append(trainer.model.batches(mine, capacity) if mine else [])
    return shares


def take_steps(
    trainer: Trainer, settings: RlSettings, shares: Sequence[Share], export: NoTokenExport
) -> list[StepOutput]:
    """The steps of an iteration: with the share of this process, or, in a replay, with those of all."""
    i, notes = shares[0].iteration, shares[0].notes
    rate = rate_of(settings, i)
    return [
        trainer.engine.step_of_shares(batches, settings.loss, rate, seen=export.seen(i, number, notes))
        for number, batches in enumerate(zip(*(share.steps for share in shares), strict=True))
    ]


def finish_export(settings: RlSettings, export: NoTokenExport, i: int, steps: Sequence[StepOutput]) -> float:
    """Commit what was exported of the steps of an iteration; returns the seconds that the export took."""
    spent = export.commit(i, settings.loss, steps, batch=i + 1)
    if is_saved_after(settings, i):
        export.end_part()
    return spent


def is_saved_after(settings: RlSettings, i: int) -> bool:
    """Whether a checkpoint follows iteration i, unless the run is stopped before."""
    return (i + 1) % settings.save_every == 0 or i + 1 == settings.iterations


def assist(trainer: Trainer, settings: RlSettings, export: NoTokenExport, stop: StopSignals) -> None:
    """What every process but the first does: train what it is sent, until nothing more comes."""
    while (share := trainer.processes.scatter(None)) is not None:
        steps = take_steps(trainer, settings, [share], export)
        finish_export(settings, export, share.iteration, steps)
        is_stopping(trainer.processes, stop)


def is_stopping(processes: Processes, stop: StopSignals) -> bool:
    """Whether any process was asked to stop: a signal may have come to one of them alone."""
    return processes.any(stop.asked)


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


def trained_record(
    settings: RlSettings,
    i: int,
    assembled: Assembled,
    steps: Sequence[StepOutput],
    *,
    before: str,
    after: str,
) -> IterationRecord:
    """What iterations.jsonl says of the training of an iteration; `before` and `after` are digests of the
    weights."""
    return IterationRecord(
        split=TRAIN,
        iteration=i,
        version=i,
        rollouts=assembled.selection.fates,
        examples=[_digested(example) for example in assembled.selection.examples],
        steps=records_of(assembled.plan, steps, rate_of(settings, i)),
        weights_digest_before=before,
        weights_digest=after,
        processes=len(assembled.plan),
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
    keys = [key for key in batch.keys if isinstance(key, ExampleKey)]
    return [TrainRow(key.group, key.trajectory, key.part) for key in keys]


def _row(example: Example) -> TrainRow:
    key = example.key
    assert isinstance(key, ExampleKey)
    return TrainRow(key.group, key.trajectory, key.part)


def _digested(example: Example) -> ExampleDigest:
    """Digests of every value that training was given. All NaN count as the same."""
    digest = xxhash.xxh3_64(example.token_T.data)
    digest.update(example.trained_T.data)
    for name, column_T in sorted(example.columns_T.items()):
        digest.update(name.encode())
        digest.update(_one_nan(column_T).data)
    row = _row(example)
    return ExampleDigest(row.group_idx, row.traj_idx, row.part, digest.hexdigest())


def _one_nan(column_T: Column) -> Column:
    """The column with the same bits for every NaN."""
    if column_T.dtype.kind != "f":
        return column_T
    return np.where(np.isnan(column_T), column_T.dtype.type("nan"), column_T)
