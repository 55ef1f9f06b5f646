"""A finished run hands its result to the next one through the config file they share."""

from rollbook.runs.handoff.block import (
    HandoffOutput,
    HandoffResult,
    HandoffState,
    path_from,
    publish,
    read_handoff,
    resolve_checkpoint,
)
from rollbook.runs.handoff.splice import set_paths

__all__ = [
    "HandoffOutput",
    "HandoffResult",
    "HandoffState",
    "path_from",
    "publish",
    "read_handoff",
    "resolve_checkpoint",
    "set_paths",
]
