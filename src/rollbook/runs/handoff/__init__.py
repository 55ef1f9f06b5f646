"""A finished run hands its result to the next one through the config file they share."""

from rollbook.runs.handoff.handoff import (
    HandoffOutput,
    HandoffResult,
    HandoffState,
    path_from,
    publish,
    read_handoff,
    resolve_checkpoint,
)

__all__ = [
    "HandoffOutput",
    "HandoffResult",
    "HandoffState",
    "path_from",
    "publish",
    "read_handoff",
    "resolve_checkpoint",
]
