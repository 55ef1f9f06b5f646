"""Rollouts on a Ray cluster: the same leases, held by actors on other machines.

The collector stays the only planner and the only writer. An actor does the items it is given and keeps
nothing; when it dies, wherever it was, its leases are lost outcomes and are given to others, and a new actor
takes its place. What cannot work (settings, an address, a cluster without room) is said, never waited for
without a word. Without an address a cluster of this machine is started for this collection alone and ends
with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from rollbook.collect.rows import Item, Outcome
from rollbook.collect.settings import CollectSettings
from rollbook.errors import RollbookError, UsageError
from rollbook.policies.base import FailureKind

_QUICK_DEATHS = 5  # actors in a row that died without a single outcome: something is wrong with all of them
_SAY_AFTER_S = 20.0  # without an actor, a word of why nothing happens
_PATIENCE_S = 600.0  # without an actor, the end; a cluster that grows by itself takes minutes
_CONNECT_S = 10.0
_CLOSE_S = 5.0
_log = logging.getLogger("rollbook")
_encode = msgspec.msgpack.encode
_decode_items = msgspec.msgpack.Decoder(list[Item]).decode
_decode_outcomes = msgspec.msgpack.Decoder(list[Outcome]).decode


class RayExecutor:
    """As many actors as there are workers, each replaced when it dies."""

    def __init__(self, ray: Any, settings: CollectSettings, *, owns_ray: bool) -> None:
        from rollbook.collect.collector import encode_settings

        self._ray, self._owns_ray = ray, owns_ray
        self._setup = (encode_settings(settings), str(Path.cwd()), _keys_of(settings))
        # Spread, for the machines' sake; by Ray's default an actor needs a CPU to be placed and none to stay,
        # so more workers than CPUs are no trouble.
        self._hire = ray.remote(RolloutActor).options(scheduling_strategy="SPREAD", max_restarts=0).remote
        self._crew: list[_Member] = []  # those that are ready
        self._changed = asyncio.Event()
        self._error: RollbookError | None = None
        self._has_said = False
        self._quick_deaths = 0
        self._places = [asyncio.ensure_future(self._fill_place()) for _ in range(settings.workers)]

    @classmethod
    async def start(cls, settings: CollectSettings) -> RayExecutor:
        ray = _import_ray()
        owns_ray = not ray.is_initialized()
        if owns_ray:
            _connect(ray, settings)
        return cls(ray, settings, owns_ray=owns_ray)

    async def run(self, item: Item) -> Outcome:
        while not self._crew or self._error is not None:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        outcome = await min(self._crew, key=lambda member: len(member.leases)).run(item)
        if outcome.failure is not FailureKind.WORKER_LOST:
            self._quick_deaths = 0
        return outcome

    def drain(self) -> None:
        for member in self._crew:
            member.drain()

    async def close(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(member.close() for member in self._crew)), _CLOSE_S)
        for place in self._places:
            place.cancel()
        await asyncio.gather(*self._places, return_exceptions=True)
        if self._owns_ray:
            await asyncio.to_thread(self._ray.shutdown)

    async def _fill_place(self) -> None:
        """One place of the crew: an actor, and after it another, until the end."""
        while self._error is None:
            member = _Member(self._ray, self._hire())
            try:
                await self._prepare(member)
                self._crew.append(member)
                self._changed.set()
                await member.listen()
            except self._ray.exceptions.RayTaskError as error:  # its code failed, as the next one's would
                self._give_up(f"a Ray actor cannot work: {error.cause or error}")
            except self._ray.exceptions.RayError as error:
                self._count_death(member, error)
            finally:
                if member in self._crew:
                    self._crew.remove(member)
                member.dismiss()

    async def _prepare(self, member: _Member) -> None:
        ready = asyncio.ensure_future(member.prepare(*self._setup))
        try:
            await asyncio.wait([ready], timeout=_SAY_AFTER_S)
            if not ready.done() and not self._crew and not self._has_said:
                self._has_said = True
                _log.warning("no Ray actor is ready yet; %s", self._room())
            await asyncio.wait([ready], timeout=_PATIENCE_S)
            if not ready.done() and not self._crew:  # whoever is late for a crew may be
                self._give_up(f"no Ray actor was ready after {_PATIENCE_S:g} s; {self._room()}")
            await ready
        finally:
            ready.cancel()

    def _room(self) -> str:
        free = self._ray.available_resources().get("CPU", 0)
        total = self._ray.cluster_resources().get("CPU", 0)
        return f"each needs a free CPU to start, and the cluster has {free:g} free of {total:g} (ray status)"

    def _count_death(self, member: _Member, error: Exception) -> None:
        if member.was_useful:
            return
        self._quick_deaths += 1
        if self._quick_deaths >= _QUICK_DEATHS:
            self._give_up(f"{_QUICK_DEATHS} Ray actors in a row died before finishing anything: {error}")

    def _give_up(self, why: str) -> None:
        self._error = self._error or RollbookError(why)
        self._changed.set()


class _Member:
    """One actor and the items it holds."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self.leases: dict[tuple[int, int], asyncio.Future[Outcome]] = {}
        self.was_useful = False
        self._outbox: list[Item] = []

    async def prepare(self, settings: bytes, directory: str, keys: dict[str, str]) -> None:
        await self._actor.prepare.remote(settings, directory, keys)

    async def run(self, item: Item) -> Outcome:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.leases[item.row, item.repeat] = future
        self._outbox.append(item)
        if len(self._outbox) == 1:  # one call for everything that is handed out in this turn of the loop
            asyncio.get_running_loop().call_soon(self._send)
        return await future

    def drain(self) -> None:
        self._send()
        self._actor.begin.remote(_encode([]))  # no items: that there will be no more

    async def listen(self) -> None:
        """Until the actor is lost, which is an error of Ray."""
        while True:
            for outcome in _decode_outcomes(await self._actor.finished.remote()):
                future = self.leases.pop((outcome.row, outcome.repeat), None)
                if future is not None and not future.done():
                    self.was_useful = True
                    future.set_result(outcome)

    async def close(self) -> None:
        with suppress(self._ray.exceptions.RayError):
            await self._actor.close.remote()

    def dismiss(self) -> None:
        """An actor that was only out of reach must not go on with what is given to others now."""
        self._ray.kill(self._actor)
        for (row, repeat), future in self.leases.items():
            if not future.done():
                lost = "the worker was lost: its Ray actor died"
                future.set_result(Outcome(row, repeat, failure=FailureKind.WORKER_LOST, message=lost))
        self.leases.clear()

    def _send(self) -> None:
        items, self._outbox = self._outbox, []
        if items:
            self._actor.begin.remote(_encode(items))  # if it cannot be delivered, `listen` hears of that too


