"""Everything that can be refused, refused before the first request.

The input is checked row by row, the output compared with what it was collected with, and what is done found.
`prepare` first takes the lock, and writes the manifest; `outlook` does the same looking, and touches no file.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollbook.collect.input import Agents, Input, read_input
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
from rollbook.collect.output import Found, find_done
from rollbook.collect.own_tasks import count_tasks, refuse_other_tasks, write_tasks
from rollbook.collect.paths import CollectionFiles
from rollbook.collect.rollout import Rollouts, rollouts_here
from rollbook.collect.settings import CollectSettings
from rollbook.envs.agents import describe_agent, make_tasks
from rollbook.errors import UsageError
from rollbook.records.jsonl import JsonlWriter, every_ms
from rollbook.records.locks import FileLock
from rollbook.records.row_keys import KEY


class Prepared(NamedTuple):
    """A collection that is ready to go: locked, checked, and compared with what is on the disk."""

    rows: Input
    done: Found
    manifest: Manifest
    output: JsonlWriter
    rollouts: Rollouts  # shows that the settings can work; other processes build their own
    keeps_manifest: bool  # of another input than this one, of which there is nothing to do


class Outlook(msgspec.Struct):
    """What a collection would do."""

    output: str
    planned: int
    done: int
    missing: int


def prepare(settings: CollectSettings, files: CollectionFiles, opened: ExitStack) -> Prepared:
    lock = _lock(settings, files, opened)
    old = _last_manifest(settings, files)
    given = settings.input_jsonl_fpath and Path(settings.input_jsonl_fpath).absolute()
    rollouts = rollouts_here(settings)  # before the tasks that its environment makes
    manifest = _manifest(settings, files)
    if settings.input_jsonl_fpath is None:
        _refuse_changes(settings, files, manifest, old, same_input=True)
        _make_own_tasks(settings, files)
    rows = _read_input(settings, files, given)
    same_input = _compare(settings, files, rows, manifest, old)
    output = opened.enter_context(JsonlWriter(files.output, sync=every_ms(50), check=False, lock=lock))
    done = _done(settings, files, rows)
    files.journal.unlink(missing_ok=True)  # of earlier versions
    nothing_to_do = done.count == rows.rows * settings.num_repeats
    if old is not None and nothing_to_do:
        stay_as(old, manifest)
    elif old is not None:
        go_on_from(old, manifest, output.position)
    keeps = old is not None and nothing_to_do and not same_input
    if not keeps:
        write_manifest(files.manifest, manifest)
    return Prepared(rows, done, manifest, output, rollouts, keeps_manifest=keeps)


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
    settings: CollectSettings, files: CollectionFiles, rows: Input, new: Manifest, old: Manifest | None
) -> bool:
    """Whether the input is that of the last session; drift is refused."""
    new.input, new.rows, new.input_sha256, new.input_bytes = (
        str(rows.path),
        rows.rows,
        rows.sha256,
        rows.size,
    )
    if old is None:
        return False
    same_input = rows.begins_with(old.input_bytes, old.input_sha256)
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


def _done(settings: CollectSettings, files: CollectionFiles, rows: Input) -> Found:
    return find_done(files.output, rows, settings.num_repeats) if _has_results(files) else Found()


def _read_input(settings: CollectSettings, files: CollectionFiles, given: Path | str | None) -> Input:
    """`given` is where the input is, if there is one: an environment may have gone to another directory."""
    others = frozenset(settings.agents) - {settings.agent_name}
    agents = Agents(settings.agent_name, settings.agent.env, others)
    path = Path(settings.input_jsonl_fpath or files.shown_tasks)
    return read_input(path, file=Path(given or files.tasks), limit=settings.limit, agents=agents)


def _make_own_tasks(settings: CollectSettings, files: CollectionFiles) -> None:
    """The environment's own tasks, written down for the resume."""
    limit = _limit_of_own_tasks(settings)
    go_on = _has_results(files) and files.tasks.exists()
    if not go_on:
        _refuse_tasks_of_others(settings, files)
    if not go_on or count_tasks(files.tasks) < limit:
        write_tasks(files.tasks, make_tasks(settings.agent.env, limit, settings.seed), go_on=go_on)


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
    rows = _read_input(settings, files, settings.input_jsonl_fpath)
    _compare(settings, files, rows, _manifest(settings, files), old)
    done = _done(settings, files, rows).count
    planned = own or rows.rows * settings.num_repeats
    return Outlook(str(files.shown), planned, done, planned - done)
