"""The local policy: chat in, chat out, tokens that go on from tokens, one thread for every episode."""

from __future__ import annotations

import asyncio
import string
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rollbook.errors import UsageError
from rollbook.policies.chat_format import ChatFormat
from rollbook.records.turns import token_rows
from rollbook.rollouts.episode import play
from rollbook.rollouts.types import (
    Completion,
    Episode,
    FailureKind,
    Feedback,
    Message,
    Opening,
    Request,
    RolloutFailure,
    Task,
)
from rollbook.samplers.local import LocalPolicy
from rollbook.samplers.sampling import Sampling
from rollbook.samplers.thread import SamplerError
from rollbook.tiny import write_tiny_tokenizer
from rollbook.train.checks import SelfTestError
from rollbook.train.model import Model
from samplers.tiny import CLOSE, tiny_model

LETTERS = string.ascii_lowercase + " "


@pytest.fixture(scope="module")
def chat_format(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), LETTERS))


@pytest.fixture(scope="module")
def model(chat_format: ChatFormat) -> Model:
    return Model(tiny_model(vocab_size=len(chat_format.tokenizer)), chat_format.tokenizer)


def policy_of(model: Model, chat_format: ChatFormat, **options: Any) -> LocalPolicy:
    sampling = {
        "max_tokens": 12,
        **{key: options.pop(key) for key in list(options) if key in Sampling.__struct_fields__},
    }
    return LocalPolicy(model, chat_format, sampling=Sampling(**sampling), **{"slots": 8, **options})


def asked(text: str, *, seed: int = 1, **params: Any) -> Request:
    return Request(messages=({"role": "user", "content": text},), seed=seed, params=params)


class Talk:
    """An environment that answers a few times."""

    def __init__(self, turns: int = 3) -> None:
        self.turns, self.replies = turns, []

    def start(self, task: Task) -> Opening:
        return Opening(messages=task.messages)

    def step(self, message: Message) -> Feedback:
        self.replies.append(message)
        done = len(self.replies) == self.turns
        answer = [] if done else [{"role": "user", "content": "abc"[: len(self.replies)]}]
        return Feedback(reward=1.0, done=done, messages=answer)

    def close(self) -> None:
        return None


async def talk(policy: LocalPolicy, count: int, turns: int = 3) -> list[Episode]:
    tasks = [
        Task(
            id=str(number),
            row={},
            messages=[{"role": "user", "content": "ab"[: 1 + number % 2]}],
            seed=number,
        )
        for number in range(count)
    ]
    return list(await asyncio.gather(*(play(Talk(turns), policy, task) for task in tasks)))


def check_tokens(model: Model, episode: Episode) -> None:
    """Logprobs of all sampled tokens against one plain forward pass over the row."""
    for row in token_rows(episode.turns):
        with torch.no_grad():
            logits = model.base(torch.tensor([row.token_ids])).logits[0]
        for index, start, end in row.turns:
            turn = episode.turns[index]
            assert turn.token_ids == row.token_ids[start:end]
            all_logprobs = (logits[start - 1 : end - 1] / (turn.temperature or 1)).log_softmax(-1)
            expected = all_logprobs.gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0]
            assert turn.logprobs == pytest.approx(expected.tolist(), abs=CLOSE)


def test_where_tools_are_offered_every_reply_says_whether_its_calls_can_be_read(tmp_path: Path) -> None:
    """So that the mean is the part that cannot: of random tokens some are the mark of a call."""
    chat = ChatFormat(write_tiny_tokenizer(tmp_path, "ab"))
    policy = policy_of(Model(tiny_model(vocab_size=len(chat.tokenizer)), chat.tokenizer), chat)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

    async def replies(tools: list[dict[str, Any]]) -> list[Completion]:
        requests = [msgspec.structs.replace(asked("ab", seed=seed), tools=tools) for seed in range(24)]
        return list(await asyncio.gather(*map(policy.act, requests)))

    key, with_tools = "format/tool_error", asyncio.run(replies([tool]))
    assert {completion.metrics[key] for completion in with_tools} == {0.0, 1.0}
    for completion in with_tools:
        assert completion.metrics[key] == float("tool_call>" in completion.message["content"])
    assert not any(key in completion.metrics for completion in asyncio.run(replies([])))


