"""`rollbook data COMMAND ...`: from rollouts to datasets."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from rollbook.cli.dispatch import dispatch

# name -> what it does; the function of the same name is in `commands`.
COMMANDS = {
    "merge": "any number of files into one, checked: count, uniqueness, coverage, no torn line",
    "mix": "target shares of several sources, sampled and shuffled",
    "filter": "the rows for which a condition in SQL holds",
    "split": "train, validation and so on, by task",
    "dedup": "without repeated rows, exact or near",
    "sample": "a uniform sample of rows",
    "stats": "counts, means and quantiles, with the coverage beside every mean",
    "profile": "per task: pass rate, pass@k, reward, lengths; also a curriculum by pass rate",
    "sft": "rollouts as chat messages to learn from",
    "pairs": "preference pairs within each task",
    "rl": "task rows with their pass rates",
    "reverify": "grade stored responses again, without the model",
}
_ABOUT = """\
From rollouts to datasets. Inputs are files, directories or globs; the output's ending is
its format (.jsonl, .jsonl.zst, .parquet), and <output>_manifest.json says how it was made."""


def app(*, args: list[str], prog_name: str, help_option_names: list[str]) -> None:
    with tidy_end():
        dispatch(
            args,
            COMMANDS,
            load=lambda name: getattr(import_module("rollbook.cli.data.commands"), name),
            program=prog_name,
            about=_ABOUT,
        )


@contextmanager
def tidy_end() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the temporary files, which may be large, are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    got: list[int] = []

    def end(number: int, _: object) -> None:
        got.append(number)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except RuntimeError:
        if got:  # DuckDB makes "Query interrupted" of whatever a signal raises
            raise SystemExit(128 + got[0]) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
