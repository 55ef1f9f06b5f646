"""A real vLLM server on the CPU, for as long as a test module needs it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from setup_vllm import ENVIRONMENT

START_S = 600.0  # one and a half minutes on a busy machine with two cores
STOP_S = 20.0


@dataclass(frozen=True)
class VLLMServer:
    url: str  # without /v1
    model: str

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            content: bytes = answer.read()
            return content.decode()

    def metric(self, name: str) -> float:
        """A number of /metrics, summed over its labels."""
        found = re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found, f"the server has no metric vllm:{name}"
        return sum(map(float, found))


@contextlib.contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[VLLMServer]:
    """The server with `model`, under the name of its directory; nothing of it is left afterwards."""
    port = _free_port()
    command = [ENVIRONMENT.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "bfloat16", "--max-model-len", "1024", "--enforce-eager", *options]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as said:
        process = subprocess.Popen(
            command,
            stdout=said,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env={**os.environ, **settings},
            start_new_session=True,  # so that its engine can be ended with it
        )
    server = VLLMServer(f"http://127.0.0.1:{port}", model.name)
    try:
        _wait_until_up(server, process, log)
        yield server
    finally:
        _end(process)


def _wait_until_up(server: VLLMServer, process: subprocess.Popen[bytes], log: Path) -> None:
    began = time.monotonic()
    told = 0.0
    while (waited := time.monotonic() - began) < START_S:
        if process.poll() is not None:
            raise AssertionError(f"vLLM ended with {process.returncode} while starting; {log}:\n{tail(log)}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            server.get("/health")
            print(f"vLLM is up after {waited:.0f} s", flush=True)
            return
        if waited - told >= 10:
            told = waited
            print(f"vLLM is starting, {waited:.0f} s so far", flush=True)
        time.sleep(0.5)
    raise AssertionError(f"vLLM is not up after {START_S:.0f} s; {log}:\n{tail(log)}")


def tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """The server and the engine it started: asked first, then without asking."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
