"""How items and outcomes cross from process to process: MessagePack, in pipes behind four bytes of length."""

from __future__ import annotations

import asyncio
import struct

import msgspec

from rollbook.collect.rows import Item, Outcome
from rollbook.rollouts.types import FailureKind

_LENGTH = struct.Struct("<I")
# A number past 64 bits, half a character, an object of somebody's own.
_CANNOT_BE_SENT = (OverflowError, TypeError, ValueError, msgspec.MsgspecError, RecursionError)
encode = msgspec.msgpack.encode
decode_items = msgspec.msgpack.Decoder(list[Item]).decode
decode_outcomes = msgspec.msgpack.Decoder(list[Outcome]).decode


def frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def items_frame(items: list[Item]) -> bytes:
    return frame(encode(items))


def encode_outcomes(outcomes: list[Outcome]) -> bytes:
    """An outcome that cannot be sent is a failure, and no reason to hold up the others."""
    try:
        return encode(outcomes)
    except _CANNOT_BE_SENT:
        return encode([_that_can_be_sent(outcome) for outcome in outcomes])


def _that_can_be_sent(outcome: Outcome) -> Outcome:
    try:
        encode(outcome)
    except _CANNOT_BE_SENT as error:
        why = f"its outcome cannot be sent to the collector ({type(error).__name__}: {error})"
        return Outcome(outcome.row, outcome.repeat, failure=FailureKind.ENVIRONMENT, message=why)
    return outcome


def outcomes_frame(outcomes: list[Outcome]) -> bytes:
    return frame(encode_outcomes(outcomes))


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame; None when the other side is gone, be it in the middle of one."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        return await reader.readexactly(_LENGTH.unpack(header)[0])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def read_items(reader: asyncio.StreamReader) -> list[Item] | None:
    data = await read_frame(reader)
    return None if data is None else decode_items(data)


async def read_outcomes(reader: asyncio.StreamReader) -> list[Outcome] | None:
    data = await read_frame(reader)
    return None if data is None else decode_outcomes(data)
