"""The token export where something goes wrong: a full disk, an error of the writer, a disk that is slow."""

from __future__ import annotations

import queue
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.exported_steps import examples, exported, lines
from rollbook.errors import RollbookError
from rollbook.records.token_files import RunIdentity, read_manifest
from rollbook.records.token_places import files_of
from rollbook.records.token_settings import TokenExportSettings
from rollbook.records.token_writers import JsonWriter
from rollbook.records.tokens import read_sequences
from rollbook.train import export as export_module
from rollbook.train.batch import packed_batch
from rollbook.train.engine import Engine
from rollbook.train.export import TokenExport
from rollbook.train.host_buffers import HostBuffers, HostCopy
from rollbook.train.losses import PpoClip
from rollbook.train.processes import Processes


@pytest.fixture
def small_files() -> Iterator[None]:
    """A limit on the size of files stands for a disk that is full."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_full_disk_ends_the_export_and_not_the_run(
    tmp_path: Path, tokenizer: Any, engine: Engine, small_files: None, kind: Any
) -> None:
    engine.model.use_packing(True)
    batch = packed_batch(examples(6, [30] * 12, odd=False))
    alerts: list[str] = []
    with TokenExport(
        TokenExportSettings(format=kind), tmp_path, RunIdentity("r", 1), tokenizer, Processes(), seed=0,
        alert=lambda title, text: alerts.append(f"{title}: {text}"),
    ) as export:  # fmt: skip
        for iteration in range(4):
            if iteration == 1:
                (file,) = (
                    path for path in (tmp_path / "token_exports").iterdir() if path.name.startswith("rank")
                )
                limit = file.stat().st_size + 2000
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            if iteration == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert engine.step([batch] * 3, PpoClip(), 0.0, seen=export.seen(iteration, 0)).applied
            export.commit(iteration, PpoClip(), [], batch=iteration + 1)
    steps = list(read_manifest(tmp_path / "token_exports" / "manifest.jsonl"))
    assert [step.complete for step in steps] == [True, False, False, False]
    assert [(step.selected, step.records) for step in steps] == [(36, 36), (36, 0), (36, 0), (36, 0)]
    assert "not written" in str(steps[1].ranks[0].error) or "append failed" in str(steps[1].ranks[0].error)
    assert len(alerts) == 1 and alerts[0].startswith("the token export has stopped: process 0: ")
    (path,) = (path for path in (tmp_path / "token_exports").iterdir() if path.name.startswith("rank"))
    assert path.stat().st_size == steps[0].ranks[0].end
    (file,) = files_of(tmp_path / "token_exports" / "manifest.jsonl")
    assert [sequence.iteration for sequence in read_sequences(path, end=file.end)] == [0] * 36


def test_what_goes_wrong_in_the_writer_is_raised_in_the_loop(
    tmp_path: Path, tokenizer: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.model.use_packing(True)
    batch = packed_batch(examples(7, [6, 6]))
    with TokenExport(
        TokenExportSettings(), tmp_path, RunIdentity("r", 1), tokenizer, Processes(), seed=0, alert=print
    ) as export:
        monkeypatch.setattr("rollbook.train.export.records_of", lambda *_: 1 / 0)
        engine.step([batch], PpoClip(), 0.0, seen=export.seen(0, 0))
        with pytest.raises(RollbookError, match="the token export failed: ZeroDivisionError"):
            export.commit(0, PpoClip(), [], batch=1)


def test_what_goes_wrong_after_the_last_commit_is_raised_or_told_too(
    tmp_path: Path, tokenizer: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.model.use_packing(True)
    batch = packed_batch(examples(7, [6, 6]))
    alerts: list[str] = []

    def export_once(error: Exception, name: str) -> None:
        def fail(*_: Any) -> None:
            raise error

        with TokenExport(
            TokenExportSettings(format="parquet"), tmp_path / name, RunIdentity("r", 1), tokenizer,
            Processes(), seed=0, alert=lambda title, text: alerts.append(f"{title}: {text}"),
        ) as export:  # fmt: skip
            engine.step([batch], PpoClip(), 0.0, seen=export.seen(0, 0))
            monkeypatch.setattr("rollbook.records.token_writers.to_parquet", fail)
            export.commit(0, PpoClip(), [], batch=1)
            export.end_part(is_last=False)

    export_once(OSError("no space is left"), "full")
    (alert,) = alerts
    assert alert.startswith("the token export has stopped: no space is left; nothing more is exported until")
    (file,) = files_of(tmp_path / "full" / "token_exports" / "manifest.jsonl")
    assert file.path.suffix == ".arrows" and len(list(read_sequences(file.path, end=file.end))) == 2
    with pytest.raises(RollbookError, match="the token export failed: ZeroDivisionError"):
        export_once(ZeroDivisionError("of a bug"), "bug")


def opened(root: Path, tokenizer: Any) -> TokenExport:
    return TokenExport(
        TokenExportSettings(), root, RunIdentity("r", 1), tokenizer, Processes(), seed=0, alert=print
    )


def test_a_slow_disk_slows_the_loop_and_fills_no_memory(
    tmp_path: Path, tokenizer: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the writer stands still the loop gets as far as the queue is long; how long it then waited is
    told, by a clock that goes on by 100 s while it waits and not otherwise."""
    engine.model.use_packing(True)
    batch, steps, now = packed_batch(examples(7, [6, 6], odd=False)), 30, [0.0]
    is_writing, may_write, is_full = threading.Event(), threading.Event(), threading.Event()
    plain = JsonWriter.write

    def write(*given: Any) -> None:
        is_writing.set()
        assert may_write.wait(60)
        plain(*given)

    class Watched(queue.Queue[Any]):
        def put(self, *given: Any, **more: Any) -> None:
            if self.full():
                is_full.set()
            super().put(*given, **more)

    monkeypatch.setattr(JsonWriter, "write", write)
    monkeypatch.setattr(export_module.queue, "Queue", Watched)
    monkeypatch.setattr(export_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    done = []
    with opened(tmp_path, tokenizer) as export:

        def loop() -> None:
            for _ in range(steps):
                engine.step([batch], PpoClip(), 0.0, seen=export.seen(0, 0))
                done.append(1)

        engine.step([batch], PpoClip(), 0.0, seen=export.seen(0, 0))
        assert is_writing.wait(60)  # it has the first one in its hands
        looping = threading.Thread(target=loop)
        looping.start()
        assert is_full.wait(60)
        assert len(done) == export_module._WAITING < steps
        now[0] += 100.0
        may_write.set()
        looping.join(60)
        assert len(done) == steps
        assert export.commit(0, PpoClip(), [], batch=1) == 100.0
        engine.step([batch], PpoClip(), 0.0, seen=export.seen(1, 0))
        assert export.commit(1, PpoClip(), [], batch=2) == 0.0
    assert [line["micro_step"] for line in lines(tmp_path)] == [
        number for count in (steps + 1, 1) for number in range(count) for _ in range(2)
    ]


def test_a_micro_batch_is_copied_once_into_memory_that_is_used_again(
    tmp_path: Path, tokenizer: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches of all sizes; there are never more buffers than can wait, be written and be filled."""
    copies: list[HostCopy] = []
    plain = HostBuffers.copy

    def copy(self: HostBuffers, rows: Any) -> HostCopy:
        copies.append(plain(self, rows))
        return copies[-1]

    monkeypatch.setattr(HostBuffers, "copy", copy)
    engine.model.use_packing(True)
    sizes = [14, *(2 + (5 * n) % 11 for n in range(39))]
    batches = [packed_batch(examples(n, [size], odd=False)) for n, size in enumerate(sizes)]
    exported(tmp_path, tokenizer, engine, [batches], PpoClip())
    assert len(copies) == len(batches)
    own = {copy.buffer.data_ptr() for copy in copies}
    assert len(own) <= export_module._WAITING + 2
    found = lines(tmp_path)
    assert [len(line["token_ids"]) for line in found] == sizes
    assert all(None not in line["importance_ratio"][-1:] for line in found)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
        ),
    ],
)
def test_a_buffer_that_is_given_back_is_the_next_one(device: str) -> None:
    buffers = HostBuffers()
    rows = [torch.arange(5.0, device=device), torch.arange(5, dtype=torch.int8, device=device)]
    first = buffers.copy(rows)
    assert first.wait().tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    other = buffers.copy(rows)
    assert other.buffer.data_ptr() != first.buffer.data_ptr()  # that one is still in use
    buffers.give_back(first)
    assert first.buffer.is_pinned() == (device == "cuda")
    small = buffers.copy([torch.full((2,), 7.0, device=device)])
    assert small.wait().tolist() == [[7, 7]] and small.buffer.data_ptr() == first.buffer.data_ptr()
    buffers.give_back(small)  # whole, though it was used for little
    again = buffers.copy(rows)
    assert again.buffer.data_ptr() == first.buffer.data_ptr() and again.wait().shape == (2, 5)
    assert buffers.copy([torch.zeros(0, device=device)]).wait().shape == (1, 0)
