"""Environments written for verifiers, collected by our command and evaluated by verifiers' own.

Both ask the same server, which answers the same question the same way, so every reward and every metric must
be the same number. The environments are packages as people write them, with its own harness, its own
tool server and its own rubrics.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from collecting import results
from fake_servers import Told, chat_answer, serving

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600.0
pytestmark = pytest.mark.interop

HOME = ROOT / ".venvs" / "verifiers"
SUMS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply.split())

    @vf.reward(weight=0.25)
    async def brief(self, trace: vf.Trace) -> float:
        return 1 / len(trace.last_reply.split())

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for n in range(4):
            yield Sum(Data(prompt=f"add 10 and {n}", answer=str(10 + n)), self.config.task)

__all__ = ["Sums"]
"""
CAPITALS = """
import verifiers.v1 as vf

CITIES = {"France": "Paris", "Peru": "Lima", "Kenya": "Nairobi"}

class Atlas(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def capital_of(self, country: str) -> str:
        "The capital of a country."
        return CITIES[country]

class Data(vf.TaskData):
    answer: str

class Question(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def looked_up(self, trace: vf.Trace) -> float:
        return float(sum(message.role == "tool" for message in trace.messages))

class Questions(vf.Taskset[Question, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Atlas(vf.SharedToolsetConfig())]

    def load(self):
        for country, capital in CITIES.items():
            yield Question(Data(prompt=f"capital of {country}", answer=capital), self.config.task)

__all__ = ["Questions"]

if __name__ == "__main__":
    Atlas.run()
"""
PACKAGES = {"sums": SUMS, "capitals": CAPITALS}
TOOLS: dict[str, list[str]] = {"sums": [], "capitals": ["capital_of"]}
SETTINGS = {"agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}}
# By question: what the answers below are worth, in the rewards and metrics of the packages above.
WORTH: dict[str, dict[str, dict[str, float]]] = {
    "sums": {
        "add 10 and 0": {"reward": 1.25, "right": 1.0, "brief": 1.0, "letters": 2.0},
        "add 10 and 1": {"reward": 1.125, "right": 1.0, "brief": 0.5, "letters": 5.0},
        "add 10 and 2": {"reward": 0.25, "right": 0.0, "brief": 1.0, "letters": 2.0},
        "add 10 and 3": {"reward": 0.0625, "right": 0.0, "brief": 0.25, "letters": 13.0},
    },
    "capitals": {
        "capital of France": {"reward": 1.0, "right": 1.0, "looked_up": 1.0},
        "capital of Peru": {"reward": 1.0, "right": 1.0, "looked_up": 1.0},
        "capital of Kenya": {"reward": 0.0, "right": 0.0, "looked_up": 0.0},
    },
}
ANSWERS = {
    "add 10 and 0": "10",
    "add 10 and 1": "11 so",
    "add 10 and 2": "99",
    "add 10 and 3": "I do not know",
    "capital of Kenya": "Mombasa",
}


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """A model that knows ANSWERS, and looks up what it does not know."""
    messages = asked["messages"]
    question = next(_text(message) for message in messages if message["role"] == "user")
    rest = {"created": 1, "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}}
    if question in ANSWERS:
        return chat_answer(ANSWERS[question]) | rest
    if messages[-1]["role"] == "tool":
        return chat_answer(_text(messages[-1])) | rest
    arguments = json.dumps({"country": question.split()[-1]})
    call = {"name": asked["tools"][0]["function"]["name"], "arguments": arguments}
    return chat_answer("", tool_calls=[{"id": "call_1", "type": "function", "function": call}]) | rest


def streamed(asked: dict[str, Any]) -> bytes:
    """The same as the events of a stream, which the harness asks for."""
    whole = answer(asked)
    message = whole["choices"][0]["message"]
    calls = [{"index": place, **call} for place, call in enumerate(message.pop("tool_calls", []))]
    head = {key: whole[key] for key in ("id", "model", "created")} | {"object": "chat.completion.chunk"}
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    last = {"index": 0, "delta": {}, "finish_reason": "tool_calls" if calls else "stop"}
    events = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [last]},
        {**head, "choices": [], "usage": whole["usage"]},
    ]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + b"data: [DONE]\n\n"


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return str(content) if isinstance(content, str) else "".join(part["text"] for part in content)


