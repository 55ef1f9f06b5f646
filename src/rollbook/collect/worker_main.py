"""A worker process: reads items from stdin, does them, writes answers to stdout. It ends with its input.

Its one argument is the process id of the collector, whose death it does not outlive, whatever it is at. What
an environment prints must not end up between the answers, so stdout becomes stderr for everybody else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress

from rollbook.collect.items import Item, decode_item, encode_answer
from rollbook.collect.loop import run_in_loop
from rollbook.collect.rollout import Rollouts, rollouts_here
from rollbook.collect.settings import decode_settings
from rollbook.errors import RollbookError
from rollbook.runs.children import die_with
from rollbook.runs.frames import frame, receive_frame


async def _work(output: int) -> None:
    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    data = await receive_frame(reader)
    if data is None:
        return
    rollouts = rollouts_here(decode_settings(data))
    _write(output, b"")  # ready: a death before this is nobody's rollout's failure
    running: set[asyncio.Task[None]] = set()
    while (data := await receive_frame(reader)) is not None:
        task = asyncio.ensure_future(_do(decode_item(data), rollouts, output))
        running.add(task)
        task.add_done_callback(running.discard)
    for task in running:  # the collector closed our input: nobody waits for these any more
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await rollouts.close()


async def _do(item: Item, rollouts: Rollouts, output: int) -> None:
    try:
        _write(output, encode_answer(await rollouts.answer(item)))
    except RollbookError as error:  # the policy is gone, and this worker is of no more use
        print(f"rollbook: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _write(output: int, data: bytes) -> None:
    rest = memoryview(frame(data))
    with suppress(BrokenPipeError):  # the collector is gone; our input ends too, and we with it
        while rest:
            rest = rest[os.write(output, rest) :]


def main() -> None:
    # Our input ends with the collector, but while an environment holds us up we would not hear of that.
    if len(sys.argv) > 1 and not die_with(int(sys.argv[1])):
        sys.exit("rollbook: the collector of this worker is gone")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the collector decides when to stop, and says so by closing
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        run_in_loop(_work(output))
    except RollbookError as error:  # settings that cannot work, said once by each of us
        sys.exit(f"rollbook: {error}")


if __name__ == "__main__":
    main()
