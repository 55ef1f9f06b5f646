"""Appends to several files from several threads until it is killed; notes each line only once it is durable.

python writing_process.py DIRECTORY ROUND SEED [fork]
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from harness import ACKS, POLICIES, make_line

from rollbook.records.jsonl import JsonlWriter

THREADS_A_FILE = 3
SMALL_BYTES_A_ROUND = 60_000
BIG_BYTES_A_ROUND = 1_000_000


class Worker(threading.Thread):
    """One thread of one file: appends, waits in one of the ways there are, then acknowledges."""

    def __init__(self, name: str, writer: JsonlWriter, acks: int, seed: int) -> None:
        super().__init__(name=name, daemon=True)
        self.writer, self.acks, self.random = writer, acks, random.Random(seed)
        self.big = writer.path.name == "big.jsonl"
        self.pending: list[tuple[str, int]] = []

    def run(self) -> None:
        written = number = 0
        while True:
            identity = f"{self.name}-{number}"
            line = make_line(identity, self.choose_size(written))
            end = self.writer.append(line)
            self.pending.append((identity, end))
            written += len(line)
            number += 1
            if self.is_durable(end):
                self.acknowledge()

    def choose_size(self, written: int) -> int:
        if self.big and written < BIG_BYTES_A_ROUND:
            return self.random.randrange(200_000, 800_000)
        if written > SMALL_BYTES_A_ROUND:
            time.sleep(0.005)  # files that outgrow the disk cache test something else
            return 0
        return self.random.choice([0, 10, 100, 5_000 if self.random.random() < 0.2 else 200])

    def is_durable(self, end: int) -> bool:
        if self.writer.policy.every_line:
            return True
        if self.writer.policy.interval_ms is not None and self.random.random() < 0.5:
            while self.writer.durable < end:  # left to the background
                time.sleep(0.0005)
            return True
        if self.random.random() < 0.2:
            self.writer.sync()
            return True
        if self.random.random() < 0.3 or len(self.pending) > 8:
            self.writer.wait(end)
            return True
        return False

    def acknowledge(self) -> None:
        told = "".join(f"{self.writer.path.name} {identity} {end}\n" for identity, end in self.pending)
        os.write(self.acks, told.encode())
        self.pending.clear()


def main() -> None:
    directory, round_number, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    signal.alarm(60)  # whoever was to kill it is gone
    acks = os.open(directory / ACKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    writers = [JsonlWriter(directory / name, sync=policy) for name, policy in POLICIES.items()]
    if "fork" in sys.argv and os.fork() == 0:
        sys.stdin.read()  # outlives its parent, as a data-loader worker may
        os._exit(0)
    for writer in writers:
        for thread in range(THREADS_A_FILE):
            Worker(f"r{round_number}-{writer.path.stem}-t{thread}", writer, acks, seed + thread).start()
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