def run(directory: Path, *command: str) -> str:
    """A command of the environment with the package, to its end."""
    assert (HOME / "requirements.sha256").exists(), f"no {HOME}; type: make test-interop"
    own = {
        "PATH": f"{HOME / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(directory),
        "UV_CACHE_DIR": str(HOME / "uv-cache"),
        "HOME": str(directory),
        "NO_KEY": "none",
    }
    result = subprocess.run(
        [str(HOME / "bin" / command[0]), *command[1:]],
        cwd=directory,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def evaluated(name: str, directory: Path, url: str) -> dict[str, dict[str, float]]:
    """What verifiers' own command makes of it, by question."""
    place = ["--no-push", "--no-rich", "--output-dir", "theirs", "--env.agent.runtime.type", "subprocess"]
    asked = ["--env.agent.harness.id", "null", "--client.base-url", url, "--client.api-key-var", "NO_KEY"]
    run(directory, "vf-eval", name, "--model", "m", *place, *asked)
    (path,) = directory.rglob("traces.jsonl")
    traces = [json.loads(line)["traces"][0] for line in path.read_text().splitlines()]
    return {
        trace["task"]["data"]["prompt"]: {
            "reward": sum(reward["score"] * reward["weight"] for reward in trace["rewards"].values()),
            **{name: reward["score"] for name, reward in trace["rewards"].items()},
            **trace["metrics"],
        }
        for trace in traces
    }


def collected(name: str, directory: Path, url: str) -> list[dict[str, Any]]:
    env = {"name": f"verifiers:{name}", **SETTINGS}
    agent = {"env": env, "policy": {"kind": "openai", "base_url": url, "model": "m"}}
    (directory / "rollbook.yaml").write_text(yaml.safe_dump({"agents": {"theirs": agent}}))
    words = ["+agent_name=theirs", "+output_jsonl_fpath=ours.jsonl", "+limit=10", "+num_repeats=2"]
    run(directory, "rollbook", "collect", *words)
    return results(directory / "ours.jsonl")


@pytest.mark.parametrize("name", ["sums", "capitals"])
def test_rewards_and_metrics_are_those_of_its_own_evaluator(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(PACKAGES[name])
    server = Told(streamed, headers={"Content-Type": "text/event-stream"})

    async def both() -> tuple[dict[str, dict[str, float]], list[dict[str, Any]]]:
        async with serving(server) as url:
            theirs = await asyncio.to_thread(evaluated, name, tmp_path, url)
            return theirs, await asyncio.to_thread(collected, name, tmp_path, url)

    theirs, rows = asyncio.run(both())
    assert {row["_rb_key"] for row in rows} == {
        f"{name}-{place:06d}#{repeat}" for place in range(len(theirs)) for repeat in range(2)
    }
    assert set(theirs) == set(WORTH[name])
    for row in rows:
        question = row["responses_create_params"]["input"][-1]["content"]
        worth = WORTH[name][question]
        assert {key: theirs[question][key] for key in worth} == worth
        assert {key: row[key] for key in theirs[question]} == theirs[question]
        looked_up = worth.get("looked_up", 0)
        kinds = [item["type"] for item in row["response"]["output"]]
        assert kinds == ["function_call", "function_call_output"] * int(looked_up) + ["message"]
        assert [tool["name"] for tool in row["response"]["tools"]] == TOOLS[name]
        assert row["num_turns"] == 1 + looked_up
        assert row["response"]["usage"]["output_tokens"] == 2 * row["num_turns"]


def test_the_tests_of_the_bridge_run_beside_the_package(tmp_path: Path) -> None:
    tests = ROOT / "tests" / "envs" / "test_verifiers_bridge.py"
    chosen = ["-k", "not without_the_package", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    run(tmp_path, "python", "-m", "pytest", "-q", str(tests), *chosen, "--junitxml=report.xml")
    cases = list(ElementTree.parse(tmp_path / "report.xml").iter("testcase"))
    assert len(cases) == 10
    assert not [case.get("name") for case in cases if case.find("skipped") is not None]
