"""Any OpenAI-compatible endpoint, by chat completions or by responses."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rollbook.errors import UsageError
from rollbook.policies.conversion import (
    chat_params,
    chat_tools,
    extra_body,
    from_chat,
    one_reply,
    responses_params,
    responses_tools,
    to_chat,
)
from rollbook.rollouts.types import Completion, FailureKind, Request, RolloutFailure
from rollbook.rollouts.usage import usage_from

# What decoding an answer of another shape can raise; a ValueError, of bytes that are not UTF-8.
_OTHER_SHAPE = (
    msgspec.MsgspecError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    ValueError,
)
_GAVE_UP = ("error", "abort")  # finish reasons of engines that did not get to the end


class OpenAISettings(msgspec.Struct, kw_only=True):
    base_url: str
    model: str
    kind: Literal["openai"] = "openai"
    api: Literal["chat", "responses"] = "chat"
    api_key_env: str | None = None  # the NAME of an environment variable; keys are never in a file
    params: dict[str, Any] = {}  # sampling parameters for every request; a row's own win
    return_tokens: bool = False  # ask the engine for token ids and logprobs, which vLLM gives
    max_tokens_key: str = "max_tokens"  # some servers want max_completion_tokens
    connect_timeout_s: float = 30.0
    total_timeout_s: float | None = 3600.0
    max_response_bytes: int = 64 << 20  # of an answer, after it was unpacked
    headers: dict[str, str] = {}


class _Message(msgspec.Struct):
    content: str | list[dict[str, Any]] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None


class _ChatAnswer(msgspec.Struct):
    choices: list[_Choice]
    id: str | None = None
    model: str | None = None
    usage: Any = None  # numbers that nothing depends on: odd ones must not spoil a good answer
    prompt_token_ids: list[int] | None = None
    created: Any = None


class _ResponsesAnswer(msgspec.Struct):
    output: list[dict[str, Any]]
    id: str | None = None
    model: str | None = None
    status: str | None = None
    incomplete_details: dict[str, Any] | None = None
    error: Any = None
    usage: Any = None
    created_at: Any = None


_decode_chat = msgspec.json.Decoder(_ChatAnswer).decode
_decode_responses = msgspec.json.Decoder(_ResponsesAnswer).decode


class OpenAIPolicy:
    def __init__(self, settings: OpenAISettings, *, where: str = "policy") -> None:
        self._settings = settings
        self._by_chat = settings.api == "chat"
        if settings.return_tokens and not self._by_chat:
            raise UsageError(
                f"{where}.return_tokens needs {where}.api=chat; by responses servers give no logprobs "
                "for a tool call"
            )
        path = "/chat/completions" if self._by_chat else "/responses"
        key = f"{where}.api_key_env"
        # Not at the top of the file: those who only describe a policy need no HTTP, which is long to import.
        from rollbook.policies.http import Endpoint, bearer, check_limit, check_timeouts, checked_url

        check_timeouts(settings.connect_timeout_s, settings.total_timeout_s, where)
        check_limit(settings.max_response_bytes, where)
        has_key = settings.api_key_env is not None
        self._endpoint = Endpoint(
            checked_url(settings.base_url, f"{where}.base_url", has_key=has_key) + path,
            headers={**settings.headers, **bearer(settings.api_key_env, key)},
            connect_timeout_s=settings.connect_timeout_s,
            total_timeout_s=settings.total_timeout_s,
            max_response_bytes=settings.max_response_bytes,
            refusal_hint=_about_the_key(settings.api_key_env, key),
        )

    async def act(self, request: Request) -> Completion:
        try:
            body = self._chat_body(request) if self._by_chat else self._responses_body(request)
        except (TypeError, ValueError, AttributeError) as error:  # of another shape than the API's
            why = f"the row's parameters make no request ({type(error).__name__}: {error})"
            raise RolloutFailure(FailureKind.INVALID_REQUEST, why) from error
        answer = await self._endpoint.post(body)
        try:
            completion = _from_chat_answer(answer) if self._by_chat else _from_responses_answer(answer)
            return _refuse_misaligned_tokens(completion, are_wanted=self._settings.return_tokens)
        except _OTHER_SHAPE as error:
            raise self._endpoint.not_the_protocol(answer, error) from None

    async def close(self) -> None:
        await self._endpoint.close()

    def _chat_body(self, request: Request) -> dict[str, Any]:
        settings = self._settings
        sampling = chat_params(self._params(request))
        if settings.max_tokens_key != "max_tokens" and "max_tokens" in sampling:
            sampling[settings.max_tokens_key] = sampling.pop("max_tokens")
        body = {"model": settings.model, "messages": request.messages, **sampling}
        if request.tools:
            body["tools"] = chat_tools(request.tools)
        else:  # servers refuse a choice between no tools
            body.pop("tool_choice", None)
            body.pop("parallel_tool_calls", None)
        if settings.return_tokens:
            body |= {"logprobs": True, "return_token_ids": True}
        return body

    def _responses_body(self, request: Request) -> dict[str, Any]:
        params = self._params(request)
        body = {
            **responses_params(params),
            "model": self._settings.model,
            "input": from_chat(request.messages),
        }
        if request.tools:
            body["tools"] = responses_tools(request.tools)
        return body | extra_body(params)

    def _params(self, request: Request) -> dict[str, Any]:
        """The row's sampling parameters over the policy's; rows of this ecosystem hold many nulls."""
        own = {key: value for key, value in request.params.items() if value is not None}
        return {**self._settings.params, **own}


def _about_the_key(variable: str | None, key: str) -> str:
    if variable is None:
        return f"no key is sent; type export MY_API_KEY=... and set {key}: MY_API_KEY"
    return f"the key comes from {key}, now {variable!r}"


def _from_chat_answer(data: bytes) -> Completion:
    answer = _decode_chat(data)
    choice = answer.choices[0]
    if choice.finish_reason in _GAVE_UP:
        why = f"the server answered 200 and finish_reason {choice.finish_reason!r}"
        raise RolloutFailure(FailureKind.SERVER_ERROR, why)
    reply = choice.message
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or reply.refusal or ""}
    if reasoning := reply.reasoning_content or reply.reasoning:
        message["reasoning_content"] = reasoning
    if reply.tool_calls:
        message["tool_calls"] = reply.tool_calls
    logprobs = choice.logprobs.content if choice.logprobs else None
    return _refuse_empty(
        Completion(
            message=message,
            finish_reason=choice.finish_reason or "stop",
            usage=usage_from(answer.usage, "prompt_tokens", "completion_tokens"),
            model=answer.model,
            id=answer.id,
            prompt_token_ids=answer.prompt_token_ids,
            token_ids=choice.token_ids,
            logprobs=[item.logprob for item in logprobs] if logprobs is not None else None,
            created_at=_time(answer.created),
        )
    )


def _from_responses_answer(data: bytes) -> Completion:
    answer = _decode_responses(data)
    if answer.status not in (None, "completed", "incomplete"):
        raise RolloutFailure(
            FailureKind.SERVER_ERROR,
            f"the server answered 200 and status {answer.status!r}, error {answer.error!r}",
        )
    message = one_reply(to_chat(answer.output))
    reason = (answer.incomplete_details or {}).get("reason")
    if reason in _GAVE_UP:
        raise RolloutFailure(
            FailureKind.SERVER_ERROR, f"the server answered 200 and incomplete_details.reason {reason!r}"
        )
    if reason is not None:
        finish_reason = "length" if reason == "max_output_tokens" else str(reason)
    else:
        finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
    last = answer.output[-1] if answer.output else {}  # where training servers put what was sampled
    return _refuse_empty(
        Completion(
            message=message,
            finish_reason=finish_reason,
            usage=usage_from(answer.usage),
            model=answer.model,
            id=answer.id,
            prompt_token_ids=last.get("prompt_token_ids"),
            token_ids=last.get("generation_token_ids"),
            logprobs=last.get("generation_log_probs"),
            created_at=_time(answer.created_at),
        )
    )


def _time(created: Any) -> float | None:
    """When the server says that it answered; an odd time spoils no answer."""
    is_number = isinstance(created, int | float) and not isinstance(created, bool)
    return float(created) if is_number else None


def _refuse_empty(completion: Completion) -> Completion:
    """Refuse an answer that holds no generation at all: it would earn a reward of zero, which is made up.

    A model that ends at once says nothing too, but the token by which it ended is counted or listed; of an
    answer that was blocked, what is counted was taken away.
    """
    message = completion.message
    reason = completion.finish_reason
    if message["content"] or message.get("reasoning_content") or message.get("tool_calls"):
        return completion
    if reason == "content_filter":
        why = f"the server's filter blocked the answer (finish_reason {reason!r}), and nothing of it came"
        raise RolloutFailure(FailureKind.BAD_ANSWER, why)
    counted = completion.usage is not None and completion.usage.output_tokens > 0
    sampled = counted or completion.token_ids or completion.logprobs
    if reason != "length" and not sampled:
        raise ValueError(f"it says nothing, and not a token of it was sampled; finish_reason {reason!r}")
    return completion


def _refuse_misaligned_tokens(completion: Completion, *, are_wanted: bool) -> Completion:
    """Refuse what nobody can train on: no tokens where they were asked for, or not a logprob for each."""
    ids, logprobs = completion.token_ids, completion.logprobs
    if are_wanted and not ids and not logprobs:
        why = (
            "return_tokens is set, and the server sent neither token ids nor logprobs "
            "(vLLM does; set return_tokens: false for other servers)"
        )
        raise RolloutFailure(FailureKind.BAD_ANSWER, why)
    if ids is not None and logprobs is not None and len(ids) != len(logprobs):
        why = f"the server sent {len(ids)} token ids and {len(logprobs)} logprobs for one answer"
        raise RolloutFailure(FailureKind.BAD_ANSWER, why)
    return completion
