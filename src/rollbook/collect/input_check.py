"""The check of an input: where there are several cores, under way in another process while this one loads."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rollbook.collect.input_rows import Agents, Checked, needed_field
from rollbook.collect.standby import standby_checker
from rollbook.errors import UsageError

if TYPE_CHECKING:
    from rollbook.collect.settings import CollectSettings
    from rollbook.forked import Standby

_SHOWN_ERRORS = 20
_COMPRESSED = {b"\x1f\x8b": "zcat", b"BZh": "bzcat", b"\xfd7zXZ": "xzcat", b"\x28\xb5\x2f\xfd": "zstdcat"}


class InputCheck:
    """A check that goes on, if it can, while this process does something else first."""

    def __init__(
        self,
        path: Path,
        limit: int | None,
        *,
        file: Path | None = None,
        agents: Agents | None = None,
        checker: Standby[Checked] | None = None,
    ) -> None:
        """`path` is for people, as it was typed; `file` is where it is, unless it is there."""
        self.path = path
        self.file = file or path.absolute()  # for good: an environment may go to another directory
        self._checker = checker or standby_checker()
        try:
            _refuse_what_is_no_text(path, self.file)
        except UsageError:
            self._checker.close()
            raise
        self._checker.begin(self.file, limit, agents or Agents())

    def result(self) -> Checked:
        """Of an input that can be used; everything that is wrong with it is refused together."""
        try:
            found = self._checker.result()
        except OSError as error:
            raise unreadable(self.path, error) from None
        if found.problems:
            raise UsageError(all_problems(self.path, found.problems))
        if not found.hashes:
            raise UsageError(f"{self.path} has no rows")
        return found

    def close(self) -> None:
        """Let go of it, whether it is done or not."""
        self._checker.close()


def begin_check(settings: CollectSettings, checker: Standby[Checked] | None = None) -> InputCheck | None:
    """The check of an input, which takes a while, begun; None where the tasks are not made yet."""
    if settings.input_jsonl_fpath is None:
        return None
    return begin_check_of(settings, Path(settings.input_jsonl_fpath), checker=checker)


def begin_check_of(
    settings: CollectSettings, path: Path, file: Path | None = None, checker: Standby[Checked] | None = None
) -> InputCheck:
    others = frozenset(settings.agents) - {settings.agent_name}
    agents = Agents(settings.agent_name, others, needed_field(settings.agent.env))
    return InputCheck(path, settings.limit, file=file, agents=agents, checker=checker)


def _refuse_what_is_no_text(path: Path, file: Path) -> None:
    """Pipes, which can be read only once, and compressed files."""
    try:
        if file.is_fifo():
            raise UsageError(
                f"{path} is a pipe, and the input is read more than once; write it to a file first: "
                "... > tasks.jsonl (input_jsonl_fpath)"
            )
        with file.open("rb") as opened:
            begin = opened.read(max(map(len, _COMPRESSED)))
    except OSError:
        return  # told by the check itself
    for magic, command in _COMPRESSED.items():
        if begin.startswith(magic):
            plain = path.with_suffix("") if path.suffix != ".jsonl" else path.with_name(f"plain_{path.name}")
            typed = f"{command} {shlex.quote(str(path))} > {shlex.quote(str(plain))}"
            raise UsageError(f"{path} is compressed; type {typed} (input_jsonl_fpath)")


def unreadable(path: Path, error: OSError) -> UsageError:
    why = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    return UsageError(f"{path}: {why} (input_jsonl_fpath)")


def all_problems(path: Path, problems: list[tuple[int, str]]) -> str:
    """By their lines: the first ones in full, of the others where they stand."""
    listed = [f"{path}:{line}: {text}" for line, text in problems[:_SHOWN_ERRORS]]
    if others := [line for line, _ in problems[_SHOWN_ERRORS:]]:
        listed.append(f"... and {len(others)} more: lines {_runs(others)}")
    count = "1 row" if len(problems) == 1 else f"{len(problems)} rows"
    return "\n  ".join([f"{count} of the input cannot be used, so nothing was sent:", *listed])


def _runs(lines: list[int]) -> str:
    """3, 7-12: rising numbers, those next to each other together."""
    runs: list[tuple[int, int]] = []
    for line in lines:
        if runs and line == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], line)
        else:
            runs.append((line, line))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
