"""The policy that samples with the trainer's own weights, in this process.

Tokens go on from tokens: the prompt of a turn is all tokens of the turns before and what the chat template
writes after them; nothing sampled is ever rendered again. Where the template cannot be continued the prompt
is rendered whole and `new_row` says why. What a request gets depends on its tokens, its seed, the weights and
the number of slots alone: not on what else is being sampled, and not on when it came.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from rollbook.errors import UsageError
from rollbook.policies.chat_format import ChatFormat
from rollbook.records.identity import derive_seed
from rollbook.records.turns import Usage, token_rows
from rollbook.rollouts.types import Completion, FailureKind, OutOfTokens, Request, RolloutFailure
from rollbook.samplers.engine import Engine, Sampled, Wanted
from rollbook.samplers.policy_kind import LocalSettings
from rollbook.samplers.sampling import Sampling, invalid, plain_params
from rollbook.samplers.selftest import (
    check_model,
    has_experts,
    longest_sequence,
    make_rows_independent,
)
from rollbook.samplers.stops import before_stop
from rollbook.samplers.thread import SamplingThread
from rollbook.train.checks import SelfTestError
from rollbook.train.loading import DTYPES, load_model
from rollbook.train.machine import choose_threads
from rollbook.train.model import Model
from rollbook.train.model_settings import ModelSettings

_log = logging.getLogger("rollbook")


class _Prompt(NamedTuple):
    tokens: list[int]
    first: int  # the tokens of them that were the prompt of the row's first turn
    history: int  # the tokens of the turns before this one
    new_row: str | None  # why they do not continue the tokens of the turns before


class LocalPolicy:
    """`model` is the trainer's (`train.model.Model`); it samples and trains in turn, never at once.

    `slots` sequences decode together, each of at most `max_length` tokens, prompts and replies; that is
    `max_episode_tokens` by default, or else all the positions of the model. `settings` is where a config
    has these limits, for messages.
    """

    def __init__(
        self,
        model: Model,
        chat_format: ChatFormat,
        *,
        sampling: Sampling,
        slots: int,
        max_length: int | None = None,
        training: bool = True,
        version: int = 0,
        name: str | None = None,
        settings: str = "policy",
        steps_per_look: int | None = None,
    ) -> None:
        self._format = chat_format
        self._sampling, self._training, self._name = sampling, training, name
        if training:
            sampling.check_training()
        self._settings, self._longest = settings, longest_sequence(model)
        self.max_length = _length(max_length or sampling.max_episode_tokens, model.positions, settings)
        self.difference = check_model(model, self.max_length)  # to a plain forward pass; refused if large
        self._shared = _Shared(model, chat_format, slots, self.max_length, steps_per_look, version)
        self._shared.check_independence(model.base.config.get_text_config(), refuse=training)

    @property
    def version(self) -> int:
        """The number of training steps behind the weights."""
        return self._shared.version

    @property
    def chat_format(self) -> ChatFormat:
        return self._format

    @property
    def cache_bytes(self) -> int:
        """The memory of the slots."""
        return self._shared.engine.cache_bytes

    def update(self, version: int) -> dict[str, float]:
        """The weights have changed: forget what was computed with the old ones."""
        return self._shared.update(version)

    def with_sampling(self, *, training: bool = False, **changes: Any) -> LocalPolicy:
        """A policy that samples otherwise, such as greedily in an eval, on the same slots and weights."""
        other = object.__new__(LocalPolicy)
        other.__dict__.update(self.__dict__)
        other._sampling = msgspec.structs.replace(self._sampling, **changes)
        other._training = training
        if training:
            other._sampling.check_training()
        return other

    async def act(self, request: Request) -> Completion:
        sampling = self._sampling.asked(request.params)
        if self._training:
            try:
                sampling.check_training()
            except ValueError as error:
                raise invalid(str(error)) from None
        prompt = self._prompt(request)
        seed = _seed(request)
        wanted = Wanted(
            prompt.tokens,
            seed=seed,
            max_tokens=self._room(request, len(prompt.tokens), sampling),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop=sampling.stop,
            first=prompt.first,
            history=prompt.history,
        )
        version = self.version
        sampled = await self._shared.thread.sample(wanted)
        if sampled.finish_reason == "not_finite":
            why = f"the model's logits at version {version} are not finite numbers"
            raise RolloutFailure(FailureKind.BAD_ANSWER, why)
        completion = self._completion(request, prompt.tokens, sampled, sampling)
        completion.seed, completion.policy_version, completion.new_row = seed, version, prompt.new_row
        return completion

    async def close(self) -> None:
        await asyncio.to_thread(self._shared.thread.close)

    def _prompt(self, request: Request) -> _Prompt:
        turns = request.turns
        if not turns:
            return self._whole(request, None)
        if any(turn.prompt_token_ids is None or not turn.token_ids for turn in turns):
            return self._whole(request, "a turn before has no token ids")
        row = token_rows(turns)[-1]
        delta = self._format.delta(
            turns[-1].messages[1:],
            stopped=row.token_ids[-1] in self._format.stop_ids,
            tools=request.tools,
            reply=turns[-1].reply,
        )
        if delta is None:
            return self._whole(request, self._format.why_no_delta)
        _, first, _ = row.turns[0]
        return _Prompt([*row.token_ids, *delta], first, len(row.token_ids), None)

    def _whole(self, request: Request, new_row: str | None) -> _Prompt:
        tokens = self._format.prompt(request.messages, request.tools)
        return _Prompt(tokens, len(tokens), 0, new_row)

    def _room(self, request: Request, prompt: int, sampling: Sampling) -> int:
        """How many tokens may be sampled."""
        limit, name = self.max_length, "max_length"
        if sampling.max_episode_tokens is not None and sampling.max_episode_tokens <= limit:
            limit, name = sampling.max_episode_tokens, "max_episode_tokens"
        if prompt < limit:
            return min(sampling.max_tokens, limit - prompt)
        name = f"{self._settings}.{name}"
        advice = "the model takes no more" if limit == self._longest else f"raise {name}"
        why = f"the prompt has {prompt} tokens, and {name} allows {limit} with the reply; {advice}"
        raise OutOfTokens(why) if request.turns else invalid(why)

    def _completion(
        self, request: Request, prompt: list[int], sampled: Sampled, sampling: Sampling
    ) -> Completion:
        parsed = self._format.parse(
            sampled.token_ids, prompt_ids=prompt, tools=request.tools, turn=request.turn
        )
        message, reason = parsed.message, sampled.finish_reason
        if sampling.stop and isinstance(message.get("content"), str):
            message["content"] = before_stop(message["content"], sampling.stop)
        if message.get("tool_calls") and reason == "stop":
            reason = "tool_calls"
        metrics: dict[str, Any] = {"entropy": sum(sampled.entropies) / len(sampled.entropies)}
        if request.tools:
            metrics["format/tool_error"] = float(parsed.broken)
        return Completion(
            message=message,
            finish_reason=reason,
            usage=Usage(input_tokens=len(prompt), output_tokens=len(sampled.token_ids)),
            model=self._name,
            prompt_token_ids=prompt,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            temperature=sampling.temperature,
            metrics=metrics,
        )


class _Shared:
    """What all policies on one model have in common: the slots, the thread, the version of the weights."""

    def __init__(
        self, model: Model, chat_format: ChatFormat, slots: int, length: int, steps: int | None, version: int
    ) -> None:
        decode = partial(
            chat_format.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        self.engine = Engine(
            model.base,
            slots=slots,
            length=length,
            stop_ids=sorted(chat_format.stop_ids),
            decode=decode,
            steps_per_look=steps,
        )
        self.thread = SamplingThread(self.engine)
        self.version = version

    def check_independence(self, config: Any, *, refuse: bool) -> None:
        if not has_experts(config) and make_rows_independent(self.engine):
            return
        family = config.model_type
        why = f"what a {family} model samples for a request depends on the requests that are sampled with it"
        if refuse:
            raise SelfTestError(
                f"{why}, so a run could not be repeated or resumed bit for bit. Choose a dense model (one "
                "without experts); `rollbook collect` can sample this one"
            )
        _log.warning("%s: in its last digits, and seldom in a token", why)

    def update(self, version: int) -> dict[str, float]:
        self.thread.rest()
        self.engine.forget()
        self.version = version
        return {}


def _seed(request: Request) -> int:
    """The request's, else one that its parameters name, else one by chance, which the record keeps."""
    if request.seed is not None:
        return request.seed
    named = plain_params(request.params).get("seed")
    return secrets.randbits(62) if named is None else derive_seed(int(named), request.turn)


def _length(wanted: int | None, positions: int | None, settings: str) -> int:
    name = f"{settings}.max_length"
    if wanted is None and positions is None:
        raise UsageError(f"the model's config does not say how long a sequence may be; set {name}")
    if wanted is None or positions is None:
        return wanted or positions or 0
    if wanted > positions:
        raise UsageError(f"{name} is {wanted}, but the model has {positions} positions; lower it")
    return wanted


def open_local(settings: LocalSettings) -> LocalPolicy:
    """The model of `policy: {kind: local}`, loaded onto the GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    directory = settings.directory()
    source = ModelSettings(path=str(directory), chat_template=settings.chat_template, dtype=dtype)
    model = load_model(source, seed=0, dtype=DTYPES[dtype])
    model.model.to(device)
    torch.set_num_threads(choose_threads(model.count()[0], device))
    chat_format = ChatFormat(model.tokenizer, response_template=settings.response_template)
    return LocalPolicy(
        model,
        chat_format,
        sampling=settings.sampling(),
        slots=settings.slots,
        max_length=settings.max_length,
        training=False,
        name=settings.path or str(directory),
    )
