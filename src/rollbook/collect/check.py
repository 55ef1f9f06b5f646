"""Everything that can be refused, refused before the first request.

The settings must work, the input is checked row by row, the output compared with what it was collected with,
and what is done found. Nothing is written but the tasks of an environment that makes its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from rollbook.collect.files import CollectionFiles
from rollbook.collect.generated_tasks import generate_tasks
from rollbook.collect.input import Input, read_input
from rollbook.collect.input_rows import Agents
from rollbook.collect.loop import run_in_loop
from rollbook.collect.manifest import Manifest, Session, read_manifest, refuse_drift
from rollbook.collect.output import Found, find_done
from rollbook.collect.own_pieces import AgentParts, OwnPieces
from rollbook.collect.rollout import Rollouts, rollouts_here
from rollbook.collect.settings import CollectSettings
from rollbook.envs.agents import describe_agent
from rollbook.errors import UsageError
from rollbook.records.columns import USUAL
from rollbook.records.identity import KEY
from rollbook.records.redact import remember_secrets


class Checked(NamedTuple):
    """A collection that can begin."""

    rows: Input
    done: Found
    manifest: Manifest
    session: Session  # the one to begin
    rollouts: Rollouts  # shows that the settings can work; other processes build their own

    @property
    def expected(self) -> int:
        return self.rows.rows * self.session.repeats

    @property
    def missing(self) -> int:
        return self.expected - self.done.count


def check(
    settings: CollectSettings,
    files: CollectionFiles,
    *,
    own: OwnPieces | None = None,
    tasks_aside: Path | None = None,
) -> Checked:
    """`tasks_aside` is for a dry run: where an environment's own tasks are written instead."""
    manifest = read_manifest(files.manifest)
    last = _last_session(settings, files, manifest)
    own = own or OwnPieces()
    own.check(settings)
    rollouts = rollouts_here(settings, own)
    try:
        manifest = manifest or Manifest(files.manifest, files.output.name)
        return _check(settings, own.agent(settings), files, manifest, last, rollouts, tasks_aside)
    except BaseException:
        run_in_loop(rollouts.close())
        raise


def _check(
    settings: CollectSettings,
    agent: AgentParts,
    files: CollectionFiles,
    manifest: Manifest,
    last: Session | None,
    rollouts: Rollouts,
    tasks_aside: Path | None,
) -> Checked:
    remember_secrets(msgspec.to_builtins(settings))
    session = Session(
        repeats=settings.num_repeats,
        meaning={
            "agent": describe_agent(agent.env, agent.policy, max_turns=agent.max_turns),
            "responses_create_params": settings.responses_create_params,
            "num_repeats_add_seed": settings.num_repeats_add_seed,
        },
        operation={"concurrency": settings.num_samples_in_parallel, "workers": settings.workers},
    )
    if settings.columns != USUAL:
        session.meaning["columns"] = msgspec.to_builtins(settings.columns)
    source = files.input
    if settings.input_jsonl_fpath is None:
        session.meaning["seed"] = settings.seed
        if last is not None and settings.resume != "always":
            refuse_drift(files.shown, last, session, same_input=True)  # before its tasks are written over
        source = generate_tasks(settings, agent.env, files, tasks_aside)
    agents = Agents(settings.agent_name, agent.env, frozenset(settings.agents) - {settings.agent_name})
    rows = read_input(
        files.shown_input, file=source, limit=settings.limit, agents=agents, columns=settings.columns
    )
    session.input, session.rows = str(files.shown_input), rows.rows
    session.input_sha256, session.input_bytes = rows.sha256, rows.size
    if last is not None and settings.resume != "always":
        same_input = rows.begins_with(last.input_bytes, last.input_sha256)
        refuse_drift(files.shown, last, session, same_input=same_input)
    done = find_done(files.output, rows, settings.num_repeats) if files.have_results else Found()
    return Checked(rows, done, manifest, session, rollouts)


def refuse_paths(settings: CollectSettings, files: CollectionFiles) -> None:
    """Refuse an output that is no file, and an input that a collection into this output would write to."""
    if not files.shown.name or (files.output.exists() and not files.output.is_file()):
        raise UsageError(f"output_jsonl_fpath={files.shown} is not a file; write it like rollouts.jsonl")
    mine = (files.output, files.failures, files.manifest, files.progress, files.journal)
    if settings.input_jsonl_fpath is not None and files.input.resolve() in [path.resolve() for path in mine]:
        raise UsageError(
            f"input_jsonl_fpath={settings.input_jsonl_fpath} is a file that a collection into "
            f"{files.shown} writes to; choose another output_jsonl_fpath"
        )


def _last_session(
    settings: CollectSettings, files: CollectionFiles, manifest: Manifest | None
) -> Session | None:
    """The last session that wrote a line, if any; refuses an output that cannot be resumed."""
    other = files.output.with_name((manifest and manifest.output) or files.output.name)
    if other != files.output and other.exists():  # rollouts.json beside rollouts.jsonl
        shared = files.shown.with_name(files.manifest.name)
        raise UsageError(
            f"{shared} belongs to {other.name}, and {files.output.name} would share it; "
            "choose an output_jsonl_fpath that differs before its ending"
        )
    if not files.have_results:
        return None  # whatever a session meant that wrote no line, no row means it
    if settings.resume == "never":
        raise UsageError(
            f"{files.shown} exists; choose another output_jsonl_fpath or resume it with --resume=if-possible"
        )
    if manifest is not None:
        return manifest.session_at(files.output.stat().st_size - 1)
    if not _begins_with_a_key(files.output):
        raise UsageError(
            f"{files.shown} exists and is no output of `rollbook collect`: its first line does not begin "
            f'with {{"{KEY}":; choose another output_jsonl_fpath'
        )
    if settings.resume != "always":
        raise UsageError(
            f"{files.shown} has no manifest, so its settings are unknown; choose another output, or resume "
            "by row keys with --resume=always"
        )
    return None


def _begins_with_a_key(output: Path) -> bool:
    with output.open("rb") as file:
        begin = file.read(1 << 10).lstrip()
    return "".join(begin.decode("utf-8", "replace").split()).startswith(f'{{"{KEY}":')
