"""Everything that can be refused, refused before the first request.

The input is checked row by row, the output compared with what it was collected with, and what is done found.
`prepare` first takes the lock, and writes the manifest; `outlook` does the same looking, and touches no file.
Only the manifest of a new collection of a usual size is left for later, when the first requests are on their
way: it holds a digest of the whole input.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rollbook.collect.executor import LocalExecutor, local_executor
from rollbook.collect.input_check import InputCheck, begin_check, begin_check_of
from rollbook.collect.journal import Done
from rollbook.collect.manifest import (
    Manifest,
    drift,
    forget_unused_meaning,
    go_on_from,
    read_manifest,
    refuse_drift,
    stay_as,
    write_manifest,
)
from rollbook.collect.own_tasks import count_tasks, refuse_other_tasks, write_tasks
from rollbook.collect.paths import CollectionFiles
from rollbook.collect.plan import Plan
from rollbook.collect.settings import CollectSettings
from rollbook.envs.agents import describe_agent, make_tasks
from rollbook.errors import UsageError
from rollbook.records.jsonl import JsonlWriter
from rollbook.records.locks import FileLock
from rollbook.records.row_keys import KEY

if TYPE_CHECKING:
    from rollbook.collect.journal import Entries

_LONG_DIGEST = 512 << 20  # bytes that take a moment


class Prepared(NamedTuple):
    """A collection that is ready to go: locked, checked, and compared with what is on the disk."""

    plan: Plan
    done: Done
    manifest: Manifest
    output: JsonlWriter
    executor: LocalExecutor  # shows that the settings can work; other processes build their own
    has_manifest: bool  # on the disk
    keeps_manifest: bool  # of another input than this one, of which there is nothing to do

    @property
    def known(self) -> Entries | None:
        """What the journal begins with: its row numbers must not meet the manifest of another input."""
        return None if self.keeps_manifest else self.done.entries

    def write_manifest(self, path: Path) -> None:
        """Before the first line of results, which could not be resumed without it. Waits for the digest."""
        self.manifest.input_sha256, self.manifest.input_bytes = self.plan.sha256, self.plan.size
        write_manifest(path, self.manifest)


class Outlook(msgspec.Struct):
    """What a collection would do."""

    output: str
    planned: int
    done: int
    missing: int


def prepare(
    settings: CollectSettings,
    files: CollectionFiles,
    opened: ExitStack,
    check: InputCheck | None,
) -> Prepared:
    lock = _lock(settings, files, opened)
    old = _last_manifest(settings, files)
    executor = local_executor(settings) if settings.input_jsonl_fpath is None else None  # before its tasks
    manifest = _manifest(settings, files)
    if check is None:
        _refuse_changes(settings, files, manifest, old, same_input=True)
        check = _check_of_own_tasks(settings, files)
        opened.callback(check.close)
    # A journal that is there must not meet the manifest of another input, and results not wait for long.
    later = old is None and check.file.is_file() and check.file.stat().st_size < _LONG_DIGEST
    plan = _plan(settings, check, digest_can_wait=later)
    same_input = _compare(settings, files, plan, manifest, old)
    executor = executor or local_executor(settings)  # after a check, which is quicker than some environments
    output = opened.enter_context(JsonlWriter(files.output, check=False, lock=lock))
    done = _done(files, plan, same_input=same_input)
    if not same_input:  # its row numbers must not meet the manifest of another input
        files.journal.unlink(missing_ok=True)
    nothing_to_do = done.count == plan.expected
    if old is not None and nothing_to_do:
        stay_as(old, manifest)
    elif old is not None:
        go_on_from(old, manifest, output.position)
    keeps = old is not None and nothing_to_do and not same_input
    prepared = Prepared(plan, done, manifest, output, executor, has_manifest=not later, keeps_manifest=keeps)
    if prepared.has_manifest and not keeps:
        prepared.write_manifest(files.manifest)
    return prepared


def _lock(settings: CollectSettings, files: CollectionFiles, opened: ExitStack) -> FileLock:
    """Taken before anything is written, and held to the end. What is refused leaves no new directory."""
    _refuse_paths(settings, files)
    opened.callback(_remove_empty, [path for path in files.output.parents if not path.exists()])
    lock = FileLock(files.shown)
    opened.callback(lock.release)
    return lock


def _remove_empty(directories: list[Path]) -> None:
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()


def _refuse_paths(settings: CollectSettings, files: CollectionFiles) -> None:
    """An output that is no file, and an input that a collection into this output would write to."""
    if not files.shown.name or (files.output.exists() and not files.output.is_file()):
        raise UsageError(f"output_jsonl_fpath={files.shown} is not a file; write it like rollouts.jsonl")
    if settings.input_jsonl_fpath is None:
        return
    place = Path(settings.input_jsonl_fpath).resolve()
    for mine in (files.output, files.failures, files.manifest, files.progress, files.journal):
        if place == mine.resolve():
            raise UsageError(
                f"input_jsonl_fpath={settings.input_jsonl_fpath} is a file that a collection into "
                f"{files.shown} writes to; choose another output_jsonl_fpath"
            )


def _last_manifest(settings: CollectSettings, files: CollectionFiles) -> Manifest | None:
    """That of the sessions whose results are there, if any; an output that cannot be resumed is refused."""
    old = read_manifest(files.manifest)
    other = files.output.with_name(old.output or files.output.name) if old else files.output
    if other != files.output and other.exists():  # rollouts.json beside rollouts.jsonl
        manifest = files.shown.with_name(files.manifest.name)
        raise UsageError(
            f"{manifest} belongs to {other.name}, and {files.output.name} would share it; "
            "choose an output_jsonl_fpath that differs before its ending"
        )
    if not _has_results(files):
        return None  # whatever a session meant that wrote no line, no row means it
    if settings.resume == "never":
        raise UsageError(
            f"{files.shown} exists; choose another output_jsonl_fpath or resume it with --resume=if-possible"
        )
    if old is None and not _begins_with_a_key(files.output):
        raise UsageError(
            f"{files.shown} exists and is no output of `rollbook collect`: its first line does not begin "
            f'with {{"{KEY}":; choose another output_jsonl_fpath'
        )
    if old is None and settings.resume != "always":
        raise UsageError(
            f"{files.shown} has no manifest beside it, so nobody knows with what settings it was collected; "
            "choose another output, or go on by its keys with --resume=always"
        )
    if old is not None:
        forget_unused_meaning(old, files.output.stat().st_size)
    return old


def _manifest(settings: CollectSettings, files: CollectionFiles) -> Manifest:
    """What this collection is, as far as it is known before its input is."""
    agent = settings.agent
    meaning = {
        "agent": describe_agent(agent.env, agent.policy, max_turns=agent.max_turns),
        "responses_create_params": settings.responses_create_params,
        "num_repeats_add_seed": settings.num_repeats_add_seed,
    }
    if settings.input_jsonl_fpath is None:
        meaning["seed"] = settings.seed
    return Manifest(
        output=files.output.name,
        repeats=settings.num_repeats,
        meaning=meaning,
        operation={"concurrency": settings.num_samples_in_parallel, "workers": settings.workers},
    )


def _compare(
    settings: CollectSettings, files: CollectionFiles, plan: Plan, new: Manifest, old: Manifest | None
) -> bool:
    """Whether the input is that of the last session; drift is refused."""
    new.input, new.rows = str(plan.path), plan.rows
    if old is None:
        return False
    same_input = plan.begins_with(old.input_bytes, old.input_sha256)
    new.input_sha256 = plan.sha256
    _refuse_changes(settings, files, new, old, same_input=same_input)
    return same_input


def _refuse_changes(
    settings: CollectSettings,
    files: CollectionFiles,
    new: Manifest,
    old: Manifest | None,
    *,
    same_input: bool,
) -> None:
    if old is None or settings.resume == "always":
        return
    if changes := drift(old, new, same_input=same_input):
        refuse_drift(files.shown, changes)


def _has_results(files: CollectionFiles) -> bool:
    return files.output.exists() and files.output.stat().st_size > 0


def _begins_with_a_key(output: Path) -> bool:
    with output.open("rb") as file:
        begin = file.read(1 << 10).lstrip()
    return "".join(begin.decode("utf-8", "replace").split()).startswith(f'{{"{KEY}":')


def _done(files: CollectionFiles, plan: Plan, *, same_input: bool) -> Done:
    if not _has_results(files):
        return Done()
    from rollbook.collect.done import find_done  # and numpy with it, which a new collection need not wait for

    return find_done(files.output, files.journal, plan, same_input=same_input)


def _plan(settings: CollectSettings, check: InputCheck, *, digest_can_wait: bool = False) -> Plan:
    return Plan(
        check.path,
        limit=settings.limit,
        repeats=settings.num_repeats,
        check=check,
        digest_can_wait=digest_can_wait,
    )


def _check_of_own_tasks(settings: CollectSettings, files: CollectionFiles) -> InputCheck:
    """Of the environment's own tasks, written down for the resume."""
    limit = _limit_of_own_tasks(settings)
    go_on = _has_results(files) and files.tasks.exists()
    if not go_on:
        _refuse_tasks_of_others(settings, files)
    if not go_on or count_tasks(files.tasks) < limit:
        write_tasks(files.tasks, make_tasks(settings.agent.env, limit, settings.seed), go_on=go_on)
    return begin_check_of(settings, files.shown_tasks, files.tasks)


