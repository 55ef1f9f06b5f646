"""`rollbook collect` against the real thing: vLLM on the CPU serving SmolLM2-135M-Instruct.

What a trainer needs must be in the rows: the tokens that were sampled, and how likely they were. Everything
is collected by the command itself, as a user would. `make test-vllm` makes what this needs.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from collecting import assert_exactly_once, results
from models.setup_smollm2 import MODEL
from models.setup_smollm2 import is_ready as model_is_ready
from rollbook.collect.files import CollectionFiles
from rollbook.records.progress import Progress, read_progress

sys.path.insert(0, str(Path(__file__).parent))  # `vllm.setup_vllm` might be looked for in vLLM itself
from setup_vllm import ENVIRONMENT
from vllm_server import VLLMServer, serving, tail

pytestmark = pytest.mark.vllm

HERE = Path(__file__).resolve().parent
ROLLBOOK = Path(sys.executable).with_name("rollbook")
PATIENCE = 1800.0  # eight minutes on a busy machine with two cores; only a hang takes longer
IN_PARALLEL = 32
TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
# vLLM computes in bfloat16 here, the check in float32.
MEAN_DIFFERENCE = 0.1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[VLLMServer]:
    if not (ENVIRONMENT.is_ready() and model_is_ready()):
        pytest.fail("vLLM or the model is missing or out of date; run `make test-vllm`", pytrace=False)
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    failed_before = request.session.testsfailed
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with serving(MODEL, log, *tools) as up:
        yield up
    if request.session.testsfailed > failed_before:
        print(f"the end of {log}:\n{tail(log)}")


class Collection:
    """A directory with a `rollbook.yaml` of one agent, and the command typed in it."""

    def __init__(self, directory: Path, server: VLLMServer, env: dict[str, Any], **policy: Any) -> None:
        self.directory = directory
        self.output = directory / "out.jsonl"
        known = {"kind": "openai", "base_url": f"{server.url}/v1", "model": server.model}
        agent = {"env": env, "policy": {**known, **policy}}
        (directory / "rollbook.yaml").write_text(yaml.safe_dump({"agents": {"small": agent}}))

    def start(self, *words: str) -> subprocess.Popen[str]:
        own = ["+agent_name=small", f"+output_jsonl_fpath={self.output.name}"]
        with (self.directory / "said.txt").open("a") as said:
            return subprocess.Popen(
                [ROLLBOOK, "collect", *own, *words],
                cwd=self.directory,
                stdout=said,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def run(self, *words: str) -> Progress:
        """To its end, which must be a complete one."""
        process = self.start(*words)
        assert process.wait(PATIENCE) == 0, self.said
        return self.progress

    @property
    def said(self) -> str:
        return (self.directory / "said.txt").read_text()

    @property
    def progress(self) -> Progress:
        return read_progress(CollectionFiles(self.output).progress)

    def lines(self) -> list[bytes]:
        return self.output.read_bytes().split(b"\n")[:-1] if self.output.exists() else []


def words(limit: int, repeats: int, *, parallel: int = IN_PARALLEL, tokens: int = 16) -> list[str]:
    return [
        f"+limit={limit}",
        f"+num_repeats={repeats}",
        f"+num_samples_in_parallel={parallel}",
        f"+responses_create_params.max_output_tokens={tokens}",
        "+responses_create_params.temperature=1.0",
    ]


def expected(env: str, limit: int, repeats: int) -> set[str]:
    return {
        f"{env}-0-{task:06d}#{repeat}" for task, repeat in itertools.product(range(limit), range(repeats))
    }


def read_back(texts: list[list[int]], samples: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    asked = json.dumps({"model": str(MODEL), "texts": texts, "samples": samples})
    done = subprocess.run(
        [ENVIRONMENT.python, HERE / "read_back.py"],
        input=asked,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def text_of(row: dict[str, Any]) -> str:
    (item,) = row["response"]["output"]
    (part,) = item["content"]
    return str(part["text"])


def assert_tokens(item: dict[str, Any]) -> None:
    prompt, generated, log_probs = (item[name] for name in TOKEN_FIELDS)
    assert prompt and generated
    assert len(generated) == len(log_probs)
    assert all(isinstance(token, int) for token in prompt + generated)
    assert all(log_prob <= 0 for log_prob in log_probs)


def test_two_hundred_rollouts_with_tokens_and_logprobs(server: VLLMServer, tmp_path: Path) -> None:
    collection = Collection(tmp_path, server, {"name": "arithmetic"}, api="chat", return_tokens=True)
    generated_before = server.metric("generation_tokens_total")
    process = collection.start(*words(50, 4))
    at_once = most_at_once(process, collection, server)
    assert process.returncode == 0, collection.said
    assert_exactly_once(collection.output, expected("arithmetic", 50, 4))
    rows = results(collection.output)
    assert all(0 <= row["reward"] <= 1 for row in rows)

    items = [row["response"]["output"][0] for row in rows]
    for row, item in zip(rows, items, strict=True):
        assert_tokens(item)
        usage = row["response"]["usage"]
        assert usage["input_tokens"] == len(item["prompt_token_ids"])
        assert usage["output_tokens"] == len(item["generation_token_ids"])
    generated = sum(len(item["generation_token_ids"]) for item in items)
    assert generated == server.metric("generation_tokens_total") - generated_before, "rollouts were run twice"

    assert_read_back(rows, items)
    assert_repeats_differ(rows)
    assert at_once["engine"] > IN_PARALLEL / 2, f"the engine never had more to do: {at_once}"
    assert at_once["collector"] > IN_PARALLEL / 2
    report(collection.progress)


def most_at_once(
    process: subprocess.Popen[str], collection: Collection, server: VLLMServer
) -> dict[str, float]:
    """How many requests were in flight at most, as the engine and as the progress file tell it."""
    most = {"engine": 0.0, "collector": 0.0}
    end = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < end:
        waiting = server.metric("num_requests_waiting")
        most["engine"] = max(most["engine"], server.metric("num_requests_running") + waiting)
        if CollectionFiles(collection.output).progress.exists():
            most["collector"] = max(most["collector"], collection.progress.in_flight)
        time.sleep(0.2)
    return most


def assert_read_back(rows: list[dict[str, Any]], items: list[dict[str, Any]]) -> None:
    """The tokens say what the row says, and the model holds them for as likely as the row does."""
    some = items[:8]
    prompts = [item["prompt_token_ids"] for item in items]
    replies = [item["generation_token_ids"] for item in items]
    back = read_back(prompts + replies, list(zip(prompts[:8], replies[:8], strict=True)))
    asked, said = back["texts"][: len(rows)], back["texts"][len(rows) :]
    for row, prompt, reply in zip(rows, asked, said, strict=True):
        assert row["responses_create_params"]["input"][0]["content"] in prompt
        # A reply cut off within a character ends in a mark that the engine keeps back.
        assert reply.rstrip("\ufffd") == text_of(row).rstrip("\ufffd")
    theirs = [number for item in some for number in item["generation_log_probs"]]
    ours = [number for numbers in back["log_probs"] for number in numbers]
    differences = [abs(one - other) for one, other in zip(theirs, ours, strict=True)]
    print(f"log probs: {len(differences)}, mean difference {statistics.mean(differences):.4f}")
    assert statistics.mean(differences) < MEAN_DIFFERENCE


def assert_repeats_differ(rows: list[dict[str, Any]]) -> None:
    replies: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        replies[row["id"]].add(text_of(row))
    # At temperature 1 four equal answers to one sum may happen; to most of fifty they may not.
    assert sum(len(different) > 1 for different in replies.values()) > len(replies) / 2


def report(progress: Progress) -> None:
    print(
        f"{progress.done} rollouts in {progress.elapsed_s:.1f} s, {progress.output_tokens} tokens, "
        f"{progress.output_tokens / progress.elapsed_s:.0f} tok/s, mean reward {progress.reward_mean}"
    )


def test_the_responses_api(server: VLLMServer, tmp_path: Path) -> None:
    collection = Collection(tmp_path, server, {"name": "arithmetic"}, api="responses")
    progress = collection.run(*words(10, 2))
    assert_exactly_once(collection.output, expected("arithmetic", 10, 2))
    for row in results(collection.output):
        assert 0 <= row["reward"] <= 1
        assert text_of(row)
        assert 0 < row["response"]["usage"]["output_tokens"] <= 16
    assert len({text_of(row) for row in results(collection.output)}) > 1
    report(progress)


def test_a_killed_collection_goes_on_exactly_once(server: VLLMServer, tmp_path: Path) -> None:
    collection = Collection(tmp_path, server, {"name": "arithmetic"}, return_tokens=True)
    asked = words(20, 4, parallel=8)
    process = collection.start(*asked)
    end = time.monotonic() + PATIENCE
    while len(collection.lines()) < 10 and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -9, collection.said
    before = collection.lines()
    assert 10 <= len(before) < 80

    progress = collection.run(*asked)
    assert_exactly_once(collection.output, expected("arithmetic", 20, 4))
    assert collection.lines()[: len(before)] == before
    assert progress.done_before == len(before)
    for row in results(collection.output):
        assert_tokens(row["response"]["output"][0])


def test_several_turns_with_a_tool(server: VLLMServer, tmp_path: Path) -> None:
    """So small a model calls no tool of its own accord; when it must, the engine makes it write a call."""
    env = {"name": "calculator", "max_turns": 3, "operations": 1, "max_value": 9}
    collection = Collection(tmp_path, server, env, api="chat", return_tokens=True)
    collection.run(*words(4, 2, tokens=64), "+responses_create_params.tool_choice=required")
    assert_exactly_once(collection.output, expected("calculator", 4, 2))
    rows = results(collection.output)
    for row in rows:
        output = row["response"]["output"]
        sampled = [item for item in output if "generation_token_ids" in item]
        assert len(sampled) == row["num_turns"] <= 3
        for item in sampled:
            assert_tokens(item)
        lengths = [len(item["prompt_token_ids"]) for item in sampled]
        assert lengths == sorted(set(lengths)), "each turn must see more than the one before"
        assert_calls_are_answered(output)
    assert any(row["num_turns"] > 1 for row in rows), "no rollout had a second turn"


def assert_calls_are_answered(output: list[dict[str, Any]]) -> None:
    """Every call but those of the last turn is followed by its result."""
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    answers = [item["call_id"] for item in output if item["type"] == "function_call_output"]
    assert all(calls)
    assert answers == calls[: len(answers)]
