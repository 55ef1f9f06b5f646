"""What the collector hands out, and what comes back: the messages between it and its workers."""

from __future__ import annotations

import msgspec

from rollbook.records.turns import Usage
from rollbook.rollouts.limits import Spent
from rollbook.rollouts.types import Completion, Episode, FailureKind, RolloutFailure

# A number past 64 bits, half a character, an object of somebody's own.
_ENCODE_ERRORS = (OverflowError, TypeError, ValueError, msgspec.MsgspecError, RecursionError)


class Line(msgspec.Struct):
    """A finished rollout."""

    data: bytes
    reward: float
    usage: Usage | None  # None: the server did not count the tokens, or not those of every turn
    spent: Spent


class Failure(msgspec.Struct):
    """What is known of an attempt that failed."""

    kind: FailureKind
    message: str
    status: int | None = None
    retry_after: float | None = None
    response: bytes = b""  # what was said until then, as JSON
    usage: Usage = msgspec.field(default_factory=Usage)  # what that cost, unless the reply is kept
    reply: Completion | None = None  # that only has to be judged again


class Item(msgspec.Struct, frozen=True):
    """One (task, repeat) to be done."""

    row: int
    repeat: int
    task_id: str
    line: bytes  # the row as in the input
    unjudged: Failure | None = None  # an attempt whose reply only has to be judged again
    alone: bool = False  # in a process that does nothing else: it may be what takes processes down


class Attempted(RolloutFailure):
    """A failure as `run_all` takes it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(
            failure.kind, failure.message, status=failure.status, retry_after=failure.retry_after
        )
        self.kept = failure
        self.episode = Episode([], counted=failure.usage)


class Answer(msgspec.Struct):
    """What became of an item."""

    row: int
    repeat: int
    line: Line | None = None
    failure: Failure | None = None

    def result(self) -> Line:
        if self.line is None:
            assert self.failure is not None
            raise Attempted(self.failure)
        return self.line


def encode_answer(answer: Answer) -> bytes:
    """An answer that cannot be sent is a failure of its rollout."""
    try:
        return msgspec.msgpack.encode(answer)
    except _ENCODE_ERRORS as error:
        why = f"its result cannot be sent to the collector ({type(error).__name__}: {error})"
        return msgspec.msgpack.encode(
            Answer(answer.row, answer.repeat, failure=Failure(FailureKind.ENVIRONMENT, why))
        )


decode_answer = msgspec.msgpack.Decoder(Answer).decode
encode_item = msgspec.msgpack.encode
decode_item = msgspec.msgpack.Decoder(Item).decode
