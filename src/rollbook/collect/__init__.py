"""Rollout collection: every (task, repeat) exactly once, whatever happens.

The package is the job itself, too: `rollbook.collect("rollbook.yaml", "agent_name=a", ...)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollbook.records.progress import Progress


class _Job(ModuleType):
    def __call__(
        self,
        config: str | Path,
        *words: str,
        show: Callable[[Progress], None] = lambda _: None,
        log: Callable[[str], None] = print,
    ) -> Progress:
        """Collect in this process as a config file says, with `key=value` words on top of it; returns how it
        stands then. `show` is called with it every second.
        """
        from rollbook.collect.collect import collect
        from rollbook.collect.settings import load_settings

        return collect(load_settings(words, config=Path(config)), log=log, on_progress=show)


sys.modules[__name__].__class__ = _Job
