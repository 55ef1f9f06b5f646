"""Cuts a bundle: one micro-batch of a recorded step, with what is expected of it (see `bundle.py`).

The iteration is replayed first, and one that differs is not cut. What is expected is then made by the same
functions on the micro-batch alone, and the finished bundle is replayed once before it gets its name.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollbook.errors import RollbookError, UsageError
from rollbook.records.archive import pack
from rollbook.records.atomic import replacing
from rollbook.records.checkpoints import CheckpointRecord
from rollbook.records.complete import complete_directory, file_facts
from rollbook.records.config import write_config
from rollbook.records.iterations import IterationRecord, TrainRow
from rollbook.records.jsonl import read_lines
from rollbook.records.layout import RunFiles
from rollbook.records.plain import utc_now
from rollbook.records.record import decode_line
from rollbook.records.run_info import RunInfo, versions, write_run_info
from rollbook.records.token_files import RunIdentity
from rollbook.records.token_settings import TokenExportSettings
from rollbook.rl.bundle import BASE, BUNDLE, MOST_BYTES, Bundle, open_recorded
from rollbook.rl.findings import Findings
from rollbook.rl.noise import measure_noise
from rollbook.rl.opening import Trainer
from rollbook.rl.reach import only_iteration, stand_before
from rollbook.rl.recorded import READ, Origin, RecordedRun, read_groups
from rollbook.rl.replay import replay, undisturbed
from rollbook.rl.replayer import Replayer, open_weights, vocabulary_of
from rollbook.rl.settings import EnvironmentSettings, RlSettings
from rollbook.rl.steps import assemble, take_steps, trained_record
from rollbook.train.export import NoTokenExport, open_export
from rollbook.train.loading import DTYPES, load_model
from rollbook.train.state import save_training_state, weights_digest


class Cut(msgspec.Struct, kw_only=True):
    """A bundle that was cut."""

    path: str
    bytes: int
    iteration: int
    optim_step: int
    micro_batch: int
    rows: int
    trained_tokens: int


class _Place(NamedTuple):
    """A micro-batch of an iteration."""

    optim_step: int
    micro_batch: int
    rows: list[TrainRow]


def cut_bundle(
    run: str | Path,
    iteration: int | None,
    target: str | Path,
    *,
    micro_batch: int = 0,
    model: str | Path | None = None,
) -> Cut:
    """Write the bundle of one micro-batch, counted through the iteration in the order of training."""
    target = Path(target).expanduser().absolute()
    if target.exists():
        raise UsageError(f"{target} exists already, and is not replaced; choose another name")
    with (
        undisturbed(),
        tempfile.TemporaryDirectory(prefix="rollbook-cut-") as temporary,
        open_recorded(run, model=model) as recorded,
    ):
        iteration = only_iteration(recorded, iteration)
        place = _place(recorded, iteration, micro_batch)
        trainer = _weights_before(recorded, iteration, place.optim_step, Path(temporary))
        whole = Path(temporary) / "bundle"
        with complete_directory(whole) as root:
            record = _write(root, recorded, iteration, place, trainer)
        del trainer  # its weights are not needed beside those of the replay
        made = Path(temporary) / "bundle.zip"
        _pack(whole, made)
        found = replay(made)
        if found.first is not None:
            raise RollbookError(f"the bundle does not replay, so it is not kept: {found.first}")
        with replacing(target) as file, made.open("rb") as source:
            shutil.copyfileobj(source, file)
    assert record.steps is not None
    return Cut(
        path=str(target),
        bytes=target.stat().st_size,
        iteration=iteration,
        optim_step=place.optim_step,
        micro_batch=micro_batch,
        rows=len(place.rows),
        trained_tokens=record.steps[0].trained_tokens or 0,
    )


def _pack(directory: Path, target: Path) -> None:
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise UsageError(
            f"the bundle would have {size:,} bytes, and at most {MOST_BYTES:,} are opened; bundles are for "
            "small models"
        )
    pack(directory, target)


def _place(run: RecordedRun, i: int, micro_batch: int) -> _Place:
    steps = run.record(i).steps or []
    places = [_Place(step, micro_batch, rows) for step, one in enumerate(steps) for rows in one.micro_batches]
    if not 0 <= micro_batch < len(places):
        raise UsageError(f"iteration {i} has {len(places)} micro-batches, and {micro_batch} is none of them")
    return places[micro_batch]


def _weights_before(run: RecordedRun, i: int, optim_step: int, temporary: Path) -> Trainer:
    """A trainer that stands before one optimiser step of an iteration; the whole of it must replay."""
    replayer = stand_before(run, i)
    origin = Origin(i, "the same weights", temporary / "weights")
    _save(replayer.trainer, temporary / "weights")
    _refuse_difference(replayer)
    del replayer
    trainer = open_weights(run.settings, origin)
    if optim_step:
        record = run.record(i)
        groups = read_groups(run, record, Findings(i), vocabulary=vocabulary_of(trainer))
        processes = record.processes or 1
        plan = assemble(trainer, run.settings, groups, i, processes=processes, only=run.only).plan
        before = [share._replace(steps=share.steps[:optim_step]) for share in plan]
        take_steps(trainer, run.settings, before, NoTokenExport())
    return trainer


def _refuse_difference(replayer: Replayer) -> None:
    replayed = replayer.next()
    if replayed.first is not None:
        raise RollbookError(f"a bundle would expect what was not recorded: {replayed.first}")


def _save(trainer: Trainer, directory: Path) -> None:
    with complete_directory(directory) as aside:
        save_training_state(aside, trainer.model, trainer.optimizer)
        _forget_this_machine(aside)


def _forget_this_machine(checkpoint: Path) -> None:
    """Adapters name the model below by its path, in their config and in a text for a hub."""
    (checkpoint / "README.md").unlink(missing_ok=True)
    config = checkpoint / "adapter_config.json"
    if config.exists():
        values = json.loads(config.read_text()) | {"base_model_name_or_path": BASE}
        config.write_text(json.dumps(values, sort_keys=True, indent=2) + "\n")


def _write(root: Path, run: RecordedRun, i: int, place: _Place, trainer: Trainer) -> IterationRecord:
    """Everything but the mark, which names all the rest."""
    files, name = RunFiles(root), f"{i:06d}"
    settings = _settings(run.settings, f"checkpoints/{name}")
    recorded = run.record(i)
    groups = {row.group_idx for row in place.rows}
    info = _info(run)
    _save(trainer, files.checkpoint(name))
    if settings.model.lora is not None:
        _save_base(run.settings, root / BASE)
    write_config(files.config, msgspec.to_builtins(settings))
    write_run_info(files.run, info)
    checkpoint = CheckpointRecord(name=name, batch=i, state_path=f"checkpoints/{name}")
    _write_lines(files.checkpoints, [checkpoint.encode()])
    for part in READ:
        _write_lines(files.iteration("train", i, part), _lines_of(run.path(i, part), groups))
    record = _expected(root, run, recorded, place, groups, settings, trainer, info)
    record.files = {
        path.name: file_facts(path) for path in (files.iteration("train", i, part) for part in READ)
    }
    _write_lines(files.iterations, [record.encode()])
    bundle = Bundle(
        run_id=info.id,
        iteration=i,
        optim_step=place.optim_step,
        micro_batch=place.micro_batch,
        rows=place.rows,
    )
    _write_lines(root / BUNDLE, [msgspec.json.encode(bundle)])
    return record


def _expected(
    root: Path,
    run: RecordedRun,
    recorded: IterationRecord,
    place: _Place,
    groups: set[int],
    settings: RlSettings,
    trainer: Trainer,
    info: RunInfo,
) -> IterationRecord:
    """Train the micro-batch alone, as a step of its own, and say what came out."""
    i, before = recorded.iteration, weights_digest(trainer.model)
    known = vocabulary_of(trainer)
    played = [
        group
        for group in read_groups(run, recorded, Findings(i), vocabulary=known)
        if group.group_idx in groups
    ]
    assembled = assemble(trainer, settings, played, i, processes=1, only=frozenset(place.rows))
    noise = run.noise(i) or measure_noise(trainer, settings.loss, assembled.selection.examples).noise
    export = open_export(
        TokenExportSettings(),
        root,
        RunIdentity(info.id, 1),
        trainer.model.tokenizer,
        trainer.processes,
        seed=settings.seed,
        alert=_no_alert,
    )
    with export:
        steps = take_steps(trainer, settings, assembled.plan, export)
        export.commit(i, settings.loss, batch=i + 1)
    record = trained_record(settings, i, assembled, steps, before=before, after=weights_digest(trainer.model))
    record.frozen_digest, record.machine = trainer.frozen_digest, trainer.machine
    record.noise = noise
    return record


def _settings(settings: RlSettings, weights: str) -> RlSettings:
    """Those of one step of one micro-batch, without the paths of this machine."""
    model = msgspec.structs.replace(
        settings.model, path=weights, handed_over=None, config=None, tokenizer=None, chat_template=None
    )
    return msgspec.structs.replace(
        settings,
        log_path="bundle",
        model=model,
        environments=[EnvironmentSettings(name=one.label, label=one.label) for one in settings.environments],
        evals=[],
        trackers=None,
        minibatches=1,
        epochs=1,
        processes=1,
    )


def _info(run: RecordedRun) -> RunInfo:
    return RunInfo(
        id=run.info.id if run.info else "unknown",
        kind="rl",
        started_at=utc_now(),
        host="unknown",
        pid=0,
        layout="flat",
        versions=versions(),
        attempts=[],
    )


def _save_base(settings: RlSettings, directory: Path) -> None:
    """The model below adapters, wherever it comes from."""
    plain = msgspec.structs.replace(settings.model, lora=None)
    model = load_model(plain, seed=settings.seed, dtype=DTYPES[settings.model.dtype])
    model.model.save_pretrained(directory)
    model.tokenizer.save_pretrained(directory)


def _lines_of(path: Path, groups: set[int]) -> Iterable[bytes]:
    for line in read_lines(path):
        if decode_line(path, line)["group_idx"] in groups:
            yield line.data


def _write_lines(path: Path, lines: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(line + b"\n" for line in lines)


def _no_alert(title: str, text: str) -> None:
    raise RollbookError(f"{title}: {text}")