def _refuse_tasks_of_others(settings: CollectSettings, files: CollectionFiles) -> None:
    """A file that was there before any collection is somebody's: no tasks are written over it."""
    if files.tasks.exists() and not files.manifest.exists():
        refuse_other_tasks(files.shown_tasks, files.tasks, make_tasks(settings.agent.env, 1, settings.seed))


def _limit_of_own_tasks(settings: CollectSettings) -> int:
    if settings.limit is None:
        raise UsageError(
            "input_jsonl_fpath is missing; add it, or limit=N for tasks of the environment's own"
        )
    return settings.limit


def outlook(settings: CollectSettings, files: CollectionFiles) -> Outlook:
    """How much there is to do; refuses what `prepare` would refuse."""
    _refuse_paths(settings, files)
    old = _last_manifest(settings, files)
    own = None
    if settings.input_jsonl_fpath is None:
        own = _limit_of_own_tasks(settings) * settings.num_repeats
        next(make_tasks(settings.agent.env, 1, settings.seed), None)
        if not (_has_results(files) and files.tasks.exists()):
            _refuse_tasks_of_others(settings, files)
            return Outlook(str(files.shown), own, 0, own)
    check = begin_check(settings) or begin_check_of(settings, files.shown_tasks, files.tasks)
    plan = _plan(settings, check)
    same_input = _compare(settings, files, plan, _manifest(settings, files), old)
    done = _done(files, plan, same_input=same_input).count
    planned = own or plan.expected
    return Outlook(str(files.shown), planned, done, planned - done)
