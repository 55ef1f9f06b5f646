"""How a run begins, as far as its files and settings say: fresh, resumed, or complete already.

Imports no torch, so that the command refuses what cannot be started before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollbook.errors import UsageError
from rollbook.records.checkpoints import Choice, choose, none_is_whole, read_checkpoints
from rollbook.records.config import read_config
from rollbook.records.layout import RunFiles
from rollbook.records.run_info import read_run_info
from rollbook.rl.settings import RlSettings, SamplerSettings, differences
from rollbook.runs.handoff import resolve_checkpoint
from rollbook.runs.start import START_OVER, Resume, named_checkpoint
from rollbook.train.model_settings import ModelSettings


class Start(NamedTuple):
    """What a run begins with: settled settings, and the checkpoint that it continues from."""

    settings: RlSettings
    resume: Resume
    checkpoint: Path | None = None
    is_complete: bool = False  # nothing is left to be done


def run_files(settings: RlSettings) -> RunFiles:
    return RunFiles(Path(settings.log_path).expanduser().absolute())


def settle(settings: RlSettings, resume: bool | str, *, verify: bool = False) -> Start:
    """Settings with what the run's first process decided, and where it continues. Changes no file.

    `verify` compares the files of the checkpoint with their digests, and not only their sizes.
    """
    files = run_files(settings)
    if resume == START_OVER or not files.run.exists():
        return Start(_with_source(settings), resume)
    if not resume:
        raise UsageError(
            f"{settings.log_path} already holds a run; --resume continues it, --overwrite starts over and "
            "keeps the old files under superseded/. Or choose another log_path"
        )
    if not files.config.exists():  # killed before it had one, so before it did anything else
        return Start(_with_source(settings), resume)
    before = read_config(files.config)
    if found := differences(before, settings):
        raise UsageError(
            f"cannot resume {settings.log_path}: settings changed since it was started: {'; '.join(found)}. "
            "Undo the change, or choose another log_path"
        )
    choice = _checkpoint_to_resume(files, resume, verify=verify)
    record = choice.stored.record if choice.stored else None
    done = (record and record.batch) or 0
    if settings.iterations < done:
        raise UsageError(
            f"{settings.log_path} has done {done} iterations; iterations: {settings.iterations} would take "
            f"some back. Set iterations to {done} or more, or choose another log_path"
        )
    return Start(
        _as_decided(settings, before),
        choice,
        choice.path(files.root),
        is_complete=resume is True and done == settings.iterations and _has_ended(files, before, settings),
    )


def _checkpoint_to_resume(files: RunFiles, resume: bool | str, *, verify: bool) -> Choice:
    if isinstance(resume, str):
        return Choice(named_checkpoint(files, resume, verify=verify), [])
    choice = choose(read_checkpoints(files.checkpoints), files.root, verify=verify)
    if choice.stored is None and choice.passed_over:
        raise none_is_whole(files.root, choice.passed_over, "start over with --overwrite")
    return choice


def _has_ended(files: RunFiles, before: Mapping[str, object], settings: RlSettings) -> bool:
    """Whether the run came to its end with these iterations and evaluations."""
    attempts = read_run_info(files.run).attempts
    now = msgspec.to_builtins(settings)
    same = all(before.get(key) == now[key] for key in ("iterations", "evals"))
    return same and bool(attempts) and attempts[-1].outcome == "completed"


def _with_source(settings: RlSettings) -> RlSettings:
    """With the directory of the model that is handed over now: a later result is none of this run's."""
    model = settings.model
    if model.handed_over is None or model.path is not None:
        return settings
    path = str(resolve_checkpoint(Path(model.handed_over)))
    return msgspec.structs.replace(settings, model=msgspec.structs.replace(model, path=path))


def _as_decided(settings: RlSettings, before: Mapping[str, object]) -> RlSettings:
    """The choices that the first process of a run made, unless they are set by hand."""
    stored = msgspec.convert(before, _Decided, strict=False)
    path = settings.model.path or stored.model.path
    return msgspec.structs.replace(
        settings,
        model=msgspec.structs.replace(settings.model, path=path),
        threads=settings.threads or stored.threads,
        micro_batch_tokens=settings.micro_batch_tokens or stored.micro_batch_tokens,
        sampler=msgspec.structs.replace(
            settings.sampler,
            slots=settings.sampler.slots or stored.sampler.slots,
            max_length=settings.sampler.max_length or stored.sampler.max_length,
        ),
    )


class _Decided(msgspec.Struct):
    """The part of a config.json that says what was chosen."""

    model: ModelSettings
    threads: int | None
    micro_batch_tokens: int | None
    sampler: SamplerSettings


def complete_text(settings: RlSettings) -> str:
    more = 2 * settings.iterations or 1
    return (
        f"{settings.log_path} is complete: all {settings.iterations} iterations are done. To train on, set "
        f"more of them, as iterations={more} --resume"
    )