class RolloutActor:
    """Runs inside Ray. Finished outcomes wait to be fetched: as many to a call as are there."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._finished: list[Outcome] = []
        self._is_any = asyncio.Event()

    async def prepare(self, settings: bytes, directory: str, keys: dict[str, str]) -> None:
        """Be like the collector's own process: its directory, where there is one, and its keys."""
        from rollbook.collect.collector import decode_settings, local_executor

        with suppress(OSError):
            os.chdir(directory)
        os.environ.update(keys)
        decoded = decode_settings(settings)
        self._executor = local_executor(decoded, share=decoded.workers)

    async def begin(self, data: bytes) -> None:
        items = _decode_items(data)
        if not items:  # the collector drains
            self._executor.drain()
        for item in items:
            task = asyncio.ensure_future(self._do(item))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def finished(self) -> bytes:
        await self._is_any.wait()
        self._is_any.clear()
        outcomes, self._finished = self._finished, []
        return _encode(outcomes)

    async def close(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._executor.close()

    async def _do(self, item: Item) -> None:
        outcome = await self._executor.run(item)
        self._finished.append(outcome)  # to the list of now: `finished` may have put a new one in its place
        self._is_any.set()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise UsageError("engine: ray needs the package ray; type: pip install 'rollbook[ray]'") from None
    return ray


def _connect(ray: Any, settings: CollectSettings) -> None:
    """To the cluster of the settings or of RAY_ADDRESS; without either, to one of our own."""
    from rollbook.collect.collector import Interrupted

    address = settings.ray_address or os.environ.get("RAY_ADDRESS") or "local"
    own: dict[str, Any] = {}
    if address == "local":
        own = {"num_cpus": settings.workers, "include_dashboard": False}
    else:
        _check_address(address)
    try:
        with _signals_kept():
            # What actors print stays in Ray's own logs: our log is for people, our stdout for programs.
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except SystemExit:  # Ray's answer to a SIGTERM while it starts
        raise Interrupted from None
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        hint = "" if address == "local" else "; if it asks for a token, type: export RAY_AUTH_MODE=token"
        raise RollbookError(f"Ray cannot be started or reached at {address!r}: {error}{hint}") from error


def _check_address(address: str) -> None:
    """Ray tries for minutes to reach what is not there."""
    if "://" in address:
        raise UsageError(
            f"ray_address={address} is for Ray's client; on a machine of the cluster, write HOST:6379 or auto"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        if address == "auto":
            return
        raise UsageError(
            f"ray_address={address} is not an address; write HOST:6379, or auto, or leave it out"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise RollbookError(
            f"no Ray cluster answers at ray_address={address}: {error}; see its address with: ray status"
        ) from None


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself and exits on it; how a collection ends is the collector's affair."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _keys_of(settings: CollectSettings) -> dict[str, str]:
    """The variables that the agent's settings name; machines of a cluster do not have them by themselves."""
    agent = settings.agent
    named = {*_names(agent.env), *_names(agent.policy or {})}
    return {name: os.environ[name] for name in named if name in os.environ}


def _names(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _names(value)
        elif key.endswith("api_key_env") and isinstance(value, str):
            yield value
