"""One line of input becomes a task, one episode becomes a line of output.

Both keep the ecosystem's shape: `responses_create_params` in, `response` and `reward` out, the row's other
fields passed through. Each output line begins with our key, `{"_rb_key":"<task id>#<repeat>"`, so that a
scan of prefixes can tell what is done without parsing a row.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
import orjson

from rollbook.collect.items import Item
from rollbook.policies.conversion import extra_body, from_chat, responses_tools, to_chat
from rollbook.records.identity import (
    DIGEST,
    KEY,
    METRICS,
    OWN_IDS,
    ROLLOUT_INDEX,
    STEPS,
    TASK_INDEX,
    rollout_key,
    task_digest,
)
from rollbook.records.plain import encode_exactly
from rollbook.records.turns import CUT_SHORT, OUT_OF_TOKENS, Turn, Usage
from rollbook.rollouts.types import Episode, Task

_OWN_FIELDS = frozenset(
    {KEY, DIGEST, TASK_INDEX, ROLLOUT_INDEX, STEPS, METRICS, "responses_create_params", "response", "reward"}
)
_NO_MODEL = "unknown"  # of a policy that names none; the API has no null here
_ID_OF = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_NO_METRICS = ("stop_reason", "num_turns", "logs")
# As quick as orjson, which makes floats of whole numbers past 64 bits.
_decode = msgspec.json.Decoder().decode


def make_task(item: Item, overrides: Mapping[str, Any], *, add_seed: bool) -> Task:
    row = _decode(item.line)
    digest = task_digest(row) if item.with_digest else None
    params = row["responses_create_params"]
    if overrides:
        params = row["responses_create_params"] = {**params, **overrides}
    if add_seed:
        params = row["responses_create_params"] = _with_seed(params, item.repeat)
    return Task(
        id=item.task_id,
        row=row,
        messages=to_chat(params["input"], params.get("instructions")),
        tools=params.get("tools") or [],
        params={key: value for key, value in params.items() if key not in ("input", "tools", "instructions")},
        repeat=item.repeat,
        digest=digest,
        reply=item.unjudged.reply if item.unjudged else None,
    )


def output_line(item: Item, task: Task, episode: Episode) -> bytes:
    row = task.row
    line: dict[str, Any] = {
        KEY: rollout_key(item.task_id, item.repeat),
        TASK_INDEX: row.get(TASK_INDEX, item.row),
        ROLLOUT_INDEX: item.repeat,
        "reward": episode.reward,
        **({} if task.digest is None else {DIGEST: task.digest}),
        "responses_create_params": _params_seen(task, episode),
        "response": episode.response or _response(task, episode),
    }
    if len(episode.turns) > 1 and episode.turns[0].finish_reason is not None:
        # Of an episode played elsewhere only the whole is known.
        line[STEPS] = [_step(number, turn, episode) for number, turn in enumerate(episode.turns)]
    metrics = []
    for name, value in _results(episode):
        is_free = name not in line and name not in row
        field = name if is_free else _free_name(name, line, row)
        line[field] = value
        if name not in _NO_METRICS:
            metrics.append(field)
    if metrics:
        line[METRICS] = metrics
    for key, value in row.items():
        if key not in line and key not in (STEPS, METRICS):
            line[key] = value
    return encode_exactly(line)


def response_so_far(task: Task, episode: Episode) -> bytes:
    """The `response` of a rollout that failed, as JSON; nothing where nobody replied."""
    replies = [msgspec.structs.replace(turn, messages=turn.messages[:1]) for turn in episode.turns]
    # What an environment says may be of no shape that a response has: then the replies alone are kept.
    for turns in (episode.turns, replies):
        if episode.response or turns:
            with suppress(Exception):
                response = episode.response or _response(task, msgspec.structs.replace(episode, turns=turns))
                return encode_exactly(response)
    return b""


def _params_seen(task: Task, episode: Episode) -> dict[str, Any]:
    """The row's own, unless the environment opened with other messages: then what the policy was shown."""
    params: dict[str, Any] = task.row["responses_create_params"]
    instructions, prompt = params.get("instructions"), episode.prompt
    # Not `task.messages`, which an environment may have changed in place.
    as_it_stands = prompt == params["input"] and not instructions  # saves most rows the conversion
    if prompt and not as_it_stands and prompt != to_chat(params["input"], instructions):
        if instructions and prompt[0] == {"role": "system", "content": instructions}:
            params = {**params, "input": from_chat(prompt[1:])}
        else:
            rest = {key: value for key, value in params.items() if key != "instructions"}
            params = {**rest, "input": from_chat(prompt)}
    if params.get("tools") and episode.response is None and episode.tools != params["tools"]:
        params = {**params, "tools": responses_tools(episode.tools)}
    return params


