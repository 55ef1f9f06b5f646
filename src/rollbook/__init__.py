"""Rollbook records the post-training loop of a language model, from the run down to each token.

Writing: `Run`, `Trajectory`, `Step`, `logtree`. Reading: `open_run`, `query`, `audit`, `lineage`. Jobs:
`collect`, `sft`, `rl`; `replay` takes a recorded step again. Names load on first use, so importing the
package costs nothing and reading a run never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollbook.version import __version__

if TYPE_CHECKING:
    from rollbook import audit, collect, query, rl, sft
    from rollbook.errors import RollbookError
    from rollbook.records import logtree
    from rollbook.records.rollouts import Step, Trajectory
    from rollbook.rl.replay.replay import replay
    from rollbook.runs.lineage import lineage
    from rollbook.runs.reader import RunReader, open_run
    from rollbook.runs.run import Run

__all__ = [
    "RollbookError",
    "Run",
    "RunReader",
    "Step",
    "Trajectory",
    "__version__",
    "audit",
    "collect",
    "lineage",
    "logtree",
    "open_run",
    "query",
    "replay",
    "rl",
    "sft",
]

_MODULES = {
    "audit": "rollbook.audit",
    "collect": "rollbook.collect",
    "logtree": "rollbook.records.logtree",
    "query": "rollbook.query",
    "rl": "rollbook.rl",
    "sft": "rollbook.sft",
}
_HOMES = {
    "RollbookError": "rollbook.errors",
    "Run": "rollbook.runs.run",
    "RunReader": "rollbook.runs.reader",
    "Step": "rollbook.records.rollouts",
    "lineage": "rollbook.runs.lineage",
    "Trajectory": "rollbook.records.rollouts",
    "open_run": "rollbook.runs.reader",
    "replay": "rollbook.rl.replay.replay",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'rollbook' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
