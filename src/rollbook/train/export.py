"""The token export: what the trainer saw and did for every token, written beside the training.

    export = open_export(settings, ...)                       # or an export that is off: the same methods
    engine.step(batches, loss, rate, seen=export.seen(iteration, step))
    export.commit(iteration, loss, steps, batch=n)       # waits for the writer, then a line of the manifest

`seen` is given the very tensors that made the loss, copies them to the host once and returns; a thread makes
records of them. The queue between the two is bounded, so a slow disk slows the loop down and never fills the
memory. A full disk ends the export with an alert, not the run: the records that no line of the manifest has
are cut off, which leaves room for its lines. Any other error of the writer is raised here.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
from torch import Tensor

from rollbook.errors import RollbookError, WriteError
from rollbook.records.token_columns import COLUMNS
from rollbook.records.token_files import (
    ExportedStep,
    ManifestWriter,
    RankPart,
    RunIdentity,
    export_files,
    refuse_foreign,
    sums_of,
)
from rollbook.records.token_settings import TokenExportSettings, is_chosen
from rollbook.records.token_writers import TokenWriter, open_token_writer
from rollbook.train.batch import Batch
from rollbook.train.engine import Seen, StepOutput, nothing
from rollbook.train.host_buffers import HostBuffers, HostCopy
from rollbook.train.losses import Loss, LossOutput
from rollbook.train.processes import Processes
from rollbook.train.token_math import TokenOutputs
from rollbook.train.token_records import Noted, SeenBatch, records_of
from rollbook.train.token_text import TokenText

_WAITING = 8  # micro-batches between the loop and the writer
_CLOSE = None  # what ends the writer's thread

Alert = Callable[[str, str], None]


class NoTokenExport:
    """The export that is off."""

    def seen(self, iteration: int, step: int, notes: Mapping[int, Noted] | None = None) -> Seen:
        return nothing

    def commit(self, iteration: int, loss: Loss, steps: Sequence[StepOutput], *, batch: int) -> float:
        """Finish an iteration of these optimiser steps; returns the seconds that the loop has spent on its
        export."""
        return 0.0

    def end_part(self, *, is_last: bool) -> None:
        """A checkpoint comes now: what is exported from here on may be dropped by a resume. The last part is
        whole when this returns: a run that is complete is not opened again to finish it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class TokenExport(NoTokenExport):
    def __init__(
        self,
        settings: TokenExportSettings,
        root: Path,
        identity: RunIdentity,
        tokenizer: Any,
        processes: Processes,
        *,
        seed: int,
        alert: Alert,
    ) -> None:
        self._settings, self._identity, self._processes = settings, identity, processes
        self._seed, self._alert = seed, alert
        self._files = export_files(root, settings)
        self._manifest = self._open_manifest() if processes.is_first else None
        self._text = TokenText(tokenizer)
        self._seconds = 0.0
        self._micro_step = self._sequences = self._selected = 0
        self._part = RankPart(rank=processes.rank)  # of this iteration so far; the writer's to change
        self._writer: TokenWriter | None = None
        self._buffers = HostBuffers()
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._error: BaseException | None = None  # of the writer, to be raised in the loop
        self._stopped: str | None = None  # why nothing is written any more
        self._is_told = False
        self._thread = threading.Thread(target=self._write_all, name="rollbook-token-export", daemon=True)
        self._thread.start()

    def seen(self, iteration: int, step: int, notes: Mapping[int, Noted] | None = None) -> Seen:
        if iteration % self._settings.every:
            return nothing

        def take(batch: Batch, outputs: TokenOutputs, loss: LossOutput) -> None:
            began = time.perf_counter()
            self._raise_error()
            chosen = [place for place in range(len(batch.keys)) if self._is_chosen(batch, place, iteration)]
            self._sequences += len(batch.keys)
            self._selected += len(chosen)
            if chosen and self._stopped is None:
                values = quantities(outputs, loss)
                copy = self._buffers.copy(list(values.values()))
                rows = {name: number for number, name in enumerate(values)}
                seen = SeenBatch(iteration, step, self._micro_step, batch, chosen, rows, copy.values_QN)
                self._queue.put(partial(self._write, seen, copy, notes or {}))
            self._micro_step += 1
            self._seconds += time.perf_counter() - began

        return take

    def commit(self, iteration: int, loss: Loss, steps: Sequence[StepOutput], *, batch: int) -> float:
        began = time.perf_counter()
        if iteration % self._settings.every == 0:
            self._wait()
            self._synced()
            gathered = self._processes.gather(self._finished_part())
            if gathered is not None:
                self._append(self._step(iteration, loss, steps, batch, gathered))
            if self._writer is not None and self._stopped is None:
                self._writer.keep()
            self._part = RankPart(rank=self._processes.rank)
            self._micro_step = self._sequences = self._selected = 0
        spent = self._seconds + time.perf_counter() - began
        self._seconds = 0.0
        return spent

    def end_part(self, *, is_last: bool) -> None:
        self._queue.put(self._end_part)
        if is_last:
            self._wait()

    def __exit__(self, kind: object = None, *_: object) -> None:
        self._queue.put(_CLOSE)
        self._thread.join()
        self._guarded(self._close)
        if self._manifest is not None:
            self._guarded(self._manifest.close)
            self._share_errors([self._stopped] if self._stopped else [])
        if kind is None:
            self._raise_error()  # of what was still to do after the last commit

    def _open_manifest(self) -> ManifestWriter:
        """The manifest is there before any other file: it says whose they are."""
        refuse_foreign(self._files, run_id=self._identity.run_id)
        return ManifestWriter(self._files.manifest)

    def _is_chosen(self, batch: Batch, place: int, iteration: int) -> bool:
        key = batch.keys[place]
        places: tuple[str | int, ...] = (iteration, self._micro_step, place, self._processes.rank)
        if key is not None:
            places = key.places
        return is_chosen(self._settings.fraction, self._seed, places)

    def _finished_part(self) -> RankPart:
        part = self._part
        part.sequences, part.selected = self._sequences, self._selected
        part.complete = part.records == part.selected
        return part

    def _step(
        self,
        iteration: int,
        loss: Loss,
        steps: Sequence[StepOutput],
        batch: int,
        parts: list[RankPart],
    ) -> ExportedStep:
        """The line of an iteration, of all processes together."""
        return ExportedStep(
            run_id=self._identity.run_id,
            attempt=self._identity.attempt,
            split=self._identity.split,
            iteration=iteration,
            batch=batch,
            format=self._settings.format,
            loss=loss.described(),
            applied=[step.applied for step in steps],
            columns=[name for name in COLUMNS if self._settings.exports(name)],
            fraction=self._settings.fraction,
            **sums_of(parts),
        )

    def _append(self, step: ExportedStep) -> None:
        assert self._manifest is not None
        try:
            self._manifest.append(step)
        except WriteError as error:
            if self._stopped is None:
                # The line matters more than the records of this process, which make room for it.
                self._stop(error)
                self._drop_part()
                parts = [self._finished_part(), *step.ranks[1:]]
                step = msgspec.structs.replace(step, **sums_of(parts))
                with contextlib.suppress(WriteError):
                    self._manifest.replace_last(step)
        self._share_errors([f"process {part.rank}: {part.error}" for part in step.ranks if part.error])

    def _share_errors(self, errors: Sequence[str]) -> None:
        if errors and not self._is_told:
            self._is_told = True
            more = "nothing more is exported until the run is resumed"
            self._alert("the token export has stopped", f"{'; '.join(errors)}; {more}")

    def _write_all(self) -> None:
        """The thread of the writer."""
        while (work := self._queue.get()) is not _CLOSE:
            try:
                if self._error is None and self._stopped is None:
                    work()
            except (WriteError, OSError) as error:
                self._stop(error)
            except BaseException as error:
                self._error = error
            finally:
                self._queue.task_done()

    def _write(self, seen: SeenBatch, copy: HostCopy, notes: Mapping[int, Noted]) -> None:
        if self._writer is None:
            self._writer = open_token_writer(self._files, self._settings, self._processes.rank)
        copy.wait()
        first = self._part.records
        records = records_of(seen, self._identity, self._processes.rank, first, notes, self._text)
        self._buffers.give_back(copy)  # the records are copies
        self._writer.write(records, seen.iteration)
        self._part.records += len(records.heads)
        self._part.tokens += len(records.token_F)
        self._part.trained_tokens += int(records.trained_F.sum())

    def _wait(self) -> None:
        """Until the writer has written all that it was given."""
        self._queue.join()
        self._raise_error()

    def _synced(self) -> None:
        """Note how long the file is, once it is on the disk; of a file that is not whole, what is missing."""
        if self._writer is not None and self._stopped is None:
            self._guarded(self._writer.sync)
        if self._writer is not None and self._stopped is None:
            self._part.file, self._part.end = self._writer.file, self._writer.end
        if self._stopped is not None:
            self._drop_part()

    def _drop_part(self) -> None:
        """Nothing of this iteration is in the file."""
        self._part = RankPart(rank=self._processes.rank, error=self._stopped)

    def _guarded(self, act: Callable[[], None]) -> None:
        """A disk that is full ends the export, not the run."""
        try:
            act()
        except (WriteError, OSError) as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self._stopped = self._stopped or str(error)
        if self._writer is not None:
            with contextlib.suppress(WriteError, OSError):  # the first error is told; a resume cuts as well
                self._writer.drop()

    def _end_part(self) -> None:
        if self._writer is not None:
            self._writer.end_part()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise RollbookError(f"the token export failed: {type(error).__name__}: {error}") from error


def open_export(
    settings: TokenExportSettings | None,
    root: Path,
    identity: RunIdentity | None,
    tokenizer: Any,
    processes: Processes,
    *,
    seed: int,
    alert: Alert,
) -> NoTokenExport:
    """The export of this process. The first one must have opened its own before the others call this."""
    if settings is None or identity is None:
        return NoTokenExport()
    return TokenExport(settings, root, identity, tokenizer, processes, seed=seed, alert=alert)


def quantities(outputs: TokenOutputs, loss: LossOutput) -> dict[str, Tensor]:
    """What is known of each trained token, by the name it has in the records."""
    values = {"trainer_logprobs": outputs.logprob_N.detach()}
    if outputs.entropy_N is not None:
        values["entropy"] = outputs.entropy_N
    for fact, name in (("ratio", "importance_ratio"), ("reason", "reason")):
        if fact in loss.facts_N:
            values[name] = loss.facts_N[fact]
    return values
