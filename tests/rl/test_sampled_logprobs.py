"""From the sampler to the loss: every trained token has the logprob of a fresh forward pass, in any shape."""

from __future__ import annotations

import asyncio
import random
import string
from typing import Any

import pytest
import torch

from rollbook.policies.chat_format import ChatFormat
from rollbook.records.turns import token_rows
from rollbook.rl.groups import examples_of
from rollbook.rollouts.episode import play
from rollbook.rollouts.types import Episode, Feedback, Message, Opening, Task
from rollbook.samplers.local import LocalPolicy
from rollbook.samplers.sampling import Sampling
from rollbook.tiny import write_tiny_tokenizer
from rollbook.train.batch import Example, ExampleKey
from rollbook.train.model import Model
from samplers.tiny import CLOSE, tiny_model

LETTERS = string.ascii_lowercase + " "
WANTED = {"turns cut", "several turns", "temperatures"}
FAMILIES = ("llama", "qwen3", "gemma2", "mistral", "gpt_neox", "olmo2")


@pytest.fixture(scope="module")
def chat_format(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), LETTERS))


class Talk:
    """Answers with a few letters, for a random number of turns."""

    def __init__(self, chance: random.Random) -> None:
        self._chance, self._left = chance, chance.randint(1, 4)

    def start(self, task: Task) -> Opening:
        return Opening(messages=task.messages)

    def step(self, message: Message) -> Feedback:
        self._left -= 1
        said = "".join(self._chance.choice(LETTERS) for _ in range(self._chance.randint(0, 9)))
        answer: list[Message] = [] if self._left == 0 else [{"role": "user", "content": said}]
        return Feedback(reward=self._chance.random(), done=self._left == 0, messages=answer)

    def close(self) -> None:
        return None


def random_model(chance: random.Random, chat_format: ChatFormat) -> Model:
    family = chance.choice(FAMILIES)
    kv_heads = chance.choice([1, 2, 4])
    size = 16 * chance.choice([2, 4])
    changes: dict[str, Any] = {
        "vocab_size": len(chat_format.tokenizer) + chance.randint(0, 7),  # as padded vocabularies are
        "num_hidden_layers": chance.randint(1, 3),
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "hidden_size": size,
        "intermediate_size": 2 * size,
        "tie_word_embeddings": chance.random() < 0.5,
    }
    if family in ("qwen3", "gemma2"):
        changes["head_dim"] = chance.choice([8, 16])
    if family in ("mistral", "gemma2"):
        changes["sliding_window"] = chance.choice([4, 16])
    model = Model(tiny_model(family, seed=chance.randrange(99), **changes), chat_format.tokenizer)
    model.chunks_head = family != "gemma2"  # which caps its logits; a job finds that out itself
    return model


def sampled(model: Model, chat_format: ChatFormat, chance: random.Random) -> list[Episode]:
    """Episodes at several temperatures, with little room for replies and for whole episodes."""
    sampling = Sampling(max_tokens=chance.randint(3, 20), max_episode_tokens=chance.randint(40, 80))
    slots = chance.choice([3, 8])
    policy = LocalPolicy(model, chat_format, sampling=sampling, slots=slots)

    async def all_of_them() -> list[Episode]:
        games = [
            play(
                Talk(random.Random(number)),
                policy,
                Task(
                    id=str(number),
                    row={},
                    messages=[{"role": "user", "content": "a" * chance.randint(1, 12)}],
                    params={"temperature": chance.choice([0.5, 0.8, 1.0, 1.4])},
                    seed=number,
                ),
            )
            for number in range(12)
        ]
        return list(await asyncio.gather(*games))

    episodes = asyncio.run(all_of_them())
    asyncio.run(policy.close())
    return episodes


def plain_logprobs(model: Model, episode: Episode) -> list[float]:
    """Of all sampled tokens, by a forward pass over each row with the attention that the model came with."""
    model.use_packing(False)
    found: list[float] = []
    for row in token_rows(episode.turns):
        with torch.no_grad():
            logits_TV = model.base(torch.tensor([row.token_ids]), use_cache=False).logits[0]
        for index, start, end in row.turns:
            turn = episode.turns[index]
            spread_TV = (logits_TV[start - 1 : end - 1] / (turn.temperature or 0.0)).log_softmax(-1)
            chosen = torch.tensor(row.token_ids[start:end])[:, None]
            found += spread_TV.gather(1, chosen)[:, 0].tolist()
    return found


