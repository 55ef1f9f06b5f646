"""`rollbook collect`: every (task, repeat) of an input exactly once, resumable at any point."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, print_json
from rollbook.cli.output import printable
from rollbook.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.live import Live

    from rollbook.collect.collect import DryRun
    from rollbook.collect.settings import CollectSettings
    from rollbook.records.progress import Progress
    from rollbook.runs.jobs.job import Job

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
INCOMPLETE, INTERRUPTED = 3, 130
_LINE_EVERY_S = 10.0
_SETTINGS = """Settings, as key=value or in a YAML file:

agent_name, agents, input_jsonl_fpath (without it, the environment makes its own tasks), output_jsonl_fpath, \
limit, num_repeats, num_repeats_add_seed, seed, responses_create_params.KEY (temperature and the like); \
columns.prompt, columns.answer and the like name the columns of an ordinary dataset.

How fast: num_samples_in_parallel (128), adaptive, requests_per_minute, tokens_per_minute, workers, engine \
(local or ray), ray_address. When to stop: stop_after, drain_for (10m), rollout_timeout_s, call_timeout_s, \
max_failure_rate (0.5) of at least min_samples (100).

Attempts for each kind of failure: retry.connect, transport, timeout, rate_limit, server_error, \
invalid_request, bad_answer, environment, judge, worker_lost; retry.first_wait_s, \
retry.longest_wait_s, retry.longest_retry_after_s.

Also: resume, ordered, prices.input and prices.output (for a million tokens).

Exit codes: 0 complete, 1 error, 2 refused before anything was sent, 3 something is missing, 130 stopped."""


@app.command(epilog=_SETTINGS)
def collect(
    words: Annotated[
        list[str] | None, typer.Argument(help="a YAML file, then key=value; a leading + is fine")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="where the agents are; rollbook.yaml by default")
    ] = None,
    resume: Annotated[
        Literal["never", "if-possible", "always"] | None,
        typer.Option(help="when the output exists; if-possible by default"),
    ] = None,
    stop_after: Annotated[str | None, typer.Option(help="drain after this long: 3h50m")] = None,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="put the finished output into input order")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="its name in the history; by default that of the output")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="leave it running and return")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check everything, say what is left to do, send nothing")
    ] = False,
    artifacts: Artifacts = ARTIFACTS,
    as_json: AsJson = False,
) -> None:
    """Collect rollouts: +agent_name=... +input_jsonl_fpath=... +output_jsonl_fpath=... and more."""
    from rollbook.collect.settings import load_settings, misspelled_params

    given = list(words or [])
    given += [f"resume={resume}"] if resume else []
    given += [f"stop_after={stop_after}"] if stop_after else []
    given += ["ordered=true"] if ordered else []
    if not given:
        raise UsageError(
            "nothing to collect; add agent_name=... input_jsonl_fpath=... output_jsonl_fpath=..."
        )
    settings = load_settings(given, config=config)
    for line in misspelled_params(settings.responses_create_params):
        _log(line)
    if dry_run:
        _print_dry_run(settings, as_json)
        return
    called = _run_name(name, Path(settings.output_jsonl_fpath))
    command = ["rollbook", "collect", *([f"--config={config}"] if config else []), *given]
    from rollbook.collect.history import job_of

    job = job_of(settings, command, name=called, artifacts=artifacts)
    if detach:
        _checked_plan(settings, is_to_begin=True)  # what is refused is refused here, where somebody looks
        _leave_running(job, as_json)
    else:
        _stay(settings, job, as_json)


def _stay(settings: CollectSettings, job: Job, as_json: bool) -> None:
    from rollbook.collect.collect import collect as run_collection
    from rollbook.collect.files import CollectionFiles
    from rollbook.collect.history import recorded

    _allow_many_connections()
    try:
        # What an environment prints is for people: stdout holds the result alone, as with workers.
        with recorded(job, _log) as history, redirect_stdout(sys.stderr), _Display(quiet=as_json) as show:
            progress = run_collection(
                settings,
                log=_log,
                on_progress=show,
                on_start=history.began,
                on_end=lambda progress: history.ended(progress, _exit_code(progress)),
            )
    except Interrupted:
        _log("stopped at once; rerun the same command to resume")
        sys.exit(INTERRUPTED)
    if as_json:
        print_json(progress)
    else:
        files = CollectionFiles(Path(settings.output_jsonl_fpath))
        failures = files.shown.with_name(files.failures.name)
        print(_summary(progress, failures, ordered=settings.ordered))
    sys.exit(_exit_code(progress))


def _exit_code(progress: Progress) -> int:
    return 0 if progress.missing == 0 else INCOMPLETE


def _allow_many_connections() -> None:
    """A process may have only so many files open, connections among them, fewer than anyone may ask for."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _leave_running(job: Job, as_json: bool) -> None:
    import msgspec

    from rollbook.cli.launched import start_detached
    from rollbook.runs.children import python_command

    job = msgspec.structs.replace(job, command=python_command("rollbook", *job.command[1:]))
    start_detached(job, as_json, on_stop="what is in flight may finish")


