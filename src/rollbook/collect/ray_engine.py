"""Rollouts on a Ray cluster: the same leases, held by actors on other machines.

The collector stays the only planner and the only writer. An actor does the items it is given and keeps no
state, so Ray may restart it anywhere; what a dead one had in flight is a lost outcome and is leased again.
Without an address a local cluster is started for this collection alone.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from rollbook.collect.rows import Item, Outcome
from rollbook.collect.settings import CollectSettings
from rollbook.errors import UsageError
from rollbook.policies.base import FailureKind

_encode_item = msgspec.msgpack.encode
_decode_item = msgspec.msgpack.Decoder(Item).decode
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class RayExecutor:
    def __init__(self, settings: CollectSettings) -> None:
        from rollbook.collect.collector import encode_settings

        try:
            import ray
        except ImportError:
            raise UsageError("engine: ray needs the package ray; type: pip install 'rollbook[ray]'") from None
        self._ray: Any = ray
        self._own_cluster = not ray.is_initialized()
        if self._own_cluster:
            ray.init(address=settings.ray_address, log_to_driver=True, include_dashboard=False)
        # Ray restarts an actor whose process or machine died; the items it held come back as lost.
        remote = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=0)(_Actor)
        in_flight = settings.num_samples_in_parallel
        options = remote.options(max_concurrency=max(1, in_flight))
        self._actors = [options.remote(encode_settings(settings)) for _ in range(settings.workers)]
        self._held = [0] * len(self._actors)

    async def run(self, item: Item) -> Outcome:
        place = min(range(len(self._actors)), key=self._held.__getitem__)
        self._held[place] += 1
        try:
            return _decode_outcome(await self._actors[place].run.remote(_encode_item(item)))
        except self._ray.exceptions.RayError as error:
            message = f"the worker was lost: {type(error).__name__}: {str(error).splitlines()[0]}"
            await asyncio.sleep(0.2)  # while Ray brings the actor back
            return Outcome(item.row, item.repeat, failure=FailureKind.WORKER_LOST, message=message)
        finally:
            self._held[place] -= 1

    async def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._own_cluster:
            await asyncio.to_thread(self._ray.shutdown)


class _Actor:
    """Runs inside Ray."""

    def __init__(self, settings: bytes) -> None:
        from rollbook.collect.collector import decode_settings, local_executor

        decoded = decode_settings(settings)
        self._executor = local_executor(decoded, share=decoded.workers)

    async def run(self, data: bytes) -> bytes:
        return msgspec.msgpack.encode(await self._executor.run(_decode_item(data)))
