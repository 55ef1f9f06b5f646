"""A process with several writers is killed again and again; whatever it acknowledged is there, whole, once.

SIGKILL leaves the page cache alone, so every other kill is followed by what a power cut may do on top of it:
the file loses an arbitrary part of what was never acknowledged, or ends in a run of NUL bytes.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from faults.harness import ACKS, POLICIES, Victim, identity_of, make_line, seeded
from rollbook.records.jsonl import JsonlWriter, Line, read_lines
from rollbook.records.tail import Tail

BIG_ENOUGH = 6_000_000


@dataclass
class Followed:
    """One file: what was acknowledged, what a follower has seen, and the bytes that must never change."""

    path: Path
    acknowledged: set[str] = field(default_factory=set)
    durable: int = 0
    prefix: bytes = b""
    known: list[str] = field(default_factory=list)  # the identities of the lines in `prefix`
    consumed: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tail = Tail(self.path, max_bytes=1 << 16)

    def follow(self) -> bool:
        batch = self.tail.poll()
        if batch.restarted:
            self.consumed.clear()
        self.consumed += batch.lines
        return batch.more

    def verify(self) -> None:
        while self.follow():
            pass
        lines = list(read_lines(self.path)) if self.path.exists() else []
        assert self.consumed == lines, f"{self.path.name}: a follower sees something else than a reader"
        content = self.path.read_bytes() if self.path.exists() else b""
        assert content.startswith(self.prefix), f"{self.path.name}: bytes that were durable have changed"
        present = self.known + [identity_of(line.data) for line in lines[len(self.known) :]]
        assert len(present) == len(set(present)), f"{self.path.name}: a line is there twice"
        missing = self.acknowledged.difference(present)
        assert not missing, (
            f"{self.path.name}: {len(missing)} acknowledged lines are lost: {sorted(missing)[:5]}"
        )
        self.prefix = content[: self.durable]
        self.known = present[: self.prefix.count(b"\n")]

    def lose_power(self, choose: random.Random) -> None:
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            size = file.seek(0, 2)
            file.truncate(choose.randint(self.durable, size))
            if choose.random() < 0.3:
                file.seek(0, 2)
                file.write(b"\0" * choose.randrange(1, 5000))

    def reopen(self, identity: str) -> None:
        with JsonlWriter(self.path, sync=POLICIES[self.path.name]) as writer:
            assert writer.position == self.path.stat().st_size
            self.durable = writer.append(make_line(identity, 50))
        self.acknowledged.add(identity)

    def start_over(self) -> None:
        self.path.unlink()
        self.acknowledged.clear()
        self.durable, self.prefix, self.known = 0, b"", []


@dataclass
class Campaign:
    directory: Path
    choose: random.Random
    acks_read: int = 0
    torn: int = 0
    acknowledged: int = 0

    def __post_init__(self) -> None:
        self.files = {name: Followed(self.directory / name) for name in POLICIES}

    def kill_one(self, number: int) -> None:
        fork = ["fork"] if self.choose.random() < 0.3 else []
        with Victim(
            "writing_process.py", self.directory, number, self.choose.randrange(2**32), *fork
        ) as victim:
            self.let_work(victim)
            victim.kill()
            self.read_acknowledgements()
            self.count_torn_tails()
            self.verify()
            if self.choose.random() < 0.5:
                for file in self.files.values():
                    file.lose_power(self.choose)
                self.verify()
            if fork or self.choose.random() < 0.3:  # else the next victim is the one that repairs
                for file in self.files.values():
                    file.reopen(f"r{number}-{file.path.stem}-reopened")
                self.verify()
        big = self.files["big.jsonl"]
        if big.path.exists() and big.path.stat().st_size > BIG_ENOUGH:
            big.start_over()

    def let_work(self, victim: Victim) -> None:
        if self.choose.random() < 0.15:
            time.sleep(self.choose.uniform(0, 0.25))  # it may still be starting, locking or repairing
            return
        victim.wait_until_ready()
        end = time.monotonic() + self.choose.uniform(0, 0.15)
        while time.monotonic() < end:
            for file in self.files.values():
                file.follow()
            time.sleep(0.002)

    def read_acknowledgements(self) -> None:
        path = self.directory / ACKS
        if not path.exists():
            return
        for line in read_lines(path, start=self.acks_read):
            name, identity, end = line.data.decode().split()
            self.files[name].acknowledged.add(identity)
            self.files[name].durable = max(self.files[name].durable, int(end))
            self.acks_read = line.end
            self.acknowledged += 1
        with path.open("r+b") as file:
            file.truncate(self.acks_read)  # a kill in the middle of a note: nothing was promised

    def count_torn_tails(self) -> None:
        for file in self.files.values():
            if file.path.exists() and file.path.stat().st_size:
                self.torn += not file.path.read_bytes().endswith(b"\n")

    def verify(self) -> None:
        for file in self.files.values():
            file.verify()


def kill_many(directory: Path, kills: int) -> None:
    with seeded("killed writers") as choose:
        campaign = Campaign(directory, choose)
        for number in range(kills):
            try:
                campaign.kill_one(number)
            except BaseException as error:
                error.add_note(f"at kill {number}, in {directory}")
                raise
        assert campaign.acknowledged > kills, "the victims hardly did anything"
        print(
            f"{kills} kills, {campaign.acknowledged} lines acknowledged, {campaign.torn} torn tails repaired"
        )


def test_twelve_kills(tmp_path: Path) -> None:
    kill_many(tmp_path, 12)


@pytest.mark.faults
def test_two_hundred_kills(tmp_path: Path) -> None:
    kill_many(tmp_path, 200)