def test_a_reply_says_all_about_itself(model: Model, chat_format: ChatFormat) -> None:
    policy = policy_of(model, chat_format, temperature=0.7, version=5, name="tiny")
    completion = asyncio.run(policy.act(asked("abc", seed=2**62 - 3)))
    prompt = chat_format.prompt([{"role": "user", "content": "abc"}])
    assert completion.prompt_token_ids == prompt
    assert completion.token_ids and completion.logprobs
    assert len(completion.token_ids) == len(completion.logprobs) <= 12
    stopped = completion.token_ids[-1] in chat_format.stop_ids
    assert completion.finish_reason == ("stop" if stopped else "length")
    assert (completion.temperature, completion.policy_version, completion.seed) == (0.7, 5, 2**62 - 3)
    assert (completion.model, completion.new_row) == ("tiny", None)
    assert completion.usage is not None
    assert completion.usage.input_tokens == len(prompt)
    assert completion.usage.output_tokens == len(completion.token_ids)
    assert completion.message["role"] == "assistant"
    assert completion.metrics["entropy"] > 0


def test_turns_continue_the_tokens_of_the_turns_before(model: Model, chat_format: ChatFormat) -> None:
    """Over several turns, some cut by their length, at a temperature other than 1; one row each (T1, T23)."""
    policy = policy_of(model, chat_format, temperature=1.3, training=True)
    episodes = asyncio.run(talk(policy, 16))
    reasons = {turn.finish_reason for episode in episodes for turn in episode.turns}
    assert reasons == {"stop", "length"}
    for episode in episodes:
        assert [turn.new_row for turn in episode.turns] == [None] * 3
        assert len(token_rows(episode.turns)) == 1
        check_tokens(model, episode)
        for turn, after in zip(episode.turns, episode.turns[1:], strict=False):
            end = chat_format.tokenizer.eos_token_id
            assert turn.token_ids and after.prompt_token_ids
            assert (turn.token_ids[-1] == end) != (after.prompt_token_ids[0] == end)  # one end per reply


