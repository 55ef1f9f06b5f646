"""A crew of actors on a Ray cluster.

What cannot work (settings, an address, a cluster without room) is said, never waited for without a word.
Without an address a cluster of this machine is started for this collection alone and ends with it.
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

from rollbook.collect.crew import Crew, Gone, Member
from rollbook.collect.executor import cancelled_by_itself, local_executor
from rollbook.collect.rows import Item, Outcome
from rollbook.collect.settings import CollectSettings, decode_settings, encode_settings
from rollbook.collect.wire import decode_items, decode_outcomes, encode, encode_outcomes
from rollbook.errors import Interrupted, RollbookError, UsageError

_SAY_AFTER_S = 20.0  # without an actor, a word of why nothing happens
_PATIENCE_S = 600.0  # without an actor, the end; a cluster that grows by itself takes minutes
_CONNECT_S = 10.0
_CLOSE_S = 5.0
_log = logging.getLogger("rollbook")


class RayExecutor(Crew):
    kind, messages = "Ray actors", "Ray's logs have their messages"

    def __init__(self, ray: Any, settings: CollectSettings, *, owns_ray: bool) -> None:
        self._ray, self._owns_ray = ray, owns_ray
        self._setup = (encode_settings(settings), str(Path.cwd()), _keys_of(settings))
        # Spread, for the machines' sake; by Ray's default an actor needs a CPU to be placed and none to stay,
        # so more workers than CPUs are no trouble.
        self._new = ray.remote(RolloutActor).options(scheduling_strategy="SPREAD", max_restarts=0).remote
        self._has_said = False
        super().__init__(settings)

    @classmethod
    async def start(cls, settings: CollectSettings) -> RayExecutor:
        ray = _import_ray()
        owns_ray = not ray.is_initialized()
        if owns_ray:
            _connect(ray, settings)
        return cls(ray, settings, owns_ray=owns_ray)

    async def close(self) -> None:
        await super().close()
        if self._owns_ray:
            await asyncio.to_thread(self._ray.shutdown)

    async def _hire(self) -> Member:
        return _Actor(self._ray, self._new(), self._setup)

    async def _prepare(self, member: Member) -> None:
        ready = asyncio.ensure_future(member.prepare())
        try:
            await asyncio.wait([ready], timeout=_SAY_AFTER_S)
            if not ready.done() and not self._ready and not self._has_said:
                self._has_said = True
                _log.warning("no Ray actor is ready yet; %s", self._room())
            await asyncio.wait([ready], timeout=_PATIENCE_S)
            if not ready.done() and not self._ready:  # whoever is late for a crew may be
                raise RollbookError(f"no Ray actor was ready after {_PATIENCE_S:g} s; {self._room()}")
            await ready
        finally:
            ready.cancel()

    def _room(self) -> str:
        free = self._ray.available_resources().get("CPU", 0)
        total = self._ray.cluster_resources().get("CPU", 0)
        return f"each needs a free CPU to start, and the cluster has {free:g} free of {total:g} (ray status)"


class _Actor(Member):
    def __init__(self, ray: Any, actor: Any, setup: tuple[bytes, str, dict[str, str]]) -> None:
        super().__init__()
        self._ray, self._actor, self._setup = ray, actor, setup

    async def prepare(self) -> None:
        try:
            await self._actor.prepare.remote(*self._setup)
        except self._ray.exceptions.RayTaskError as error:  # its code failed, as the next one's would
            raise RollbookError(f"a Ray actor cannot work: {error.cause or error}") from error
        except self._ray.exceptions.RayError as error:
            raise Gone(f"its Ray actor died: {error}") from error

    async def outcomes(self) -> list[Outcome]:
        try:
            return decode_outcomes(await self._actor.finished.remote())
        except self._ray.exceptions.RayTaskError as error:
            raise RollbookError(f"a Ray actor cannot work: {error.cause or error}") from error
        except self._ray.exceptions.RayError as error:
            raise Gone("its Ray actor died") from error

    async def close(self) -> None:
        with suppress(TimeoutError, self._ray.exceptions.RayError):
            await asyncio.wait_for(self._actor.close.remote(), _CLOSE_S)

    async def dismiss(self) -> None:
        self._ray.kill(self._actor)

    def _deliver(self, items: list[Item]) -> None:
        self._actor.begin.remote(encode(items))


class RolloutActor:
    """Runs inside Ray. Finished outcomes wait to be fetched: as many to a call as are there."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._finished: list[Outcome] = []
        self._is_any = asyncio.Event()

    async def prepare(self, settings: bytes, directory: str, keys: dict[str, str]) -> None:
        """Be like the collector's own process: its directory, where there is one, and its keys."""
        with suppress(OSError):
            os.chdir(directory)
        os.environ.update(keys)
        decoded = decode_settings(settings)
        self._executor = local_executor(decoded, share=decoded.workers)

    async def begin(self, data: bytes) -> None:
        items = decode_items(data)
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
        return encode_outcomes(outcomes)

    async def close(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._executor.close()

    async def _do(self, item: Item) -> None:
        try:
            outcome = await self._executor.run(item)
        except asyncio.CancelledError:  # on `close`, too, when nobody fetches it any more
            outcome = cancelled_by_itself(item)
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
