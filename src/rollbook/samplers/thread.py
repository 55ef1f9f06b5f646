"""The one thread that samples. Episodes of any event loop wait for it; it never waits for them.

What is done after a step goes back to each loop in one call. An error in the thread reaches every episode
that waits and every later one: nobody waits for a thread that is gone.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import threading
from collections import defaultdict
from collections.abc import Iterable

import torch

from rollbook.rollouts.failures import PolicyGone
from rollbook.samplers.engine import Done, Engine, Sampled, Wanted

Future = asyncio.Future[Sampled]


class SamplerError(PolicyGone):
    """The sampler can serve nobody any more."""


class SamplingThread:
    """Has the engine, and with it the model, as long as anything is being sampled."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Wanted | None] = queue.SimpleQueue()  # None: come to an end
        self._lock = threading.Lock()
        self._open: dict[Wanted, Future] = {}  # what is not answered yet
        self._idle = threading.Event()  # the model is as it was found
        self._idle.set()
        self._error: SamplerError | None = None
        self._thread: threading.Thread | None = None

    async def sample(self, wanted: Wanted) -> Sampled:
        future: Future = asyncio.get_running_loop().create_future()
        with self._lock:
            self._check()
            self._open[wanted] = future
            self._idle.clear()
            self._inbox.put(wanted)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rollbook-sampler", daemon=True)
                self._thread.start()
                atexit.register(self.close)  # a thread inside torch must be gone before the interpreter is
        try:
            return await future
        finally:
            wanted.abandoned = True  # the engine stops sampling it if the wait was cancelled

    def rest(self) -> None:
        """Return when nothing is being sampled: until the next request the model is the trainer's alone."""
        with self._lock:
            self._check()
            waiting = sum(not wanted.abandoned for wanted in self._open)
            if waiting:
                raise SamplerError(f"the weights cannot change while {waiting} sequences are being sampled")
        self._idle.wait()  # cancelled ones leave within a step
        self._check()

    def close(self) -> None:
        with self._lock:
            self._error = self._error or SamplerError("the sampler has been closed")
            thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            thread.join()
            atexit.unregister(self.close)

    def _check(self) -> None:
        if self._error is not None:
            raise SamplerError(str(self._error)) from self._error.__cause__

    def _run(self) -> None:
        torch.get_num_threads()  # a new thread takes over the number that was set when it asks for it
        error = None
        try:
            while (wanted := self._inbox.get()) is not None:
                self._engine.add(wanted)
                with self._engine.model.sampling():
                    done = self._work()
                self._deliver(done)
        except _Closed:
            pass
        except BaseException as problem:
            error = SamplerError(f"sampling failed with {type(problem).__name__}: {problem}")
            error.__cause__ = problem
        self._end(error)

    def _work(self) -> list[Done]:
        """Sample until nothing is left; returns what the last step gave, the rest is delivered."""
        done: list[Done] = []
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    wanted = self._inbox.get_nowait()
                    if wanted is None:
                        raise _Closed
                    self._engine.add(wanted)
            if not self._engine.busy:
                return done
            if done:
                self._deliver(done)
            done = self._engine.step()

    def _deliver(self, done: list[Done]) -> None:
        answers = []
        with self._lock:
            for wanted, sampled in done:
                answers.append((self._open.pop(wanted), sampled))
            if not self._open and not self._engine.busy:
                self._idle.set()
        _hand_over(answers)

    def _end(self, error: SamplerError | None) -> None:
        with self._lock:
            self._error = self._error or error
            waiting, self._open = list(self._open.values()), {}
            self._idle.set()
            why = str(self._error)
        answers: list[tuple[Future, Sampled | Exception]] = []
        for future in waiting:
            answer = SamplerError(why)
            answer.__cause__ = error.__cause__ if error is not None else None
            answers.append((future, answer))
        _hand_over(answers)


class _Closed(Exception):
    """Somebody closed the sampler while it was sampling."""


def _hand_over(answers: Iterable[tuple[Future, Sampled | Exception]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Future, Sampled | Exception]]] = defaultdict(list)
    for future, answer in answers:
        by_loop[future.get_loop()].append((future, answer))
    for loop, some in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so nobody waits in it
            loop.call_soon_threadsafe(_resolve, some)


def _resolve(answers: list[tuple[Future, Sampled | Exception]]) -> None:
    for future, answer in answers:
        if future.done():  # cancelled
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