def test_a_template_that_cannot_be_continued_begins_a_new_row(model: Model, tmp_path: Path) -> None:
    rewrites = (
        "{% for message in messages %}<|{{ message.role }}|>"
        "{% if loop.last or message.role != 'assistant' %}{{ message.content }}{% endif %}<|im_end|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    chat_format = ChatFormat(write_tiny_tokenizer(tmp_path, LETTERS, template=rewrites))
    episodes = asyncio.run(talk(policy_of(model, chat_format), 4))
    for episode in episodes:
        assert episode.turns[0].new_row is None
        assert all("template" in str(turn.new_row) for turn in episode.turns[1:])
        assert len(token_rows(episode.turns)) == 3
        check_tokens(model, episode)


def test_hundreds_of_episodes_get_what_each_gets_alone(model: Model, chat_format: ChatFormat) -> None:
    policy = policy_of(model, chat_format, slots=32)
    together = asyncio.run(talk(policy, 200, turns=2))
    assert asyncio.run(talk(policy, 200, turns=2)) == together  # another event loop, the prefixes still there
    alone = asyncio.run(talk(policy_of(model, chat_format, slots=32), 3, turns=2))
    assert alone == together[:3]


def test_an_update_forgets_what_the_old_weights_computed(chat_format: ChatFormat) -> None:
    """The prompt is the same, the weights are not; so logprobs are those of a cold sampler (T19)."""
    model = Model(tiny_model(vocab_size=len(chat_format.tokenizer)), chat_format.tokenizer)
    policy = policy_of(model, chat_format)
    before = asyncio.run(policy.act(asked("abc")))
    with torch.no_grad():
        for weight in model.base.parameters():
            weight.add_(0.01 * torch.randn(weight.shape))
    policy.update(1)
    after = asyncio.run(policy.act(asked("abc")))
    assert (before.policy_version, after.policy_version, policy.version) == (0, 1, 1)
    assert after.logprobs != before.logprobs
    cold = asyncio.run(policy_of(model, chat_format).act(asked("abc")))
    assert (after.token_ids, after.logprobs) == (cold.token_ids, cold.logprobs)


def test_weights_that_change_without_an_update_are_found_out(chat_format: ChatFormat) -> None:
    model = Model(tiny_model(vocab_size=len(chat_format.tokenizer)), chat_format.tokenizer)
    policy = policy_of(model, chat_format)
    asyncio.run(policy.act(asked("abc")))
    with torch.no_grad():
        model.base.lm_head.weight.add_(0.1)
    with pytest.raises(SamplerError, match=r"call update\(\)"):
        asyncio.run(policy.act(asked("abc")))


def test_weights_cannot_change_while_sequences_are_sampled(model: Model, chat_format: ChatFormat) -> None:
    async def update_at_once(policy: LocalPolicy) -> None:
        waiting = asyncio.create_task(policy.act(asked("abc")))
        await asyncio.sleep(0)
        with pytest.raises(SamplerError, match="1 sequences are being sampled"):
            policy.update(1)
        await waiting
        policy.update(1)

    policy = policy_of(model, chat_format)
    asyncio.run(update_at_once(policy))
    assert policy.version == 1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"top_p": 0.9}, "top_p and top_k cannot be used in training"),
        ({"top_k": 5}, "top_p and top_k cannot be used in training"),
        ({"temperature": 0}, "every sample would be the same"),
        ({"frequency_penalty": 0.5}, "does not know the parameter 'frequency_penalty'; it knows"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_output_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_requests_that_training_could_not_use_are_refused(
    model: Model, chat_format: ChatFormat, params: dict[str, Any], message: str
) -> None:
    policy = policy_of(model, chat_format)
    with pytest.raises(RolloutFailure, match=message) as failure:
        asyncio.run(policy.act(asked("abc", **params)))
    assert failure.value.kind is FailureKind.INVALID_REQUEST


def test_training_with_a_part_of_the_distribution_is_refused(model: Model, chat_format: ChatFormat) -> None:
    """T3; an eval may."""
    for options in ({"top_p": 0.9}, {"top_k": 3}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match="cannot be used in training"):
            policy_of(model, chat_format, **options)
        policy_of(model, chat_format, training=False, **options)


def test_an_eval_samples_otherwise_on_the_same_slots(model: Model, chat_format: ChatFormat) -> None:
    policy = policy_of(model, chat_format)
    greedy = policy.with_sampling(temperature=0.0, max_tokens=5)
    first, second = (asyncio.run(greedy.act(asked("abc", seed=seed))) for seed in (1, 2))
    assert first.token_ids == second.token_ids
    assert first.temperature == 0.0
    assert len(first.token_ids or ()) <= 5
    policy.update(3)
    assert greedy.version == 3


def test_a_row_asks_for_its_own_sampling(model: Model, chat_format: ChatFormat) -> None:
    policy = policy_of(model, chat_format, training=False)
    params = {"max_output_tokens": 3, "temperature": 0.5, "tool_choice": "auto", "top_k": None, "stop": "zz"}
    completion = asyncio.run(policy.act(asked("abc", **params)))
    assert completion.temperature == 0.5
    assert len(completion.token_ids or ()) <= 3


def test_a_stop_string_ends_the_text_before_it(model: Model, chat_format: ChatFormat) -> None:
    """The text has it no more, the tokens have."""
    policy = policy_of(model, chat_format, max_tokens=60)
    free = [asyncio.run(policy.act(asked("abc", seed=seed))) for seed in range(8)]
    texts = [chat_format.tokenizer.convert_ids_to_tokens(one.token_ids) for one in free]
    seed, at = next(
        (seed, at)
        for seed, tokens in enumerate(texts)
        for at in range(1, len(tokens) - 1)
        if len(tokens[at]) == len(tokens[at + 1]) == 1
    )
    stop = "".join(texts[seed][at : at + 2])
    completion = asyncio.run(policy.act(asked("abc", seed=seed, stop=[stop])))
    assert completion.token_ids == (free[seed].token_ids or [])[: at + 2]
    assert completion.finish_reason == "stop"
    before = chat_format.parse(completion.token_ids[:at]).message["content"]
    assert completion.message["content"] == before
    assert chat_format.tokenizer.decode(completion.token_ids).endswith(stop)


def test_a_model_whose_rows_see_each_other_is_for_evals_only(
    chat_format: ChatFormat, caplog: pytest.LogCaptureFixture
) -> None:
    base = tiny_model("mixtral", vocab_size=len(chat_format.tokenizer), num_local_experts=4)
    experts = Model(base, chat_format.tokenizer)
    with pytest.raises(SelfTestError, match="could not be repeated or resumed bit for bit"):
        policy_of(experts, chat_format)
    policy = policy_of(experts, chat_format, training=False)
    assert "what a mixtral model samples for a request depends on the requests" in caplog.text
    assert asyncio.run(policy.act(asked("abc"))).token_ids


def test_too_long_a_prompt_is_refused_with_its_length(model: Model, chat_format: ChatFormat) -> None:
    policy = policy_of(model, chat_format, max_length=20)
    with pytest.raises(
        RolloutFailure, match=r"33 tokens, and policy\.max_length allows 20 .*; raise policy\.max_length"
    ) as failure:
        asyncio.run(policy.act(asked("a" * 30)))
    assert failure.value.kind is FailureKind.INVALID_REQUEST
    cut = asyncio.run(policy.act(asked("a" * 13, seed=3)))  # 16 tokens: room for four
    assert len(cut.token_ids or ()) <= 4
    with pytest.raises(UsageError, match=r"policy\.max_length is 500, but the model has 128 positions"):
        policy_of(model, chat_format, max_length=500)


def test_an_episode_ends_when_its_tokens_are_used_up(model: Model, chat_format: ChatFormat) -> None:
    """Prompts and replies of all turns count; the last reply is cut, and the episode by its length."""
    policy = policy_of(model, chat_format, max_episode_tokens=40, max_tokens=20)
    assert policy.max_length == 40
    with pytest.raises(
        RolloutFailure, match=r"max_episode_tokens allows 40 .* raise policy\.max_episode_tokens"
    ):
        asyncio.run(policy.act(asked("a" * 50)))
    episodes = asyncio.run(talk(policy, 12, turns=9))
    assert {episode.stop_reason for episode in episodes} <= {"length", "max_length"}
    for episode in episodes:
        check_tokens(model, episode)
        tokens = len(token_rows(episode.turns)[0].token_ids)
        assert tokens <= 40
        assert tokens == 40 or len(episode.turns) < 9


def test_an_error_in_the_thread_reaches_everybody(
    model: Model, chat_format: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who wait, and those who come later; nobody waits for ever (T34)."""
    policy = policy_of(model, chat_format, slots=2)

    def broken(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr("rollbook.samplers.engine.Engine.step", broken)

    async def several() -> list[Completion | BaseException]:
        waiting = [policy.act(asked("abc", seed=seed)) for seed in range(10)]
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)

    for answer in asyncio.run(several()):
        assert isinstance(answer, SamplerError)
        assert "OutOfMemoryError: no memory left" in str(answer)
    with pytest.raises(SamplerError, match="no memory left"):
        asyncio.run(policy.act(asked("abc")))
    with pytest.raises(SamplerError, match="no memory left"):
        policy.update(1)
    assert model.base.config._attn_implementation == "sdpa"  # the trainer's again


def test_a_cancelled_episode_gives_its_slot_back(model: Model, chat_format: ChatFormat) -> None:
    policy = policy_of(model, chat_format, slots=1, max_tokens=100)
    reference = asyncio.run(policy.act(asked("ab", seed=9)))

    async def cancelled() -> Completion:
        waiting = [asyncio.create_task(policy.act(asked("abc", seed=seed))) for seed in range(5)]
        await asyncio.sleep(0.01)
        for task in waiting:
            task.cancel()
        return await asyncio.wait_for(policy.act(asked("ab", seed=9)), 30)

    assert asyncio.run(cancelled()).token_ids == reference.token_ids
    policy.update(1)


def test_closing_ends_the_thread_and_those_who_wait(model: Model, chat_format: ChatFormat) -> None:
    async def close_early(policy: LocalPolicy) -> None:
        waiting = [asyncio.create_task(policy.act(asked("abc", seed=seed))) for seed in range(20)]
        await asyncio.sleep(0.005)
        await policy.close()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(answer, Completion | SamplerError) for answer in answers)
        assert any("closed" in str(answer) for answer in answers)
        with pytest.raises(SamplerError, match="has been closed"):
            await policy.act(asked("abc"))
        await policy.close()
        assert policy._shared.thread._thread is None

    asyncio.run(close_early(policy_of(model, chat_format, slots=1, max_tokens=100)))


def test_two_event_loops_at_once(model: Model, chat_format: ChatFormat) -> None:
    policy = policy_of(model, chat_format)
    results: dict[int, list[Episode]] = {}

    def serve(number: int) -> None:
        results[number] = asyncio.run(talk(policy, 10))

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results[0] == results[1] == results[2]
