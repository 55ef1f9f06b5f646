"""The story of a collection, from the settings to a complete output file.

Check the input, see what is done, refuse what does not fit, do what is left, say how it stands. Any kill at
any point leaves files from which the same command resumes; every (task, repeat) ends up on exactly one line.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec

from rollbook.collect.descriptors import with_room
from rollbook.collect.input import Input
from rollbook.collect.items import Item, Line
from rollbook.collect.loop import event_loop, run_to_the_end, seldom_collecting_garbage
from rollbook.collect.manifest import Manifest, write_manifest
from rollbook.collect.output import put_in_order, verify
from rollbook.collect.paths import CollectionFiles
from rollbook.collect.prepare import Outlook, Prepared, outlook, prepare
from rollbook.collect.progress import Progress
from rollbook.collect.rollout import rollouts_here
from rollbook.collect.session import Session
from rollbook.collect.settings import CollectSettings, seconds
from rollbook.errors import Interrupted, WriteError
from rollbook.records.locks import FileLock, lock_path
from rollbook.rollouts.limits import Budget
from rollbook.rollouts.runner import Runner, Stop, run_all

_REPORT_EVERY_S = 1.0
_SHOWN_AGENTS = 5
_STOPPED_AT_ONCE = 130
Log = Callable[[str], None]


class Work(Protocol):
    """Where rollouts are done."""

    async def run(self, item: Item) -> Line: ...

    async def close(self) -> None: ...


def collect(
    settings: CollectSettings,
    *,
    log: Log = print,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_start: Callable[[Input], None] = lambda _: None,
) -> Progress:
    """Collect until everything is done, given up or told to stop; returns how it stands then.

    `on_start` is called once nothing is refused any more: everything is checked, and the output is locked.
    """
    files = CollectionFiles(Path(settings.output_jsonl_fpath))
    settings = with_room(settings, log)
    with ExitStack() as opened:
        prepared = prepare(settings, files, opened)
        if foreign := sorted(prepared.rows.foreign_agents):
            log(
                f"some rows of {prepared.rows.path} have agent_ref {', '.join(foreign[:_SHOWN_AGENTS])}, "
                f"which `agents:` does not define; agent {settings.agent_name} runs them"
            )
        if prepared.done.unknown:
            log(f"{files.shown} has {prepared.done.unknown} lines that are not in this plan; they are kept")
        on_start(prepared.rows)  # before anything that bears the time at which it began
        session = opened.enter_context(Session(settings, files, prepared, log, on_progress))
        with seldom_collecting_garbage():
            progress = run_to_the_end(event_loop(), _collect(settings, session, prepared, log))
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
    rollouts_here(settings)
    return outlook(settings, files)


async def _collect(settings: CollectSettings, session: Session, prepared: Prepared, log: Log) -> Progress:
    stop = session.stop
    items = prepared.rows.items(settings.num_repeats, prepared.done.flags)
    work = await _work(settings, prepared.rollouts, session.missing)
    running = run_all(
        items,
        work.run,
        concurrency=session.concurrency,
        budget=_budget(settings),
        retry=settings.retry,
        stop=stop,
        abandon_after_s=None if settings.drain_for is None else seconds(settings.drain_for),
    )
    session.runner = running
    session.report("running")
    reports = asyncio.ensure_future(_report_forever(session))
    try:
        with _stop_on_signals(stop, running), _stop_after(settings.stop_after, stop, running, log):
            async with aclosing(running) as events:
                async for event in events:
                    session.take(event)
    except BaseException:
        with suppress(WriteError):  # the first error says more than those it brings about
            await _wind_down(session, work, reports)
        raise
    if stop.abandoned:
        log(f"drain_for={settings.drain_for} is over: abandoned {stop.abandoned} rollouts in flight")
    return await _wind_down(session, work, reports)


async def _wind_down(session: Session, work: Work, reports: asyncio.Task[None]) -> Progress:
    reports.cancel()
    try:
        await asyncio.to_thread(session.sync)
    finally:
        await work.close()
    return session.report()


async def _report_forever(session: Session) -> None:
    while True:
        await asyncio.sleep(_REPORT_EVERY_S)
        with suppress(WriteError):  # of a full disk the next line tells
            session.report("running")


def _budget(settings: CollectSettings) -> Budget | None:
    requests, tokens = settings.requests_per_minute, settings.tokens_per_minute
    return Budget(requests, tokens, lambda line: line.spent) if requests or tokens else None


async def _work(settings: CollectSettings, here: Work, missing: int) -> Work:
    if missing == 0 or (settings.engine == "local" and settings.workers == 1):
        return here
    await here.close()
    settings = msgspec.structs.replace(settings, workers=min(settings.workers, missing))
    if settings.engine == "ray":
        from rollbook.collect.ray_engine import ray_workers

        return await ray_workers(settings)
    from rollbook.collect.workers import worker_processes

    return worker_processes(settings)


@contextmanager
def _stop_after(duration: str | None, stop: Stop, running: Runner[Item, Line], log: Log) -> Iterator[None]:
    def over() -> None:
        if stop.reason is None:
            log(f"stop_after={duration} is over: {_what_follows(running)}")
            stop.request(f"stop_after={duration} is over")

    if duration is None:
        yield
        return
    timer = asyncio.get_running_loop().call_later(seconds(duration), over)
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _stop_on_signals(stop: Stop, running: Runner[Item, Line]) -> Iterator[None]:
    """The first INT or TERM lets what is in flight finish, the second cancels it, the third ends the process.

    These are no handlers of the event loop, which a grader that never ends would keep from running.
    """
    loop, collecting = asyncio.get_running_loop(), asyncio.current_task()
    assert collecting is not None
    heard = 0

    def hear(number: int, _: FrameType | None) -> None:
        nonlocal heard
        heard += 1
        name = signal.Signals(number).name
        if heard == 1:
            _say_at_once(f"{name}: {_what_follows(running)}; again to stop at once")
            stop.request(f"{name} received")
        elif heard == 2:
            loop.call_soon_threadsafe(collecting.cancel)
        else:
            _say_at_once(f"{name}: ended; rerun the same command to resume")
            os._exit(_STOPPED_AT_ONCE)

    with _handled_by(hear, signal.SIGINT, signal.SIGTERM):
        try:
            yield
        except asyncio.CancelledError:
            raise Interrupted from None


def _what_follows(running: Runner[Item, Line]) -> str:
    return f"starting no new rollouts, waiting for {running.num_in_flight} in flight"


def _say_at_once(text: str) -> None:
    """Not by print: the signal may have come while that was writing."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


@contextmanager
def _term_interrupts() -> Iterator[None]:
    """After the last rollout a TERM ends the collector as an INT does, so that its history hears of it."""

    def hear(*_: object) -> None:
        raise Interrupted

    with _handled_by(hear, signal.SIGTERM):
        yield


@contextmanager
def _handled_by(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Outside the main thread Python handles no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