def trained_logprobs(
    model: Model, episodes: list[Episode], *, packs: bool, capacity: int
) -> list[dict[int, tuple[float, float]]]:
    """What the loss is given of each episode, by the place of the token: when it was sampled, and now."""
    model.use_packing(packs)
    examples: list[Example] = []
    for number, episode in enumerate(episodes):
        examples += examples_of(episode, 1.0, ExampleKey("train", 0, 0, number))
    found: list[dict[int, tuple[float, float]]] = [{} for _ in episodes]
    for batch in model.batches(examples, capacity):
        with torch.no_grad():
            now_N = model.outputs(batch).logprob_N
        places = zip(batch.example_N, batch.offset_N, batch.columns_N["sampled_logprob"], now_N, strict=True)
        for example, offset, then, now in places:
            key = batch.keys[int(example)]
            assert key is not None and key.part == 0
            found[key.trajectory][int(offset)] = float(then), float(now)
    return found


def kinds(episodes: list[Episode]) -> set[str]:
    """What there was in them, so that a test cannot pass without it."""
    turns = [turn for episode in episodes for turn in episode.turns]
    cases = {
        "turns cut": any(turn.finish_reason == "length" for turn in turns),
        "turns ended": any(turn.finish_reason == "stop" for turn in turns),
        "episodes cut": any(episode.stop_reason in ("length", "max_length") for episode in episodes),
        "temperatures": len({turn.temperature for turn in turns}) > 1,
        "several turns": any(len(episode.turns) > 2 for episode in episodes),
    }
    return {name for name, is_there in cases.items() if is_there}


@pytest.mark.parametrize("seed", range(8))
def test_sampled_logprobs_are_those_of_a_fresh_forward_pass(seed: int, chat_format: ChatFormat) -> None:
    chance = random.Random(seed)
    model = random_model(chance, chat_format)
    episodes = sampled(model, chat_format, chance)
    assert kinds(episodes) >= WANTED
    for packs, capacity in ((True, 40), (True, 400), (False, 200)):
        trained = trained_logprobs(model, episodes, packs=packs, capacity=capacity)
        for episode, columns in zip(episodes, trained, strict=True):
            logprobs = [value for turn in episode.turns for value in turn.logprobs or ()]
            then, now = zip(*(columns[place] for place in sorted(columns)), strict=True)
            assert list(then) == pytest.approx(logprobs, abs=1e-7)  # as float32
            assert list(now) == pytest.approx(logprobs, abs=CLOSE)
            assert plain_logprobs(model, episode) == pytest.approx(logprobs, abs=CLOSE)
            model.use_packing(packs)


def test_the_shapes_above_have_every_case(chat_format: ChatFormat) -> None:
    seen: set[str] = set()
    families = set()
    for seed in range(8):
        chance = random.Random(seed)
        model = random_model(chance, chat_format)
        families.add(model.base.config.model_type)
        seen |= kinds(sampled(model, chat_format, chance))
    assert seen == {*WANTED, "turns ended", "episodes cut"} and len(families) >= 4


def test_a_bfloat16_sampler_stays_close_to_its_trainer(chat_format: ChatFormat) -> None:
    """T6: not the same bits, for rounding depends on the shape; but near, and stored as float32."""
    chance = random.Random(0)
    base = tiny_model("llama", vocab_size=len(chat_format.tokenizer)).to(torch.bfloat16)
    model = Model(base, chat_format.tokenizer)
    episodes = sampled(model, chat_format, chance)
    trained = trained_logprobs(model, episodes, packs=True, capacity=200)
    distances = [abs(then - now) for columns in trained for then, now in columns.values()]
    assert 0 < sum(distances) / len(distances) < 0.02
    assert max(distances) < 0.5
