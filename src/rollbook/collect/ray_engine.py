"""Workers that are actors on a Ray cluster.

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

from rollbook.collect.items import Answer, Item, decode_answer, decode_item, encode_answer, encode_item
from rollbook.collect.rollout import rollouts_here
from rollbook.collect.settings import CollectSettings, decode_settings, encode_settings
from rollbook.collect.workers import Worker, WorkerDied, WorkerGroup
from rollbook.errors import Interrupted, RollbookError, UsageError

_WARN_AFTER_S = 20.0  # without an actor
_CONNECT_S = 10.0
_CLOSE_S = 5.0
_log = logging.getLogger("rollbook")


class RayWorkers(WorkerGroup):
    """As many actors as there are workers."""

    def __init__(self, ray: Any, settings: CollectSettings, *, owns_ray: bool) -> None:
        self._ray, self._owns_ray = ray, owns_ray
        setup = (encode_settings(settings), str(Path.cwd()), _keys_of(settings))
        # Spread, for the machines' sake; by Ray's default an actor needs a CPU to be placed and none to stay,
        # so more workers than CPUs are no trouble.
        kind = ray.remote(RolloutActor).options(
            scheduling_strategy="SPREAD", max_restarts=0, max_concurrency=settings.num_samples_in_parallel + 8
        )
        warned: set[bool] = set()

        async def start() -> Worker:
            return _Actor(ray, kind.remote(), setup, warned)

        super().__init__(settings, start, "Ray actors", "Ray's logs have their messages")

    async def close(self) -> None:
        await super().close()
        if self._owns_ray:
            await asyncio.to_thread(self._ray.shutdown)


class _Actor:
    def __init__(
        self, ray: Any, actor: Any, setup: tuple[bytes, str, dict[str, str]], warned: set[bool]
    ) -> None:
        self._ray, self._actor, self._setup, self._warned = ray, actor, setup, warned

    async def begin(self) -> None:
        warning = asyncio.get_running_loop().call_later(_WARN_AFTER_S, self._warn)
        try:
            await self._result(self._actor.begin.remote(*self._setup))
        finally:
            warning.cancel()

    async def run(self, item: Item) -> Answer:
        return decode_answer(await self._result(self._actor.run.remote(encode_item(item))))

    async def ended(self) -> None:
        await self._result(self._actor.wait.remote())

    async def close(self) -> None:
        with suppress(TimeoutError, self._ray.exceptions.RayError):
            await asyncio.wait_for(self._actor.close.remote(), _CLOSE_S)

    async def kill(self) -> None:
        self._ray.kill(self._actor)

    def _warn(self) -> None:
        if not self._warned:
            self._warned.add(True)
            free = self._ray.available_resources().get("CPU", 0)
            total = self._ray.cluster_resources().get("CPU", 0)
            _log.warning(
                "a Ray actor is not ready after %g s; each needs a free CPU to start, and the cluster has %g "
                "free of %g (see: ray status)",
                _WARN_AFTER_S,
                free,
                total,
            )

    async def _result(self, reference: Any) -> Any:
        try:
            return await reference
        except self._ray.exceptions.RayTaskError as error:  # its code failed, as the next one's would
            raise RollbookError(f"a Ray actor cannot work: {error.cause or error}") from error
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(f"its Ray actor died: {error}") from error  # by whom, Ray does not say


class RolloutActor:
    """Runs inside Ray, as many rollouts at a time as it is given."""

    async def begin(self, settings: bytes, directory: str, keys: dict[str, str]) -> None:
        """Be like the collector's own process: its directory, where there is one, and its keys."""
        with suppress(OSError):
            os.chdir(directory)
        os.environ.update(keys)
        self._rollouts = rollouts_here(decode_settings(settings))

    async def run(self, data: bytes) -> bytes:
        return encode_answer(await self._rollouts.answer(decode_item(data)))

    async def wait(self) -> None:
        """Until this actor dies, which whoever waits hears of."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        await self._rollouts.close()


async def ray_workers(settings: CollectSettings) -> WorkerGroup:
    ray = _import_ray()
    owns_ray = not ray.is_initialized()
    if owns_ray:
        _connect(ray, settings)
    return RayWorkers(ray, settings, owns_ray=owns_ray)


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise UsageError("engine: ray needs the package ray; type: pip install 'rollbook[ray]'") from None
    return ray


def _connect(ray: Any, settings: CollectSettings) -> None:
    """Connect to the cluster of the settings or of RAY_ADDRESS; without either, start one here."""
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
