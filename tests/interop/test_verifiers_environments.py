"""Environments written for verifiers, collected by our command and evaluated by verifiers' own.

Both ask the same server, which answers the same question the same way, so every reward and every metric must
be the same number. The environments are packages as people write them, in both of its interfaces, with its
own harness, its own tool server and its own rubrics.
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

PRESENT, CLASSIC = "verifiers", "verifiers-classic"
PRESENT_SUMS = """
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
PRESENT_CAPITALS = """
import verifiers.v1 as vf

CAPITALS = {"France": "Paris", "Peru": "Lima", "Kenya": "Nairobi"}

class Atlas(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def capital_of(self, country: str) -> str:
        "The capital of a country."
        return CAPITALS[country]

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
        for country, capital in CAPITALS.items():
            yield Question(Data(prompt=f"capital of {country}", answer=capital), self.config.task)

__all__ = ["Questions"]

if __name__ == "__main__":
    Atlas.run()
"""
CLASSIC_SUMS = """
import verifiers as vf
from datasets import Dataset

def words(completion):
    return completion[-1]["content"].split()

def right(completion, answer, **kwargs):
    return float(answer in words(completion))

def brief(completion, **kwargs):
    return 1 / len(words(completion))

def letters(completion, **kwargs):
    return float(len(completion[-1]["content"]))

def load_environment():
    rows = [{"question": f"add 10 and {n}", "answer": str(10 + n)} for n in range(4)]
    rubric = vf.Rubric(funcs=[right, brief, letters], weights=[1.0, 0.25, 0.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
"""
CLASSIC_CAPITALS = """
import verifiers as vf
from datasets import Dataset

CAPITALS = {"France": "Paris", "Peru": "Lima", "Kenya": "Nairobi"}

def capital_of(country: str) -> str:
    "The capital of a country."
    return CAPITALS[country]

def right(completion, answer, **kwargs):
    return float(completion[-1]["content"] == answer)

def looked_up(completion, **kwargs):
    return float(sum(message["role"] == "tool" for message in completion))

def load_environment():
    rows = [{"question": f"capital of {country}", "answer": city} for country, city in CAPITALS.items()]
    rubric = vf.Rubric(funcs=[right, looked_up], weights=[1.0, 0.0])
    return vf.ToolEnv(tools=[capital_of], dataset=Dataset.from_list(rows), rubric=rubric, max_turns=5)
"""
PACKAGES = {
    (PRESENT, "sums"): PRESENT_SUMS,
    (PRESENT, "capitals"): PRESENT_CAPITALS,
    (CLASSIC, "sums"): CLASSIC_SUMS,
    (CLASSIC, "capitals"): CLASSIC_CAPITALS,
}
TOOLS: dict[str, list[str]] = {"sums": [], "capitals": ["capital_of"]}
SETTINGS = {PRESENT: {"agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}}, CLASSIC: {}}
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
    """The same as the events of a stream, which the harness of the present interface asks for."""
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


def server_of(interface: str) -> Told:
    if interface == PRESENT:
        return Told(streamed, headers={"Content-Type": "text/event-stream"})
    return Told(answer)


def run(interface: str, directory: Path, *command: str) -> str:
    """A command of the environment with that interface, to its end."""
    home = ROOT / ".venvs" / interface
    assert (home / "requirements.sha256").exists(), f"no .venvs/{interface}; type: make test-interop"
    own = {
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(directory),
        "UV_CACHE_DIR": str(home / "uv-cache"),
        "HOME": str(directory),
        "NO_KEY": "none",
    }
    result = subprocess.run(
        [str(home / "bin" / command[0]), *command[1:]],
        cwd=directory,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def evaluated(interface: str, name: str, directory: Path, url: str) -> dict[str, dict[str, float]]:
    """What verifiers' own command makes of it, by question."""
    if interface == CLASSIC:
        place = ["-b", url, "-k", "NO_KEY", "-m", "m"]
        run(interface, directory, "vf-eval", name, *place, "-n", "-1", "-r", "1", "-s")
        (path,) = directory.rglob("results.jsonl")
        rows = map(json.loads, path.read_text().splitlines())
        return {row["prompt"][-1]["content"]: {"reward": row["reward"], **row["metrics"]} for row in rows}
    place = ["--no-push", "--no-rich", "--output-dir", "theirs", "--env.agent.runtime.type", "subprocess"]
    asked = ["--env.agent.harness.id", "null", "--client.base-url", url, "--client.api-key-var", "NO_KEY"]
    run(interface, directory, "vf-eval", name, "--model", "m", *place, *asked)
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


def collected(interface: str, name: str, directory: Path, url: str) -> list[dict[str, Any]]:
    env = {"name": f"verifiers:{name}", **SETTINGS[interface]}
    agent = {"env": env, "policy": {"kind": "openai", "base_url": url, "model": "m"}}
    (directory / "rollbook.yaml").write_text(yaml.safe_dump({"agents": {"theirs": agent}}))
    words = ["+agent_name=theirs", "+output_jsonl_fpath=ours.jsonl", "+limit=10", "+num_repeats=2"]
    run(interface, directory, "rollbook", "collect", *words)
    return results(directory / "ours.jsonl")


@pytest.mark.parametrize("name", ["sums", "capitals"])
@pytest.mark.parametrize("interface", [PRESENT, CLASSIC])
def test_rewards_and_metrics_are_those_of_its_own_evaluator(
    interface: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text(PACKAGES[interface, name])

    async def both() -> tuple[dict[str, dict[str, float]], list[dict[str, Any]]]:
        async with serving(server_of(interface)) as url:
            theirs = await asyncio.to_thread(evaluated, interface, name, tmp_path, url)
            return theirs, await asyncio.to_thread(collected, interface, name, tmp_path, url)

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


@pytest.mark.parametrize(
    ("interface", "skipped"),
    [(PRESENT, set()), (CLASSIC, {"test_a_cloud_runtime_without_a_login_is_refused"})],
)
def test_the_tests_of_the_bridge_run_beside_the_package(
    interface: str, skipped: set[str], tmp_path: Path
) -> None:
    tests = ROOT / "tests" / "envs" / "test_verifiers_bridge.py"
    chosen = ["-k", "not without_the_package", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    run(interface, tmp_path, "python", "-m", "pytest", "-q", str(tests), *chosen, "--junitxml=report.xml")
    cases = list(ElementTree.parse(tmp_path / "report.xml").iter("testcase"))
    assert len(cases) == 10
    assert {case.get("name") for case in cases if case.find("skipped") is not None} == skipped
