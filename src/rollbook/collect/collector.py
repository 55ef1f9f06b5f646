"""The story of a collection, from the settings to a complete output file.

Check the input, see what is done, refuse what does not fit, do what is left, say how it stands. Any kill at
any point leaves files from which the same command goes on; every (task, repeat) ends up on exactly one line.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from rollbook.collect.descriptors import with_room
from rollbook.collect.executor import Executor, LocalExecutor, local_executor
from rollbook.collect.input import Input
from rollbook.collect.loop import event_loop, run_to_the_end, seldom_collecting_garbage
from rollbook.collect.manifest import Manifest, write_manifest
from rollbook.collect.output import put_in_order, verify
from rollbook.collect.paths import CollectionFiles
from rollbook.collect.prepare import Outlook, Prepared, outlook, prepare
from rollbook.collect.progress import Progress, Tally, last_progress, write_progress
from rollbook.collect.rows import Item
from rollbook.collect.scheduler import Scheduler
from rollbook.collect.settings import CollectSettings, seconds
from rollbook.collect.sink import ResultSink
from rollbook.errors import Interrupted, WriteError
from rollbook.records.locks import FileLock, lock_path
from rollbook.rollouts.limits import Concurrency

_REPORT_EVERY_S = 1.0
_SHOWN_AGENTS = 5
Show = Callable[[Progress], None]


def collect(
    settings: CollectSettings,
    *,
    show: Show = lambda _: None,
    say: Callable[[str], None] = print,
    began: Callable[[Input], None] = lambda _: None,
) -> Progress:
    """Collect until everything is done, given up or told to stop; returns how it stands then.

    `began` is called once nothing is refused any more: everything is checked, and the output is locked.
    """
    files = CollectionFiles(Path(settings.output_jsonl_fpath))
    settings = with_room(settings, say)
    with ExitStack() as opened:
        prepared = prepare(settings, files, opened)
        if foreign := sorted(prepared.rows.foreign_agents):
            say(
                f"rows of {prepared.rows.path} name agents that are not among `agents:` here (agent_ref: "
                f"{', '.join(foreign[:_SHOWN_AGENTS])}); {settings.agent_name} does them"
            )
        if prepared.done.unknown:
            say(f"{prepared.done.unknown} lines of {files.shown} belong to no planned rollout; they stay")
        with seldom_collecting_garbage():
            progress = run_to_the_end(event_loop(), _collect(settings, files, prepared, show, say, began))
        opened.enter_context(_term_interrupts())
        if not prepared.keeps_manifest:
            _write_coverage(files, prepared.manifest, progress)
        prepared.output.close()
        if progress.missing == 0:
            found = verify(files.output, prepared.rows, settings.num_repeats)
            if settings.ordered:
                put_in_order(files.output, found)
    return progress


def _write_coverage(files: CollectionFiles, manifest: Manifest, progress: Progress) -> None:
    manifest.coverage = {
        "expected": progress.expected,
        "ok": progress.done,
        "failed": progress.failed,
        "missing": progress.missing,
    }
    write_manifest(files.manifest, manifest)


def look_ahead(settings: CollectSettings, *, is_to_begin: bool = False) -> Outlook:
    """Check everything that is checked before the first request; sends nothing and touches no file.

    `is_to_begin`: another process is about to, so an output that somebody else writes to is refused as well.
    """
    files = CollectionFiles(Path(settings.output_jsonl_fpath))
    if is_to_begin and lock_path(files.output.resolve()).exists():
        FileLock(files.shown).release()
    local_executor(settings)
    return outlook(settings, files)


async def _collect(
    settings: CollectSettings,
    files: CollectionFiles,
    prepared: Prepared,
    show: Show,
    say: Callable[[str], None],
    began: Callable[[Input], None],
) -> Progress:
    rows, done = prepared.rows, prepared.done
    expected = rows.rows * settings.num_repeats
    async with AsyncExitStack() as opened:
        executor = await _executor(settings, prepared.executor, expected - done.count)
        opened.push_async_callback(executor.close)
        began(rows)  # before anything that bears the time at which it began
        sink = _sink(settings, files, prepared, expected, say)
        opened.callback(sink.close)
        session = _Session(
            settings, files, rows.items(settings.num_repeats, done.flags), executor, sink, show, say
        )
        return await session.run(opened.aclose)


class _Session:
    """The loop over what is left to do, and what goes on beside it: commits, reports, signals."""

    def __init__(
        self,
        settings: CollectSettings,
        files: CollectionFiles,
        items: Iterator[Item],
        executor: Executor,
        sink: ResultSink,
        show: Show,
        say: Callable[[str], None],
    ) -> None:
        self._sink, self._progress_file, self._show = sink, files.progress, show
        self._stop_after = settings.stop_after
        self._concurrency = Concurrency(settings.num_samples_in_parallel, adaptive=settings.adaptive)
        self._scheduler = Scheduler(items, executor, sink, self._concurrency, settings.retry)
        self._drain = _Drain(self._scheduler, sink, say, settings.drain_for)

    async def run(self, close: Callable[[], Awaitable[None]]) -> Progress:
        """`close` what is open, which may take a while: before the last word on how it stands."""
        background = [
            asyncio.ensure_future(work) for work in (self._sink.commit_forever(), self._report_forever())
        ]
        winding_down = False
        try:
            self._report("running")
            with _drain_on_signals(self._drain):
                with self._drain.after(self._stop_after):
                    await _until_done(self._scheduler, background)
                winding_down = True
                return await self._wind_down(background, close)
        except BaseException:
            if not winding_down:
                with suppress(WriteError):  # the first error says more than those it brings about
                    await self._wind_down(background, close)
            raise

    async def _wind_down(
        self, background: list[asyncio.Task[None]], close: Callable[[], Awaitable[None]]
    ) -> Progress:
        await _cancel(background)
        try:
            await self._sink.commit()
        finally:
            await close()
        if self._sink.tally.is_complete:
            return self._report("complete")
        return self._report("stopped" if self._drain.asked else "incomplete")

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            self._report("running")

    def _report(self, status: str) -> Progress:
        progress = self._sink.tally.snapshot(
            status,
            in_flight=self._scheduler.in_flight,
            waiting=self._scheduler.waiting,
            concurrency=self._concurrency.limit,
            reason=self._drain.reason,
        )
        write_progress(self._progress_file, progress)
        self._show(progress)
        return progress


def _sink(
    settings: CollectSettings,
    files: CollectionFiles,
    prepared: Prepared,
    expected: int,
    say: Callable[[str], None],
) -> ResultSink:
    done = prepared.done
    tally = Tally(files.output, expected, done.count, done.totals, settings.prices)
    goes_on = prepared.output.position > 0
    if goes_on and (last := last_progress(files.progress, files.output)):
        tally.go_on_from(last)
    return ResultSink(
        files,
        prepared.output,
        tally,
        max_failure_rate=settings.max_failure_rate,
        min_samples=settings.min_samples,
        say=say,
    )


async def _until_done(scheduler: Scheduler, background: list[asyncio.Task[None]]) -> None:
    """Run the scheduler; if committing fails (a full disk), stop with that error, not blindly on."""
    running = asyncio.ensure_future(scheduler.run())
    try:
        await asyncio.wait([running, *background], return_when=asyncio.FIRST_COMPLETED)
        for task in background:
            if task.done():
                task.result()
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Drain:
    """Start nothing new, because someone asked for it (and not because too much had failed).

    What is in flight may finish, within `drain_for` if that is given; then it is let go.
    """

    def __init__(
        self, scheduler: Scheduler, sink: ResultSink, say: Callable[[str], None], drain_for: str | None
    ) -> None:
        self._scheduler, self._sink, self._say, self._drain_for = scheduler, sink, say, drain_for
        self._stop_timer: asyncio.TimerHandle | None = None
        self._let_go_timer: asyncio.TimerHandle | None = None
        self._let_go_of = 0
        self.asked = False

    @property
    def reason(self) -> str | None:
        """Why nothing new is started, if so, and what became of the rest."""
        why = self._sink.should_stop()
        return f"{why}, {self._let_go_of} let go {self._drain_for} later" if self._let_go_of else why

    def __call__(self, heard: str, reason: str, way_out: str = "") -> None:
        self.asked = self.asked or self._sink.should_stop() is None
        self._sink.stop(reason)
        self._scheduler.drain()
        if self._drain_for is not None and self._let_go_timer is None:
            loop = asyncio.get_running_loop()
            self._let_go_timer = loop.call_later(seconds(self._drain_for), self._let_go)
        flying = self._scheduler.in_flight
        self._say(f"{heard}: nothing new is started, {flying} in flight may finish{way_out}")

    @contextmanager
    def after(self, stop_after: str | None) -> Iterator[None]:
        """Drain when this time is over, unless whatever goes on in the context ends before."""
        if stop_after is not None:
            loop = asyncio.get_running_loop()
            self._stop_timer = loop.call_later(seconds(stop_after), self._time_is_over, stop_after)
        try:
            yield
        finally:
            for timer in (self._stop_timer, self._let_go_timer):
                if timer is not None:
                    timer.cancel()

    def _time_is_over(self, stop_after: str) -> None:
        if not self.asked:
            self(f"stop_after={stop_after} is over", f"stop_after={stop_after} is over")

    def _let_go(self) -> None:
        if flying := self._scheduler.in_flight:
            self._let_go_of = flying
            self._say(f"drain_for={self._drain_for} is over: {flying} in flight are let go")
            self._scheduler.let_go()


@contextmanager
def _drain_on_signals(drain: _Drain) -> Any:
    """The first INT or TERM lets what is in flight finish; the second ends everything at once.

    Python handles signals in the main thread alone: in another one only a cancellation ends it early.
    """
    loop = asyncio.get_running_loop()
    running = asyncio.current_task()
    heard = 0

    def hear(name: str) -> None:
        nonlocal heard
        heard += 1
        if heard > 1 and running is not None:
            running.cancel(f"{name} again")
            return
        drain(name, f"{name} received", "; again to stop now")

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    for number in numbers:
        loop.add_signal_handler(number, hear, number.name)
    try:
        yield
    except asyncio.CancelledError:
        raise Interrupted from None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextmanager
def _term_interrupts() -> Any:
    """After the last rollout a TERM ends the collector as an INT does, so that its history hears of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def _executor(settings: CollectSettings, own: LocalExecutor, left: int) -> Executor:
    if left == 0 or (settings.engine == "local" and settings.workers == 1):
        return own
    await own.close()
    settings = msgspec.structs.replace(settings, workers=min(settings.workers, left))
    if settings.engine == "ray":
        from rollbook.collect.ray_engine import RayExecutor

        return await RayExecutor.start(settings)
    from rollbook.collect.worker_pool import WorkerPool

    return WorkerPool(settings)
