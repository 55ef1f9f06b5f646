"""A crew of processes on this machine."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

from rollbook.collect.crew import Crew, Gone, Member
from rollbook.collect.rows import Item, Outcome
from rollbook.collect.settings import CollectSettings, encode_settings
from rollbook.collect.wire import frame, items_frame, read_outcomes
from rollbook.errors import RollbookError
from rollbook.runs.children import python_command

_CLOSE_S, _HURRIED_CLOSE_S = 10.0, 0.5
_LOOK_EVERY_S = 0.5


class WorkerPool(Crew):
    kind, messages = "worker processes", "their messages stand above"

    def __init__(self, settings: CollectSettings) -> None:
        self._settings = frame(encode_settings(settings))
        super().__init__(settings)

    async def _hire(self) -> Member:
        try:
            process = await asyncio.create_subprocess_exec(
                *python_command("rollbook.collect.worker", str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise RollbookError(f"a worker process cannot be started: {error.strerror or error}") from error
        return _Worker(process, self._settings)


class _Worker(Member):
    def __init__(self, process: asyncio.subprocess.Process, settings: bytes) -> None:
        super().__init__()
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._watch = asyncio.ensure_future(self._end_its_output())
        self._write(settings)

    async def prepare(self) -> None:
        await self.outcomes()  # none yet: it says that it has built its environment

    async def outcomes(self) -> list[Outcome]:
        outcomes = await read_outcomes(self._stdout)
        if outcomes is None:
            await self._exit(_CLOSE_S)
            raise Gone(f"its process ended {self._how_it_ended()}")
        return outcomes

    async def close(self) -> None:
        self._stdin.close()
        # One that still holds items is stopped at once, in the middle of them: nobody waits for these.
        await self._exit(_HURRIED_CLOSE_S if self.leases else _CLOSE_S)

    async def dismiss(self) -> None:
        await self._exit(0)
        self._watch.cancel()

    def _deliver(self, items: list[Item]) -> None:
        self._write(items_frame(items))

    def _write(self, data: bytes) -> None:
        if not self._stdin.is_closing():
            self._stdin.write(data)

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        return f"with exit code {code}" if code is not None and code >= 0 else f"of signal {-(code or 0)}"

    async def _exit(self, patience_s: float) -> None:
        """Wait for its end, and bring it about after a while."""
        if self._process.returncode is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), patience_s)
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _end_its_output(self) -> None:
        """A process that it forked may hold its output open, for as long as that one lives."""
        while self._process.returncode is None:  # noqa: ASYNC110 (asyncio's own wait, too, waits for pipes)
            await asyncio.sleep(_LOOK_EVERY_S)
        await asyncio.sleep(_LOOK_EVERY_S)  # for what it had written
        self._stdout.feed_eof()
