"""Messages between a process and its children: bytes behind four bytes of length, in pipes."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from typing import BinaryIO

from rollbook.errors import RollbookError
from rollbook.runs.children import python_command

_LENGTH = struct.Struct("<I")
_LOOK_EVERY_S = 0.5


def frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def read_frame(file: BinaryIO) -> bytes | None:
    """The next message; None when the other side is gone, even in the middle of one."""
    header = file.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    data = file.read(length)
    return data if len(data) == length else None


async def receive_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The same from a stream."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        return await reader.readexactly(_LENGTH.unpack(header)[0])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class Child:
    """A Python child that gets messages through its stdin and sends others through its stdout."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._watch = asyncio.ensure_future(self._end_its_output())

    @classmethod
    async def start(cls, module: str, *arguments: str, quiet: bool = False) -> Child:
        """`quiet`: what it prints is thrown away. Ctrl-C is for this process, which says what follows."""
        try:
            process = await asyncio.create_subprocess_exec(
                *python_command(module, *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL if quiet else None,
                start_new_session=quiet,
            )
        except OSError as error:
            raise RollbookError(f"a process cannot be started: {error.strerror or error}") from error
        return cls(process)

    def send(self, data: bytes) -> None:
        if not self._stdin.is_closing():
            self._stdin.write(frame(data))

    async def receive(self) -> bytes | None:
        """The next message; None when the process has ended."""
        return await receive_frame(self._stdout)

    async def end(self, patience_s: float = 0.0) -> int:
        """Close its input, wait for its end, and kill it after a while.

        Returns its exit code; that of a process that died of a signal is the signal's number, negative.
        """
        self._stdin.close()
        if patience_s:
            await self._wait(patience_s)
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._wait()
        self._watch.cancel()
        return self._process.returncode or 0

    async def _wait(self, seconds: float | None = None) -> None:
        if self._process.returncode is None:
            exited = asyncio.ensure_future(self._process.wait())
            await asyncio.wait([exited, self._watch], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            exited.cancel()

    async def _end_its_output(self) -> None:
        """A process that the child forked may hold its output open, for as long as that one lives."""
        while self._process.returncode is None:  # noqa: ASYNC110 (asyncio's own wait, too, waits for pipes)
            await asyncio.sleep(_LOOK_EVERY_S)
        await asyncio.sleep(_LOOK_EVERY_S)  # for what it had written
        self._stdout.feed_eof()