def _checked_plan(settings: CollectSettings, *, is_to_begin: bool = False) -> DryRun:
    from rollbook.collect.collect import dry_run

    with redirect_stdout(sys.stderr):  # for what an environment prints
        return dry_run(settings, is_to_begin=is_to_begin)


def _print_dry_run(settings: CollectSettings, as_json: bool) -> None:
    plan = _checked_plan(settings)
    if as_json:
        print_json(plan)
        return
    print(
        f"{plan.output}: {plan.planned} rollouts planned, {plan.done} done, "
        f"{plan.missing} missing; nothing was sent"
    )


def _run_name(name: str | None, output: Path) -> str:
    """A name that commands about runs can be given; that of the output is made to fit."""
    if name is None:
        stem = output.stem.replace("@", "_").strip() or "collection"
        return f"{stem}_" if stem == "latest" else stem
    if not name.strip() or name == "latest" or "@" in name:
        raise UsageError(f"{name!r} cannot name a run; use a word without @, and not 'latest'")
    return name


def _log(text: str) -> None:
    with suppress(OSError):  # a `| tee log` that Ctrl-C ended, too, must not keep us from draining
        print(printable(text), file=sys.stderr, flush=True)


def _summary(progress: Progress, failures: Path, *, ordered: bool) -> str:
    from rollbook.cli.progress_lines import progress_lines

    lines = [f"{progress.output}: {progress.status}", *(f"  {line}" for line in progress_lines(progress))]
    if progress.failed:
        lines.append(f"  rollouts that ran out of retries are listed in {failures}")
    if progress.missing and ordered:
        lines.append("  not in input order yet: that waits until nothing is missing")
    if progress.missing:
        lines.append(f"  {f'{progress.reason}; ' if progress.reason else ''}rerun the same command to resume")
    return printable("\n".join(lines))


class _Display:
    """A bar on a terminal, a line every ten seconds in a log."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._live: Live | None = None
        self._last = -_LINE_EVERY_S

    def __enter__(self) -> Callable[[Progress], None]:
        if self._quiet:
            return lambda _: None
        if sys.stderr.isatty():
            from rich.live import Live

            from rollbook.cli.output import console

            self._live = Live(console=console(stderr=True), auto_refresh=False, transient=True)
            self._live.__enter__()
            return self._draw
        return self._line

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def _draw(self, progress: Progress) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        from rollbook.cli.progress_lines import progress_line

        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            ProgressBar(total=max(1, progress.expected), completed=progress.done, width=40),
            progress_line(progress),
        )
        if self._live is not None:
            self._live.update(grid, refresh=True)

    def _line(self, progress: Progress) -> None:
        if progress.status == "running" and (progress.elapsed_s or 0.0) - self._last < _LINE_EVERY_S:
            return
        from rollbook.cli.progress_lines import progress_line

        self._last = progress.elapsed_s or 0.0
        _log(progress_line(progress))
