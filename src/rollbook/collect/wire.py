"""How items and outcomes cross from process to process: MessagePack, in pipes behind four bytes of length."""

from __future__ import annotations

import asyncio
import struct

import msgspec

from rollbook.collect.rows import Item, Outcome

_LENGTH = struct.Struct("<I")
encode = msgspec.msgpack.encode
decode_items = msgspec.msgpack.Decoder(list[Item]).decode
decode_outcomes = msgspec.msgpack.Decoder(list[Outcome]).decode


def frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def items_frame(items: list[Item]) -> bytes:
    return frame(encode(items))


def outcomes_frame(outcomes: list[Outcome]) -> bytes:
    return frame(encode(outcomes))


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
