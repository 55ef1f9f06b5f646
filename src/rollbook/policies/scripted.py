"""A policy that follows a script: for tests, for teachers, for trying an environment without a model."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rollbook.errors import UsageError
from rollbook.records.turns import Usage
from rollbook.rollouts.failures import is_cancellation
from rollbook.rollouts.types import Completion, FailureKind, Message, Request, RolloutFailure

Script = Callable[[Request], "str | Message | Completion | Awaitable[str | Message | Completion]"]


class ScriptedPolicy:
    """Answers with what `script` returns for a request, or with the replies of a list, turn by turn."""

    def __init__(self, script: Script | str | Sequence[str | Message], *, delay: float = 0.0) -> None:
        self._script = [script] if isinstance(script, str) else script
        if not callable(self._script) and not self._script:
            raise UsageError("a script needs at least one reply")
        self._delay = delay

    async def act(self, request: Request) -> Completion:
        if self._delay:
            await asyncio.sleep(self._delay)
        answer: Any
        if callable(self._script):
            answer = await self._called(self._script, request)
        else:
            answer = self._script[min(request.turn, len(self._script) - 1)]
        return _completion(answer, request)

    @staticmethod
    async def _called(script: Script, request: Request) -> Any:
        try:
            answer = script(request)
            return await answer if inspect.isawaitable(answer) else answer
        except RolloutFailure:
            raise
        except BaseException as error:
            if is_cancellation(error):
                raise
            message = f"the script raised {type(error).__name__}: {error}"
            raise RolloutFailure(FailureKind.BAD_ANSWER, message) from error

    async def close(self) -> None:
        return None


def _completion(answer: Any, request: Request) -> Completion:
    if isinstance(answer, Completion):
        return answer
    if not isinstance(answer, str | dict):
        why = f"the script answered {type(answer).__name__}; it must be text, a message or a Completion"
        raise RolloutFailure(FailureKind.BAD_ANSWER, why)
    reply = {"content": answer} if isinstance(answer, str) else answer
    message = {"role": "assistant", **reply}
    # Without a tokenizer, words stand in for tokens: enough to see that counting works.
    input_tokens = sum(len(str(m.get("content", "")).split()) for m in request.messages)
    output_tokens = len(str(message.get("content", "")).split())
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    usage = Usage(input_tokens=input_tokens, output_tokens=output_tokens)
    return Completion(message=message, finish_reason=reason, usage=usage, model="scripted")
