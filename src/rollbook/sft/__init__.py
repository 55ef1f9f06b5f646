"""Supervised fine-tuning: a job on the training core.

The package is the job itself, too: `rollbook.sft("config.yaml", "training.learning_rate=1e-5")`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


class _Job(ModuleType):
    def __call__(
        self,
        config: str | Path,
        *words: str,
        artifacts: str | Path = "artifacts",
        resume: bool = False,
        overwrite: bool = False,
        log: Callable[[str], None] = print,
    ) -> dict[str, Any]:
        """Fine-tune in this process as a config file says, with `key=value` words on top of it; returns what
        is in train_results.json.
        """
        from rollbook.errors import UsageError
        from rollbook.sft.settings import load_settings
        from rollbook.sft.train import train

        if resume and overwrite:
            raise UsageError("resume continues a run and overwrite starts over; choose one")
        settings = load_settings(Path(config), words)
        if settings.engine != "rollbook":
            raise UsageError(f"engine: {settings.engine} is a program of its own; type rollbook sft {config}")
        return train(settings, Path(artifacts), resume=resume, overwrite=overwrite, log=log)


sys.modules[__name__].__class__ = _Job
