"""What an iteration would have done with other settings: the same rollouts, trained twice.

    found = what_if("runs/vowels", 3, "loss={name: ppo}", "learning_rate=1e-4")
    print(found.recorded.grad_norm, found.changed.grad_norm)

Both sides begin with the weights that the iteration began with. Nothing is compared with the record.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from rollbook.errors import UsageError
from rollbook.records.iterations import Fate, IterationRecord
from rollbook.rl.groups import Group
from rollbook.rl.opening import Trainer
from rollbook.rl.replay.bundle import open_recorded
from rollbook.rl.replay.findings import Findings
from rollbook.rl.replay.reach import only_iteration, stand_before
from rollbook.rl.replay.recorded import RecordedRun, read_groups
from rollbook.rl.replay.replay import undisturbed
from rollbook.rl.replay.replayer import keep_weights, open_weights, vocabulary_of
from rollbook.rl.settings import RlSettings, load_settings
from rollbook.rl.steps import assemble, rate_of, take_steps
from rollbook.runs.settings import merge, parse_words
from rollbook.train.export import NoTokenExport
from rollbook.train.losses import Loss
from rollbook.train.metrics import joined

# What is decided after the rollouts are there. Everything else has made them.
CHANGEABLE = (
    "loss", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "max_grad_norm", "minibatches", "epochs", "advantage", "truncated", "groups_per_batch",
    "micro_batch_tokens",
)  # fmt: skip


class Side(msgspec.Struct, kw_only=True):
    """What training with some settings comes to. Shares and the ratio are of all trained tokens."""

    learning_rate: float
    rollouts: int
    optim_steps: int
    trained_tokens: int
    loss: float | None = None  # the mean of the steps
    grad_norm: float | None = None  # the largest
    applied: int = 0  # steps
    masked: float | None = None  # None: the loss knows no such thing
    masked_high: float | None = None
    masked_low: float | None = None
    ratio: float | None = None
    weight_change: float = 0.0  # the norm of new weights minus old ones
    weight_change_share: float = 0.0  # of the norm of the old ones


class WhatIf(msgspec.Struct, kw_only=True):
    run: str
    run_id: str | None
    iteration: int
    changes: dict[str, Any]
    recorded: Side
    changed: Side


def what_if(
    run: str | Path,
    iteration: int | None,
    *words: str,
    loss: Loss | None = None,
    recorded_loss: Loss | None = None,
    model: str | Path | None = None,
) -> WhatIf:
    """Train an iteration (None: the only one) with the run's settings, and with `key=value` words on top.

    `loss` is another loss as an object; `recorded_loss` and `model` are the run's, as for `replay`.
    """
    with (
        undisturbed(),
        tempfile.TemporaryDirectory(prefix="rollbook-what-if-") as temporary,
        open_recorded(run, loss=recorded_loss, model=model) as recorded,
    ):
        iteration = only_iteration(recorded, iteration)
        changed = changed_settings(recorded.settings, words, loss)
        replayer = stand_before(recorded, iteration)
        origin = keep_weights(replayer.trainer, iteration, Path(temporary) / "weights")
        record = recorded.record(iteration)
        known = vocabulary_of(replayer.trainer)
        groups = read_groups(recorded, record, Findings(iteration), vocabulary=known)
        one = _side(replayer.trainer, recorded.settings, recorded, groups, record)
        del replayer  # its weights are not needed beside the others
        other = _side(open_weights(changed, origin), changed, recorded, groups, record)
    return WhatIf(
        run=str(run),
        run_id=recorded.info.id if recorded.info else None,
        iteration=iteration,
        changes=_changes(recorded.settings, changed),
        recorded=one,
        changed=other,
    )


def changed_settings(settings: RlSettings, words: Sequence[str], loss: Loss | None) -> RlSettings:
    """The settings with the words on top; a UsageError for one that would have made other rollouts."""
    given = parse_words(words)
    for key in given:
        if key not in CHANGEABLE:
            raise UsageError(
                f"{key} cannot be asked about after the rollouts are there; what can: {', '.join(CHANGEABLE)}"
            )
    if not given and loss is None:
        raise UsageError("no other setting is given; write one as learning_rate=1e-4")
    before: dict[str, Any] = msgspec.to_builtins(settings)
    wanted, kept = given.get("loss"), before["loss"]["name"]
    if isinstance(wanted, dict) and wanted.get("name", kept) != kept:
        before = before | {"loss": {}}  # the settings of one loss say nothing to another
    own = loss if loss is not None else None if "loss" in given else settings.loss
    return load_settings(merge(before, given), loss=own)


def _changes(before: RlSettings, after: RlSettings) -> dict[str, Any]:
    old, new = msgspec.to_builtins(before), msgspec.to_builtins(after)
    return {key: new[key] for key in CHANGEABLE if old[key] != new[key]}


def _side(
    trainer: Trainer, settings: RlSettings, run: RecordedRun, groups: Sequence[Group], record: IterationRecord
) -> Side:
    weights = trainer.optimizer.weights
    before = [weight.detach().clone() for weight in weights]
    i, processes = record.iteration, record.processes or 1
    assembled = assemble(trainer, settings, groups, i, processes=processes, only=run.only)
    steps = take_steps(trainer, settings, assembled.plan, NoTokenExport())
    moved = _norm([weight.detach() - old for weight, old in zip(weights, before, strict=True)])
    tokens = sum(step.trained_tokens for step in steps)
    facts = joined([step.sums for step in steps]).means() if tokens else {}
    return Side(
        learning_rate=rate_of(settings, i),
        rollouts=assembled.selection.count(Fate.TRAINED),
        optim_steps=len(steps),
        trained_tokens=tokens,
        loss=sum(step.loss for step in steps) / len(steps) if steps else None,
        grad_norm=max((step.grad_norm for step in steps), default=None),
        applied=sum(step.applied for step in steps),
        masked=1.0 - facts["kept"] if "kept" in facts else None,
        masked_high=facts.get("clipped_high"),
        masked_low=facts.get("clipped_low"),
        ratio=facts.get("ratio"),
        weight_change=moved,
        weight_change_share=moved / (_norm(before) or 1.0),
    )


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
