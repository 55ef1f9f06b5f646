"""Makes a command of a verb: adds the options that all have, shows progress, prints the result."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from rollbook.cli.common import AsJson, print_json
from rollbook.cli.data.results import summary, warn

Call = Callable[..., Any]  # takes `progress`, and `overwrite` where there is an output
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace an output that is there")]


def verb(
    label: str,
    *,
    lines: Callable[[Any], Sequence[str]] = lambda made: (),
    exit_code: Callable[[Any, Mapping[str, Any]], int] = lambda made, options: 0,
    has_output: bool = True,
) -> Callable[[Callable[..., Call]], typer.Typer]:
    """`label` is shown with the progress; `lines` gives what is printed of the result besides its counts."""

    def decorate(options_of: Callable[..., Call]) -> typer.Typer:
        @wraps(options_of)
        def command(*, as_json: bool, overwrite: bool = False, **options: Any) -> None:
            from rollbook.cli.output import byte_progress, printable

            call = options_of(**options)
            given = {"overwrite": overwrite} if has_output else {}
            with byte_progress(label, quiet=as_json) as progress:
                made = call(progress=progress, **given)
            if has_output:
                warn(made)
            if as_json:
                print_json(made)
            else:
                for line in [*(summary(made) if has_output else ()), *lines(made)]:
                    print(printable(line))
            if code := exit_code(made, options):
                sys.exit(code)

        added = {"overwrite": Overwrite, "as_json": AsJson} if has_output else {"as_json": AsJson}
        _add_options(command, added)
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(command)
        return app

    return decorate


def _add_options(command: Callable[..., None], added: dict[str, Any]) -> None:
    """Typer reads the options of a command from its signature."""
    hints = get_type_hints(command, include_extras=True) | added
    parameters = [
        *inspect.signature(command).parameters.values(),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False) for name in added),
    ]
    command.__annotations__ = {one.name: hints[one.name] for one in parameters}
    typed = [one.replace(annotation=hints[one.name]) for one in parameters]
    command.__signature__ = inspect.Signature(typed)  # type: ignore[attr-defined]
