"""Rollout collection: every (task, repeat) exactly once, whatever happens.

The package is the job itself, too: `rollbook.collect("rollbook.yaml", "agent_name=a", ...)`, or with objects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollbook.records.progress import Progress
    from rollbook.rollouts.types import EnvironmentProtocol, Policy


class _Job(ModuleType):
    def __call__(
        self,
        config: str | Path | Mapping[str, Any],
        *words: str,
        policy: Policy | type[Policy] | None = None,
        environment: type[EnvironmentProtocol] | None = None,
        show: Callable[[Progress], None] = lambda _: None,
        log: Callable[[str], None] = print,
    ) -> Progress:
        """Collect in this process as a config says (a file or a mapping), with `key=value` words on top of
        it; returns how far it got. `show` is called with it every second.

        `policy` is an object of your own (`rollbook.rollouts.types.Policy`), or a class that is made without
        arguments; `environment` is a class. They take the places of those in the config.
        """
        from rollbook.collect.collect import collect
        from rollbook.collect.own_pieces import take_own
        from rollbook.collect.settings import read_values, settings_of

        given = read_values(words, config=Path(config) if isinstance(config, str) else config)
        values, own = take_own(given, policy, environment)
        return collect(settings_of(values), own=own, log=log, on_progress=show)


sys.modules[__name__].__class__ = _Job
