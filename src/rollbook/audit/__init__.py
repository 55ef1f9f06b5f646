"""Audits: proof that the books of a run or a collection balance, from its files alone.

The package is the job itself, too: `rollbook.audit("runs/a")`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollbook.audit.result import Audit


class _Job(ModuleType):
    def __call__(
        self,
        thing: str | Path,
        *,
        input: str | Path | None = None,
        verify: bool = False,
        advance: Callable[[int], None] = lambda _: None,
    ) -> Audit:
        """Audit a run directory or the output of a collection. Nothing is written.

        `input` is the file that was collected from, where it is no longer where it was. `verify` reads every
        checkpoint and compares its digests. `advance` is called with the number of bytes just read.
        """
        from rollbook.audit.find import find_thing

        return find_thing(Path(thing).expanduser()).audit(
            input=None if input is None else Path(input), verify=verify, advance=advance
        )


sys.modules[__name__].__class__ = _Job
