"""The same sums by the evaluator of `verifiers`, in one process: its taskset, its reward, its trace file.

    python collect_verifiers.py URL INPUT IN_FLIGHT

Its shipped harnesses start a program for every rollout. That is not what is compared here, so the harness
below makes its one call in the evaluator's own process, over one shared connection pool.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import verifiers.v1 as vf

_NUMBER = re.compile(r"-?\d+")


class SumData(vf.TaskData):
    answer: str


class SumsConfig(vf.TasksetConfig):
    path: str = ""


class Sum(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        numbers = _NUMBER.findall(trace.last_reply or "")
        return float(bool(numbers) and numbers[-1] == self.data.answer)


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterator[Sum]:
        with Path(self.config.path).open("rb") as file:
            for line in file:
                row = json.loads(line)
                prompt = row["responses_create_params"]["input"][0]["content"]
                yield Sum(SumData(prompt=prompt, answer=row["expected_answer"]), self.config.task)


class OneCall(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False
    connections: aiohttp.ClientSession | None = None

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: SumData,
        *rest: Any,
        **more: Any,
    ) -> vf.ProgramResult:
        if OneCall.connections is None:
            OneCall.connections = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        url = endpoint.rstrip("/") + "/chat/completions"
        headers = {"Authorization": f"Bearer {secret}"}
        async with OneCall.connections.post(url, json=body, headers=headers) as response:
            text = await response.text()
        return vf.ProgramResult(exit_code=int(response.status != 200), stdout="", stderr=text)


__all__ = ["OneCall", "Sums"]


async def evaluate(base_url: str, path: Path, in_flight: int) -> None:
    from verifiers.v1.cli.eval.runner import run_eval
    from verifiers.v1.configs.cli.eval import EvalConfig

    config = EvalConfig.model_validate(
        {
            "env": {
                "taskset": {"id": Path(__file__).stem, "path": str(path)},
                "agent": {"runtime": {"type": "subprocess"}},
            },
            "model": "instant",
            "client": {"base_url": base_url, "api_key_var": "NO_KEY"},
            "max_concurrent": in_flight,
            "rich": None,
            "push": False,
            "output_dir": str(path.parent / "verifiers"),
        }
    )
    episodes = await run_eval(config)
    failed = [episode for episode in episodes if not episode.ok]
    if failed:
        errors = [*failed[0].errors, *(error for trace in failed[0].traces for error in trace.errors)]
        raise SystemExit(f"{len(failed)} of {len(episodes)} episodes failed: {errors[:1]}")
    if OneCall.connections is not None:
        await OneCall.connections.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["--version"]:
        print(f"verifiers {importlib.metadata.version('verifiers')}")
    else:
        # By its importable name, so that the loader finds the classes that are used here.
        from collect_verifiers import evaluate as run

        asyncio.run(run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
