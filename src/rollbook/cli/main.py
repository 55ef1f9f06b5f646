"""`rollbook COMMAND ...`: finds the command's module and hands over.

Only the chosen command is imported, so `rollbook --help` is instant and reading a run never loads torch.
Errors a user can cause end in one line on stderr and the exit code of their kind; 130 is an interrupt.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from importlib import import_module

from rollbook.cli.dispatch import dispatch
from rollbook.errors import RollbookError, missing_extra
from rollbook.version import __version__

# name -> what it does; the module of the same name below rollbook.cli holds its typer `app`.
COMMANDS = {
    "collect": "collect rollouts: every (task, repeat) exactly once",
    "data": "datasets from rollouts: merge, mix, filter, split, pairs, sft and more",
    "sft": "fine-tune a model, with checkpoints, artifacts and handoff",
    "rl": "train with rewards: sample, compare, learn, and record every token",
    "run": "run any command with a history, a log and a status",
    "status": "the state of the newest run, and what to type next",
    "history": "every run there was; show one, note something on one",
    "logs": "what a run printed; -f follows it",
    "stop": "end a run politely",
    "promote": "publish a checkpoint of any run as the handoff",
    "diff": "what differs between two runs, in config and in numbers",
    "replay": "take a recorded training step again, and name the first thing that differs",
    "query": "SQL over runs and collections: metrics, rollouts, steps, tokens and more",
    "tokens": "what the loss did, token by token: masks, mismatch, what-ifs",
    "lineage": "what a checkpoint, dataset or collection was made from, each link compared",
    "audit": "prove that nothing was lost: every prompt, rollout, turn and token in one place",
    "plot": "the curves of a run as a picture, at any time",
    "demo": "the whole loop on a tiny model: fine-tune, train with rewards, read back",
}

_NOBODY_READS = 141  # as a shell names a program that SIGPIPE ended


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with ExitStack() as opened:
            _clean_terminals(opened)
            _dispatch(arguments)
            sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere
        sys.exit(_NOBODY_READS)
    except RollbookError as error:
        from rollbook.records.printable import printable

        print(printable(f"rollbook: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        print(f"rollbook: {missing}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("rollbook: interrupted", file=sys.stderr)
        sys.exit(130)


def _clean_terminals(opened: ExitStack) -> None:
    """Nothing that was read reaches a terminal as it is, whichever print it goes through, and no secret does.

    A path that is not UTF-8 is no reason to fail, neither there nor in a file.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    for redirect, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
        if stream is not None and (stream.isatty() or stream is sys.stderr):
            from rollbook.records.printable import CleanedStream

            opened.enter_context(redirect(CleanedStream(stream)))


def _dispatch(arguments: list[str]) -> None:
    if arguments and arguments[0] == "--version":
        print(f"rollbook {__version__}")
        return
    dispatch(
        arguments,
        COMMANDS,
        load=lambda name: import_module(f"rollbook.cli.{name}").app,
        program="rollbook",
        about="Runs the post-training loop of a language model and keeps the whole record of it.",
        footer="exit codes: 0 done, 1 error, 2 usage, 3 incomplete (status: running), "
        "4 status: the last run failed, 130 interrupted",
    )
