"""A command of several: find the module of the one that was typed, and only that one.

So the list of commands costs nothing to print, and no command pays for the imports of another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollbook.errors import UsageError

_ALIKE = 0.7  # `histroy` is history; `export` is not plot


def dispatch(
    arguments: list[str],
    commands: Mapping[str, str],
    *,
    load: Callable[[str], Callable[..., object]],
    program: str,
    about: str,
    footer: str = "",
) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help(commands, program, about, footer))
        return
    name, *rest = arguments
    if name not in commands:
        raise UsageError(_unknown(name, commands, program))
    load(name)(args=rest, prog_name=f"{program} {name}", help_option_names=["-h", "--help"])


def _help(commands: Mapping[str, str], program: str, about: str, footer: str) -> str:
    width = max(map(len, commands))
    listed = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in commands.items())
    end = f"{program} COMMAND --help says more; every command has --json."
    return f"usage: {program} COMMAND [ARGUMENTS]\n\n{about}\n\n{listed}\n\n{end}" + (
        f"\n{footer}" if footer else ""
    )


def _unknown(name: str, commands: Mapping[str, str], program: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, commands, n=1, cutoff=_ALIKE)
    hint = f"did you mean `{program} {near[0]}`?" if near else f"type `{program} --help` for the list"
    return f"no command {name!r}; {hint}"