def _results(episode: Episode) -> list[tuple[str, Any]]:
    """What the episode says beside its reward; a metric of several turns is its last value."""
    metrics: dict[str, Any] = {}
    logs: dict[str, Any] = {}
    for number, turn in enumerate(episode.turns):
        metrics.update(turn.metrics)
        if turn.logs:
            logs[str(number)] = turn.logs
    metrics.update(episode.metrics)
    if episode.fields:
        metrics |= {name: value for name, value in episode.fields.items() if name not in _OWN_FIELDS}
    results = [("stop_reason", episode.stop_reason), ("num_turns", len(episode.turns) or 1), *metrics.items()]
    return [*results, ("logs", logs)] if logs else results


def _step(number: int, turn: Turn, episode: Episode) -> dict[str, Any]:
    """A turn as in the record of a run; its logs are beside the row's."""
    return {
        "step_idx": number,
        "ob_len": turn.usage.input_tokens if turn.usage else None,
        "ac_len": turn.usage.output_tokens if turn.usage else None,
        "reward": turn.reward,
        "episode_done": turn is episode.turns[-1],
        "metrics": turn.metrics,
    }


def _free_name(name: str, line: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """A field that the row brings is never written over; the result of an earlier collection is."""
    while name in line or (name in row and (KEY not in row or name in OWN_IDS or f"metric_{name}" in row)):
        name = f"metric_{name}"
    return name


def _response(task: Task, episode: Episode) -> dict[str, Any]:
    truncated = episode.stop_reason in (*CUT_SHORT, "content_filter")
    name = episode.response_id or f"resp_{task.id}_{task.repeat}"
    return {
        "id": name,
        "object": "response",
        "created_at": time.time() if episode.created_at is None else episode.created_at,
        "model": episode.model or _NO_MODEL,
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": _incomplete(episode.stop_reason)} if truncated else None,
        "error": None,
        "output": _with_ids(_output_items(episode), name),
        "tools": responses_tools(episode.tools),
        "tool_choice": task.params.get("tool_choice") or "auto",
        "parallel_tool_calls": task.params.get("parallel_tool_calls") is not False,
        "usage": None if episode.usage is None else _usage(episode.usage),
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def _output_items(episode: Episode) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    tokens: list[int] = []  # so far
    for turn in episode.turns:
        items += from_chat(turn.messages[:1])
        # Where trainers of this ecosystem look for what was sampled: on the last item of a reply.
        if turn.prompt_token_ids is not None:
            tokens = (tokens if turn.new_row is None else []) + turn.prompt_token_ids
            items[-1]["prompt_token_ids"] = tokens
        if turn.token_ids is not None:
            items[-1]["generation_token_ids"] = turn.token_ids
            tokens = tokens + turn.token_ids
        if turn.logprobs is not None:
            items[-1]["generation_log_probs"] = turn.logprobs
        items += from_chat(turn.messages[1:])
    return items


def _with_ids(items: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The items of an output, each with an id and a status, as clients of the Responses API expect them."""
    for number, item in enumerate(items):
        item["id"] = f"{_ID_OF.get(item['type'], 'item')}_{name}_{number}"
        item.setdefault("status", "completed")
    return items


def _incomplete(stop_reason: str) -> str | None:
    """The API knows two reasons; `stop_reason` of the row has the others."""
    if stop_reason in OUT_OF_TOKENS:
        return "max_output_tokens"
    return stop_reason if stop_reason == "content_filter" else None


def _with_seed(params: dict[str, Any], repeat: int) -> dict[str, Any]:
    """Each repeat its own seed, in the place engines of this ecosystem look for it."""
    metadata = params.get("metadata") or {}
    body = orjson.dumps({**extra_body(params), "seed": repeat}).decode()
    return {**params, "metadata": {**metadata, "extra_body": body}}
