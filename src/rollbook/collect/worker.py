"""A worker process: reads items from stdin, does them, writes outcomes to stdout. It ends with its input.

Its one argument is the process id of the collector, whose death it does not outlive, whatever it is at.

What an environment prints must not end up between the frames, so stdout becomes stderr for everybody else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress

from rollbook.collect.executor import LocalExecutor, cancelled_by_itself, local_executor
from rollbook.collect.loop import event_loop, seldom_collecting_garbage
from rollbook.collect.rows import Item, Outcome
from rollbook.collect.settings import decode_settings
from rollbook.collect.wire import outcomes_frame, read_frame, read_items
from rollbook.errors import RollbookError
from rollbook.forked import die_with


class _Outbox:
    """Outcomes on their way out, as many to a frame as are there."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: list[Outcome] = []

    def put(self, outcome: Outcome) -> None:
        self._waiting.append(outcome)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        outcomes, self._waiting = self._waiting, []
        data = memoryview(outcomes_frame(outcomes))
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except BrokenPipeError:
            return  # the collector is gone; our input ends too, and we with it


async def _do(item: Item, executor: LocalExecutor, outbox: _Outbox) -> None:
    try:
        outcome = await executor.run(item)
    except asyncio.CancelledError:  # at the end of our input, too, when nobody reads it any more
        outcome = cancelled_by_itself(item)
    outbox.put(outcome)


async def _work(output: int) -> None:
    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    data = await read_frame(reader)
    if data is None:
        return
    settings = decode_settings(data)
    executor = local_executor(settings, share=settings.workers)
    with suppress(BrokenPipeError):  # a collector that is gone by now has closed our input too
        os.write(output, outcomes_frame([]))  # ready: a death before this is nobody's rollout's failure
    outbox = _Outbox(output)
    running: set[asyncio.Task[None]] = set()
    while (items := await read_items(reader)) is not None:
        if not items:  # the collector drains
            executor.drain()
        for item in items:
            task = asyncio.ensure_future(_do(item, executor, outbox))
            running.add(task)
            task.add_done_callback(running.discard)
    for task in running:  # the collector closed our input: nobody waits for these any more
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await executor.close()


def main() -> None:
    # Our input ends with the collector, but while an environment holds us up we would not hear of that.
    if len(sys.argv) > 1 and not die_with(int(sys.argv[1])):
        sys.exit("rollbook: the collector of this worker is gone")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the collector decides when to stop, and says so by closing
    output = os.dup(1)
    os.dup2(2, 1)
    with event_loop() as runner, seldom_collecting_garbage():
        try:
            runner.run(_work(output))
        except RollbookError as error:  # settings that cannot work, said once by each of us
            sys.exit(f"rollbook: {error}")


if __name__ == "__main__":
    main()
