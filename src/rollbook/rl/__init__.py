"""Reinforcement learning: settings, the loop, and what only this job needs.

The package is the job itself, too: `rollbook.rl("config.yaml", "iterations=10")`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollbook.rl.train import RlResult
    from rollbook.train.losses import Loss


class _Job(ModuleType):
    def __call__(
        self,
        config: str | Path | Mapping[str, Any],
        *words: str,
        loss: Loss | None = None,
        resume: bool = False,
        overwrite: bool = False,
        log: Callable[[str], None] = print,
    ) -> RlResult:
        """Train in this process as a config says (a file or a mapping), with `key=value` words on top of it.

        `loss` is an object of a loss of your own (`rollbook.train.losses.Loss`), in place of the config's.
        """
        from rollbook.errors import UsageError
        from rollbook.rl.settings import load_settings
        from rollbook.rl.train import train
        from rollbook.runs.start import START_OVER

        if resume and overwrite:
            raise UsageError("resume continues a run and overwrite starts over; choose one")
        settings = load_settings(Path(config) if isinstance(config, str) else config, words, loss=loss)
        return train(settings, resume=START_OVER if overwrite else resume, log=log)


sys.modules[__name__].__class__ = _Job
