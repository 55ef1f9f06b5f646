"""The process whose forks are the commands of `preloaded.py`; ends when its stdin does.

Each fork leaves `serve` and becomes the command, down to the end of the interpreter.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

IMPORTED = (
    *("torch.distributed.fsdp", "torch.distributed.elastic.multiprocessing.errors"),
    *("transformers.models.llama.modeling_llama", "transformers.generation.candidate_generator"),
    *("matplotlib.pyplot", "duckdb", "pyarrow.dataset", "pyarrow.parquet", "aiohttp", "uvloop"),
    *("rollbook.sft.train", "rollbook.rl.train", "rollbook.rl.replay.replay", "rollbook.query.session"),
)


class Server:
    """Forks itself for each connection, and says there how the fork ended."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        self._woken, self._wakes = os.pipe()
        for end in (self._woken, self._wakes):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's: the tests and the commands get it, too
        self._running: dict[int, socket.socket] = {}

    def serve(self) -> dict[str, Any] | None:
        """What to run, in each fork; in this process None, when there is nobody left to run anything for."""
        while True:
            ready = select.select([0, self._woken, self._listener, *self._running.values()], [], [])[0]
            self._reap()
            if 0 in ready:
                for pid in self._running:
                    os.kill(pid, signal.SIGKILL)
                return None
            for pid in [pid for pid, connection in self._running.items() if connection in ready]:
                os.kill(pid, signal.SIGKILL)  # nobody waits for it any more
                self._running.pop(pid).close()
            if self._listener in ready and (request := self._fork()) is not None:
                return request

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if (connection := self._running.pop(ended[0], None)) is not None:
                    _answer(connection, os.waitstatus_to_exitcode(ended[1]))
                    connection.close()

    def _fork(self) -> dict[str, Any] | None:
        """What to run, in the fork; None in this process."""
        connection = self._listener.accept()[0]
        length, files, _, _ = socket.recv_fds(connection, 4, 3)
        request = json.loads(connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))
        if (pid := os.fork()) == 0:
            self._leave(connection, files)
            return request
        for file in files:
            os.close(file)
        self._running[pid] = connection
        _answer(connection, pid)
        return None

    def _leave(self, connection: socket.socket, files: list[int]) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for opened in (self._listener, connection, *self._running.values()):
            opened.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
        for file in (self._woken, self._wakes, *files):
            os.close(file)


def _answer(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # whoever asked has been killed
        connection.sendall(number.to_bytes(4, "big", signed=True))


def become(request: dict[str, Any]) -> None:
    """Run the command, as the interpreter would that was started with it."""
    import numpy as np
    import torch

    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    np.random.seed()  # else every fork would draw the same
    torch.default_generator.seed()
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    first, *words = request["words"]
    before = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if first == "rollbook":
        script = str(Path(sys.executable).with_name("rollbook"))
        _begin([script, *words], [str(Path(script).parent), *before])
        from rollbook.cli.main import main

        sys.exit(main())
    assert first == "python", f"neither rollbook nor python: {first}"
    safe = words[0] == "-P"
    option, what, *words = words[safe:]
    if option == "-m":
        _begin([what, *words], before if safe else [os.getcwd(), *before])  # noqa: PTH109
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        assert option == "-c", f"neither -m nor -c: {option}"
        _begin(["-c", *words], before if safe else ["", *before])
        exec(compile(what, "<string>", "exec"), sys.modules["__main__"].__dict__)


def _begin(argv: list[str], before: list[str]) -> None:
    sys.argv = argv
    sys.path[:0] = before
    sys.modules["__main__"] = types.ModuleType("__main__")


def _end_of(command: Callable[[], None]) -> int:
    """Runs it; what an interpreter does at its end, but for taking apart every module that was imported."""
    code = 0
    try:
        command()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if not isinstance(left.code, int | None):
            print(left.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()  # closes what is open there
    try:
        sys.stdout.flush()
    except OSError:
        code = 120
    return code & 0xFF


if __name__ == "__main__":
    given = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [entry for entry in sys.path if entry not in given]
    for name in IMPORTED:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a fork would not have these threads"
    gc.collect()
    gc.freeze()
    directory = Path(tempfile.mkdtemp(prefix="rollbook-"))
    server = Server(address := str(directory / "forks"))
    print(address, flush=True)
    if (request := server.serve()) is not None:
        os._exit(_end_of(lambda: become(request)))
    shutil.rmtree(directory)
    os._exit(0)  # no module has to be taken apart
