"""`rollbook collect`: every (task, repeat) of an input exactly once, resumable at any point."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollbook.cli.common import AsJson, duration, number, print_json
from rollbook.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.live import Live

    from rollbook.collect.progress import Progress

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
INCOMPLETE, INTERRUPTED = 3, 130


@app.command()
def collect(
    words: Annotated[
        list[str] | None, typer.Argument(help="a YAML file, then key=value; a leading + is fine")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="where the agents are; rollbook.yaml by default")
    ] = None,
    resume: Annotated[str | None, typer.Option(help="never, if-possible or always")] = None,
    stop_after: Annotated[str | None, typer.Option(help="drain after this long: 3h50m")] = None,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="put the finished output into input order")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Collect rollouts: +agent_name=... +input_jsonl_fpath=... +output_jsonl_fpath=... and more."""
    from rollbook.collect.collector import Interrupted
    from rollbook.collect.collector import collect as run_collection
    from rollbook.collect.settings import load_settings

    given = list(words or [])
    given += [f"resume={resume}"] if resume else []
    given += [f"stop_after={stop_after}"] if stop_after else []
    given += ["ordered=true"] if ordered else []
    if not given:
        raise UsageError(
            "nothing to collect; add agent_name=... input_jsonl_fpath=... output_jsonl_fpath=..."
        )
    settings = load_settings(given, config=config)
    with _Display(quiet=as_json) as show:
        try:
            progress = run_collection(settings, show=show, say=_say)
        except Interrupted:
            _say("stopped at once; type the same command to go on")
            sys.exit(INTERRUPTED)
    if as_json:
        print_json(progress)
    else:
        print(_summary(progress))
    sys.exit(0 if progress.missing == 0 else INCOMPLETE)


def _say(text: str) -> None:
    from rollbook.cli.output import printable

    print(printable(text), file=sys.stderr, flush=True)


def _summary(progress: Progress) -> str:
    reward = (
        f", mean reward {number(progress.reward_mean)} of {progress.reward_count}"
        if progress.reward_count
        else ""
    )
    lines = [
        f"{progress.output}: {progress.done} of {progress.expected} rollouts, {progress.failed} failed, "
        f"{progress.missing} missing{reward}"
    ]
    if progress.failures:
        lines.append(
            "failures by kind: " + ", ".join(f"{kind} {count}" for kind, count in progress.failures.items())
        )
    if progress.missing:
        lines.append((f"{progress.reason}; " if progress.reason else "") + "type the same command to go on")
    return "\n".join(lines)


class _Display:
    """A bar on a terminal, a line every ten seconds in a log."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._live: Live | None = None
        self._last = 0.0

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

        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            ProgressBar(total=max(1, progress.expected), completed=progress.done, width=40),
            _one_line(progress),
        )
        if self._live is not None:
            self._live.update(grid, refresh=True)

    def _line(self, progress: Progress) -> None:
        if progress.status == "running" and progress.elapsed_s - self._last < 10:
            return
        self._last = progress.elapsed_s
        print(_one_line(progress), file=sys.stderr, flush=True)


def _one_line(progress: Progress) -> str:
    parts = [
        f"{progress.done}/{progress.expected}",
        f"{number(progress.rate_per_s)}/s",
        f"{duration(progress.eta_s)} left" if progress.eta_s is not None else progress.status,
        f"{progress.in_flight} in flight",
        f"{progress.output_tokens} tokens",
    ]
    if progress.cost is not None:
        parts.append(f"cost {progress.cost:.2f}")
    if progress.reward_mean is not None:
        parts.append(f"reward {progress.reward_mean:.3f}")
    if progress.failures:
        parts.append("failures " + " ".join(f"{kind}:{count}" for kind, count in progress.failures.items()))
    return ", ".join(parts)
