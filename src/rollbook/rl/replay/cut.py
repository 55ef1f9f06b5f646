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
from rollbook.records.layout import TRAIN, RunFiles
from rollbook.records.plain import utc_now
from rollbook.records.record import decode_line
from rollbook.records.run_info import RunInfo, versions, write_run_info
from rollbook.records.token_files import RunIdentity
from rollbook.records.token_settings import TokenExportSettings, TrainerSettings
from rollbook.rl.noise import measure_noise
from rollbook.rl.opening import Trainer
from rollbook.rl.replay.bundle import BASE, BUNDLE, MOST_BYTES, Bundle, open_recorded
from rollbook.rl.replay.findings import Findings
from rollbook.rl.replay.reach import only_iteration, stand_before
from rollbook.rl.replay.recorded import READ, RecordedRun, read_groups
from rollbook.rl.replay.replay import replay, undisturbed
from rollbook.rl.replay.replayer import keep_weights, open_weights, vocabulary_of
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


class _Work(NamedTuple):
    """What is cut, and the weights before its step."""

    run: RecordedRun
    record: IterationRecord
    place: _Place
    trainer: Trainer

    @property
    def groups(self) -> set[int]:
        """Those that the rows are from: an advantage is made of the rewards of a whole group."""
        return {row.group_idx for row in self.place.rows}


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
        record = recorded.record(only_iteration(recorded, iteration))
        place = _place(recorded, record, micro_batch)
        trainer = _weights_before(recorded, record, place.optim_step, Path(temporary) / "weights")
        whole, made = Path(temporary) / "bundle", Path(temporary) / "bundle.zip"
        with complete_directory(whole) as root:
            trained_tokens = _write(root, _Work(recorded, record, place, trainer))
        del trainer  # its weights are not needed beside those of the replay
        pack(whole, made)
        found = replay(made)
        if found.first is not None:
            raise RollbookError(f"the bundle does not replay, so it is not kept: {found.first}")
        with replacing(target) as file, made.open("rb") as source:
            shutil.copyfileobj(source, file)
    return Cut(
        path=str(target),
        bytes=target.stat().st_size,
        iteration=record.iteration,
        optim_step=place.optim_step,
        micro_batch=micro_batch,
        rows=len(place.rows),
        trained_tokens=trained_tokens,
    )


def _place(run: RecordedRun, record: IterationRecord, micro_batch: int) -> _Place:
    places = [
        _Place(step, micro_batch, rows)
        for step, one in enumerate(record.steps or ())
        for rows in one.micro_batches
    ]
    if not 0 <= micro_batch < len(places):
        raise UsageError(
            f"iteration {record.iteration} of {run.root} has {len(places)} micro-batches, counted from 0, "
            f"and {micro_batch} is none of them"
        )
    return places[micro_batch]


def _weights_before(run: RecordedRun, record: IterationRecord, optim_step: int, directory: Path) -> Trainer:
    """A trainer that is just before one optimiser step of an iteration; the whole of it must replay."""
    i = record.iteration
    replayer = stand_before(run, i)
    _refuse_large(replayer.trainer)
    origin = keep_weights(replayer.trainer, i, directory)
    replayed = replayer.next()
    if replayed.first is not None:
        raise RollbookError(f"a bundle would expect what was not recorded: {replayed.first}")
    del replayer
    trainer = open_weights(run.settings, origin)
    if optim_step:
        groups = read_groups(run, record, Findings(i), vocabulary=vocabulary_of(trainer))
        processes = record.processes or 1
        plan = assemble(trainer, run.settings, groups, i, processes=processes, only=run.only).plan
        before = [share._replace(steps=share.steps[:optim_step]) for share in plan]
        take_steps(trainer, run.settings, before, NoTokenExport())
    return trainer


def _refuse_large(trainer: Trainer) -> None:
    tensors = [*trainer.model.model.parameters()]
    tensors += [tensor for kept in trainer.optimizer.tensors() for tensor in kept.values()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if size > MOST_BYTES:
        raise UsageError(
            f"the weights and the optimiser are {size:,} bytes, and a bundle has at most {MOST_BYTES:,}; "
            "it is for small models"
        )


def _write(root: Path, work: _Work) -> int:
    """Everything but the mark, which names all the rest; returns how many tokens its step trains."""
    run, i = work.run, work.record.iteration
    files, name, info = RunFiles(root), f"{i:06d}", _info(run)
    settings = _settings(run.settings, f"checkpoints/{name}")
    with complete_directory(files.checkpoint(name)) as checkpoint:
        save_training_state(checkpoint, work.trainer.model, work.trainer.optimizer)
        _forget_this_machine(checkpoint)
    if settings.model.lora is not None:
        _save_base(run.settings, root / BASE)
    write_config(files.config, msgspec.to_builtins(settings))
    write_run_info(files.run, info)
    kept = CheckpointRecord(name=name, batch=i, state_path=f"checkpoints/{name}")
    _write_lines(files.checkpoints, [kept.encode()])
    for part in READ:
        _write_lines(files.iteration(TRAIN, i, part), _lines_of(run.path(i, part), work.groups))
    record = _expected(root, work, settings, info.id)
    paths = [files.iteration(TRAIN, i, part) for part in READ]
    record.files = {path.name: file_facts(path) for path in paths}
    _write_lines(files.iterations, [record.encode()])
    place = work.place._asdict()
    _write_lines(root / BUNDLE, [msgspec.json.encode(Bundle(run_id=info.id, iteration=i, **place))])
    assert record.steps is not None
    return record.steps[0].trained_tokens or 0


def _forget_this_machine(checkpoint: Path) -> None:
    """Adapters name the model below by its path, in their config and in a text for a hub."""
    (checkpoint / "README.md").unlink(missing_ok=True)
    config = checkpoint / "adapter_config.json"
    if config.exists():
        values = json.loads(config.read_text()) | {"base_model_name_or_path": BASE}
        config.write_text(json.dumps(values, sort_keys=True, indent=2) + "\n")


def _expected(root: Path, work: _Work, settings: RlSettings, run_id: str) -> IterationRecord:
    """Train the micro-batch alone, as a step of its own, and say what came out, token by token too."""
    run, trainer, i = work.run, work.trainer, work.record.iteration
    before = weights_digest(trainer.model)
    groups = [
        group
        for group in read_groups(run, work.record, Findings(i), vocabulary=vocabulary_of(trainer))
        if group.group_idx in work.groups
    ]
    assembled = assemble(trainer, settings, groups, i, processes=1, only=frozenset(work.place.rows))
    noise = run.noise(i) or measure_noise(trainer, settings.loss, assembled.selection.examples).noise
    identity, tokenizer = RunIdentity(run_id, 1), trainer.model.tokenizer
    with open_export(
        TokenExportSettings(), root, identity, tokenizer, trainer.processes, seed=0, alert=_no_alert
    ) as export:
        steps = take_steps(trainer, settings, assembled.plan, export)
        export.commit(i, settings.loss, steps, batch=i + 1)
    after = weights_digest(trainer.model)
    record = trained_record(settings, i, assembled, steps, before=before, after=after)
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
        trainer=TrainerSettings(),
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
