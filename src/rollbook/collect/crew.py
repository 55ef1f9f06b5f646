"""Rollouts done elsewhere, by a crew; one collector plans, leases and writes.

A member holds a lease on the items it was given and nothing else: it writes no file. When it dies, its leases
are lost outcomes, the scheduler gives the items to others, and a new member takes its place. So the death of
any member at any time costs only what it had in flight. The last attempt at an item that was lost before is
made by a member that does nothing else meanwhile: no item is given up for what its neighbours did. Items that
kill every member they are given to run out of attempts; only members that die before they can take any, one
after the other, end the collection.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod

from rollbook.collect.rows import Item, Outcome
from rollbook.collect.settings import CollectSettings
from rollbook.errors import RollbookError
from rollbook.rollouts.types import FailureKind

_MOST_DEATHS = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0


class Gone(Exception):
    """A member is no more; the text says how it ended."""


class Member(ABC):
    """One process elsewhere, and the items it holds."""

    def __init__(self) -> None:
        self.leases: dict[tuple[int, int], asyncio.Future[Outcome]] = {}
        self.was_given_any = False
        self._outbox: list[Item] = []

    async def run(self, item: Item) -> Outcome:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        self.leases[item.row, item.repeat] = future
        self.was_given_any = True
        self._outbox.append(item)
        if len(self._outbox) == 1:  # one message for everything that is handed out in this turn of the loop
            loop.call_soon(self._send)
        return await future

    def drain(self) -> None:
        self._send()
        self._deliver([])

    def settle(self, outcome: Outcome) -> None:
        future = self.leases.pop((outcome.row, outcome.repeat), None)
        if future is not None and not future.done():
            future.set_result(outcome)

    async def until_idle(self) -> None:
        while busy := [future for future in self.leases.values() if not future.done()]:
            await asyncio.wait(busy)

    def lose_all(self, why: str) -> None:
        lost = f"the worker was lost: {why}"
        for row, repeat in list(self.leases):
            self.settle(Outcome(row, repeat, failure=FailureKind.WORKER_LOST, message=lost))

    def _send(self) -> None:
        items, self._outbox = self._outbox, []
        if items:
            self._deliver(items)

    @abstractmethod
    def _deliver(self, items: list[Item]) -> None:
        """No items say that there will be no more. What cannot be delivered, `outcomes` hears of."""

    @abstractmethod
    async def prepare(self) -> None:
        """Until it can take items; raises Gone when it dies of that."""

    @abstractmethod
    async def outcomes(self) -> list[Outcome]:
        """The next ones; raises Gone when it is."""

    @abstractmethod
    async def close(self) -> None:
        """Let it end by itself."""

    @abstractmethod
    async def dismiss(self) -> None:
        """End it, if it is not gone: it must not go on with what is given to others now."""


class Crew(ABC):
    """The executor: as many members as there are workers, each replaced when it dies."""

    kind: str  # what members are, for people, and where they said what they died of
    messages: str

    def __init__(self, settings: CollectSettings) -> None:
        # So that those who are ready first leave something to the others.
        self._share = math.ceil(settings.num_samples_in_parallel / settings.workers)
        self._ready: list[Member] = []
        self._apart: Member | None = None  # from the others, for the sake of one item
        self._setting_apart = asyncio.Lock()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._deaths = 0
        self._is_draining = self._is_closing = False
        self._places = [asyncio.ensure_future(self._fill_place()) for _ in range(settings.workers)]

    @abstractmethod
    async def _hire(self) -> Member: ...

    async def run(self, item: Item, *, alone: bool = False) -> Outcome:
        if alone:
            async with self._setting_apart:
                outcome = await self._run_apart(item)
        elif (member := await self._member()) is not None:
            outcome = await member.run(item)
        else:
            outcome = None
        if outcome is None:
            return Outcome(item.row, item.repeat, not_sent=True)
        if outcome.failure is FailureKind.WORKER_LOST and self._error is not None:
            raise self._error  # what is wrong with all of them is not this item's failure
        return outcome

    def drain(self) -> None:
        self._is_draining = True
        for member in self._ready:
            member.drain()
        self._changed.set()

    async def close(self) -> None:
        self._is_closing = True
        await asyncio.gather(*(member.close() for member in self._ready))
        for place in self._places:
            place.cancel()
        await asyncio.gather(*self._places, return_exceptions=True)

    async def _member(self) -> Member | None:
        """The least busy one; None once nothing new is to be started."""
        while self._error is None:
            if self._is_draining:
                return None
            there = [member for member in self._ready if member is not self._apart]
            least_busy = min(there, key=lambda member: len(member.leases), default=None)
            if least_busy is not None and len(least_busy.leases) < self._share:
                return least_busy
            self._changed.clear()
            await self._changed.wait()
        raise self._error

    async def _run_apart(self, item: Item) -> Outcome | None:
        while (member := await self._member()) is not None:
            self._apart = member
            try:
                await member.until_idle()
                if member in self._ready and not self._is_draining:
                    return await member.run(item)
            finally:
                self._apart = None
                self._changed.set()
        return None

    async def _fill_place(self) -> None:
        """One place of the crew: a member, and after it another, until the end."""
        pause = _FIRST_PAUSE_S
        try:
            while self._error is None and not self._is_closing:
                member = await self._hire()
                await self._employ(member)
                if member.was_given_any:
                    pause = _FIRST_PAUSE_S
                elif self._error is None:  # no item paid for its death with an attempt: nothing ends these
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
        except Exception as error:  # the next one would meet it too
            self._give_up(error)

    async def _employ(self, member: Member) -> None:
        why = "nobody waits for it any more"
        try:
            await self._prepare(member)
            self._deaths = 0
            self._ready.append(member)
            self._changed.set()
            if self._is_draining:
                member.drain()
            while True:
                for outcome in await member.outcomes():
                    self._deaths = 0
                    member.settle(outcome)
                self._changed.set()
        except Gone as gone:
            why = str(gone)
            self._count_death(member, why)  # before its items hear of it, and use up their attempts
        finally:
            if member in self._ready:
                self._ready.remove(member)
            member.lose_all(why)
            await member.dismiss()

    async def _prepare(self, member: Member) -> None:
        await member.prepare()

    def _count_death(self, member: Member, why: str) -> None:
        """Of members that never began: in a row, they mean that none can work."""
        if self._is_closing or member in self._ready:
            return
        self._deaths += 1
        if self._deaths >= _MOST_DEATHS:
            self._give_up(
                RollbookError(
                    f"{_MOST_DEATHS} {self.kind} in a row died before they could begin "
                    f"(of the last one, {why}); {self.messages}"
                )
            )

    def _give_up(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.set()
