"""The story of a collection, from the settings to a complete output file.

Check the input, see what is done, refuse what does not fit, do what is left, say how far it got. Any kill at
any point leaves files from which the same command resumes; every (task, repeat) ends up on exactly one line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import msgspec

from rollbook.collect.check import Checked, check, refuse_paths
from rollbook.collect.files import CollectionFiles
from rollbook.collect.input import Input
from rollbook.collect.items import Item, Line
from rollbook.collect.loop import run_in_loop
from rollbook.collect.output import put_in_order, verify
from rollbook.collect.own_pieces import OwnPieces
from rollbook.collect.results import SYNC, Results
from rollbook.collect.settings import CollectSettings, seconds
from rollbook.collect.signals import Signals
from rollbook.errors import WriteError
from rollbook.records.complete import file_facts
from rollbook.records.jsonl import JsonlWriter
from rollbook.records.locks import FileLock, lock_path
from rollbook.records.progress import Progress
from rollbook.rollouts.limits import Budget
from rollbook.rollouts.runner import run_all

_REPORT_EVERY_S = 1.0
_SHOWN_AGENTS = 5
Log = Callable[[str], None]


class Work(Protocol):
    """Where rollouts are done."""

    async def run(self, item: Item) -> Line: ...

    async def close(self) -> None: ...


class DryRun(msgspec.Struct):
    """What a collection would do."""

    output: str
    planned: int
    done: int
    missing: int


def collect(
    settings: CollectSettings,
    *,
    own: OwnPieces | None = None,
    log: Log = print,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_start: Callable[[Input], None] = lambda _: None,
    on_end: Callable[[Progress], None] = lambda _: None,
) -> Progress:
    """Collect until everything is done, given up or told to stop; returns how far it got.

    `own` are objects of the caller's, in place of what the settings name. `on_start` is called once nothing
    is refused any more: everything is checked, and the output is locked. `on_end` is called when all is
    written down: a signal that comes before it has returned does not end the process unheard.
    """
    files = _files(settings)
    with ExitStack() as opened:
        lock = _lock(settings, files, opened)
        checked = check(settings, files, own=own)
        _log_oddities(settings, files, checked, log)
        output = opened.enter_context(
            JsonlWriter(files.output, sync=SYNC, check=False, lock=lock, follow_links=True)
        )
        files.journal.unlink(missing_ok=True)
        is_recorded = _begin_session(checked, output.position)
        on_start(checked.rows)  # before anything that bears the time at which it began
        results = opened.enter_context(Results(settings, files, checked, output, log, on_progress))
        signals = Signals(results)
        with signals.heard():
            progress = run_in_loop(_collect(settings, checked, results, log, signals))
            signals.end_of_rollouts()
            output.close()
            _finish(settings, files, checked, progress, is_recorded=is_recorded)
            on_end(progress)
    return progress


def _finish(
    settings: CollectSettings,
    files: CollectionFiles,
    checked: Checked,
    progress: Progress,
    *,
    is_recorded: bool,
) -> None:
    """Check the output, if it has everything, put it in order, and record what it is."""
    facts, is_ordered = None, False
    if progress.missing == 0:
        found = verify(files.output, checked.rows, settings.num_repeats)
        is_ordered = settings.ordered and put_in_order(files.output, found)
        facts = None if is_ordered else found.facts  # of the bytes that were checked
    if is_recorded:
        checked.manifest.end(progress.coverage, facts or file_facts(files.output), is_ordered=is_ordered)


def dry_run(settings: CollectSettings, *, is_to_begin: bool = False) -> DryRun:
    """Check everything that is checked before the first request; sends nothing and touches no file.

    `is_to_begin`: another process is about to, so an output that somebody else writes to is refused as well.
    """
    files = _files(settings)
    refuse_paths(settings, files)
    if is_to_begin and lock_path(files.output.resolve()).exists():
        FileLock(files.shown).release()
    with TemporaryDirectory(prefix="rollbook-") as directory:
        checked = check(settings, files, tasks_aside=Path(directory) / files.tasks.name)
    run_in_loop(checked.rollouts.close())
    return DryRun(str(files.shown), checked.expected, checked.done.count, checked.missing)


def _files(settings: CollectSettings) -> CollectionFiles:
    given = settings.input_jsonl_fpath
    return CollectionFiles(Path(settings.output_jsonl_fpath), Path(given) if given else None)


def _lock(settings: CollectSettings, files: CollectionFiles, opened: ExitStack) -> FileLock:
    """Taken before anything is written, and held to the end. What is refused leaves no new directory."""
    refuse_paths(settings, files)
    opened.callback(_remove_empty, [path for path in files.output.parents if not path.exists()])
    lock = FileLock(files.shown)
    opened.callback(lock.release)
    return lock


def _remove_empty(directories: list[Path]) -> None:
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()


def _log_oddities(settings: CollectSettings, files: CollectionFiles, checked: Checked, log: Log) -> None:
    rows, unknown = checked.rows, checked.done.unknown
    if foreign := sorted(rows.foreign_agents):
        log(
            f"some rows of {rows.path} have agent_ref {', '.join(foreign[:_SHOWN_AGENTS])}, "
            f"which `agents:` does not define; agent {settings.agent_name} runs them"
        )
    for assumed in sorted(rows.assumed):
        log(f"{rows.path}: {assumed} (columns.prompt=NAME and columns.answer=NAME name others)")
    if rows.sharing:
        log(
            f"{len(rows.sharing)} rows of {rows.path} have the id of an earlier row that is another task; "
            f"they are collected as {', '.join(rows.sharing[:_SHOWN_AGENTS])}"
            f"{', ...' if len(rows.sharing) > _SHOWN_AGENTS else ''}"
        )
    if unknown:
        log(f"{files.shown} has {unknown} lines that are not in this plan; they are kept")


def _begin_session(checked: Checked, output_bytes: int) -> bool:
    """Record what is to be done before the first request; returns whether it is what the manifest says.

    A session without anything to do changes nothing, and may have another input than the lines.
    """
    sessions, new = checked.manifest.sessions, checked.session
    if checked.missing or not sessions:
        new.output_start = output_bytes if sessions else 0  # what has no manifest is taken to be like this
        checked.manifest.begin(new)
        return True
    last = sessions[-1]
    return (last.input_sha256, last.rows, last.repeats) == (new.input_sha256, new.rows, new.repeats)


async def _collect(
    settings: CollectSettings, checked: Checked, results: Results, log: Log, signals: Signals
) -> Progress:
    work = await _work(settings, checked.rollouts, checked.missing)
    running = run_all(
        checked.rows.items(settings.num_repeats, checked.done.flags),
        work.run,
        concurrency=results.concurrency,
        budget=_budget(settings),
        retry=settings.retry,
        stop=results.stop,
        abandon_after_s=None if settings.drain_for is None else seconds(settings.drain_for),
    )
    results.runner = running
    results.report("running")
    reports = asyncio.ensure_future(_report_forever(results))
    try:
        with signals.cancel_this_task(), _stop_after(settings.stop_after, results, log):
            async with aclosing(running) as events:
                async for event in events:
                    results.take(event)
    except BaseException:
        with suppress(WriteError):  # the first error says more than those it brings about
            await _wind_down(results, work, reports)
        raise
    if abandoned := results.stop.abandoned:
        log(f"drain_for={settings.drain_for} is over: abandoned {abandoned} rollouts in flight")
    return await _wind_down(results, work, reports)


async def _wind_down(results: Results, work: Work, reports: asyncio.Task[None]) -> Progress:
    reports.cancel()
    try:
        await asyncio.to_thread(results.sync)
    finally:
        await work.close()
    return results.report()


async def _report_forever(results: Results) -> None:
    while True:
        await asyncio.sleep(_REPORT_EVERY_S)
        with suppress(WriteError):  # of a full disk the next line tells
            results.report("running")


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
def _stop_after(duration: str | None, results: Results, log: Log) -> Iterator[None]:
    def over() -> None:
        if results.stop.reason is None and results.runner is not None:
            log(f"stop_after={duration} is over: {results.runner.what_a_stop_does()}")
            results.stop.request(f"stop_after={duration} is over")

    if duration is None:
        yield
        return
    timer = asyncio.get_running_loop().call_later(seconds(duration), over)
    try:
        yield
    finally:
        timer.cancel()
