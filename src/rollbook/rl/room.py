"""How long a sequence may be and how many are sampled at once, where the settings do not say.

What an environment will say is not known before it says it. So a sequence gets room for the longest prompt,
and in every turn for a whole reply and for a message of the environment. The keys and values of all this must
fit into memory: first fewer sequences are sampled at once, and only then are they shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rollbook.errors import UsageError
from rollbook.policies.chat_format import ChatFormat
from rollbook.policies.chat_template import TemplateError
from rollbook.rl.player import Player
from rollbook.rl.settings import RlSettings
from rollbook.rl.tasks import TaskPool
from rollbook.runs.random_state import capture_random_state, restore_random_state
from rollbook.samplers.selftest import longest_sequence
from rollbook.train.memory import cache_bytes, free_bytes, gib

if TYPE_CHECKING:
    from rollbook.rl.opening import Trainer

Log = Callable[[str], None]
_MOST_SLOTS = 256
_ROUNDED_TO = 64
# Prompts are compared by their bytes, and the longest of them are tokenised; that may miss a longer one.
_TOKENISED, _SPARE = 256, 0.25
# A message of the environment is expected to be as long as a reply may be, within these bounds.
_LEAST_SAID, _MOST_SAID = 64, 1024
_PART_OF_MEMORY = 0.8  # the rest is for what goes through the model


class Need(NamedTuple):
    """What the longest episodes of an environment are expected to take, in tokens."""

    label: str
    prompt: int
    turns: int
    reply: int

    @property
    def said(self) -> int:
        """How many tokens the environment says in a turn."""
        return min(max(self.reply, _LEAST_SAID), _MOST_SAID)

    @property
    def one_reply(self) -> int:
        return _rounded(self.prompt + self.reply)

    @property
    def tokens(self) -> int:
        per_turn = self.reply + (self.said if self.turns > 1 else 0)
        return _rounded(self.prompt + int(_SPARE * self.prompt) + self.turns * per_turn)

    def __str__(self) -> str:
        if self.turns == 1:
            return f"{self.label}: a prompt of {self.prompt} and a reply of {self.reply}"
        each = f"a reply of {self.reply} and a message of {self.said}"
        return f"{self.label}: a prompt of {self.prompt} and {self.turns} turns, each with {each}"


class _Memory:
    """How much memory is left for the sampler's keys and values beside the first step of training."""

    def __init__(self, trainer: Trainer) -> None:
        base = trainer.model.base
        copies = trainer.processes.count if base.device.type == "cpu" else 1
        self._config, self._dtype = base.config.get_text_config(), next(base.parameters()).dtype
        self.training, self.free = trainer.optimizer.bytes_to_come * copies, free_bytes(base.device)

    def cache(self, tokens: int) -> int | None:
        return cache_bytes(self._config, self._dtype, tokens)

    def holds(self, tokens: int, part: float = 1.0) -> bool:
        """Whether so many tokens fit into this part of what is left; True where that is not known."""
        cache = self.cache(tokens)
        return cache is None or self.free is None or cache <= part * (self.free - self.training)


def decide_room(
    settings: RlSettings, trainer: Trainer, pools: Sequence[TaskPool], player: Player, log: Log
) -> RlSettings:
    """The settings with `sampler.max_length` and `sampler.slots`; what was chosen is logged."""
    sampler = settings.sampler
    if sampler.max_length is not None and sampler.slots is not None:
        return settings
    memory, need = _Memory(trainer), None
    length, slots = sampler.max_length, sampler.slots
    if length is None:
        chat_format = ChatFormat(trainer.model.tokenizer)
        need = max(
            (_need(pool, chat_format, player) for pool in pools if len(pool)), key=lambda found: found.tokens
        )
        limits = (need.tokens, sampler.max_episode_tokens, longest_sequence(trainer.model))
        length = min(limit for limit in limits if limit is not None)
    if slots is None:
        slots = _wanted_slots(settings)
        while slots > 1 and not memory.holds(slots * length, _PART_OF_MEMORY):
            slots //= 2
    if need is not None:
        while length > need.one_reply and not memory.holds(slots * length, _PART_OF_MEMORY):
            length = max(need.one_reply, _rounded(length // 2))
        _tell_length(need, length, settings, longest_sequence(trainer.model), log)
    if sampler.slots is None:
        _tell_slots(slots, length, settings, memory, log)
    return msgspec.structs.replace(
        settings, sampler=msgspec.structs.replace(sampler, max_length=length, slots=slots)
    )


def refuse_too_many_slots(settings: RlSettings, trainer: Trainer) -> None:
    """Say that the sampler's keys and values do not fit beside what the first step will take."""
    memory, sampler = _Memory(trainer), settings.sampler
    slots, length = sampler.slots or 1, sampler.max_length or 1
    if not memory.holds(slots * length):
        cache, training, free = (
            gib(size or 0) for size in (memory.cache(slots * length), memory.training, memory.free)
        )
        raise UsageError(
            f"not enough memory: the sampler's keys and values take {cache} ({slots} slots of {length} "
            f"tokens), the optimiser and its gradients {training}, and {free} are free; lower sampler.slots, "
            "sampler.max_length or sampler.max_tokens"
        )


def _need(pool: TaskPool, chat_format: ChatFormat, player: Player) -> Need:
    """How many tokens the tasks of a pool need. Its environment opens the longest one, for it may have rules
    and tools to add.

    That leaves no trace in random numbers: a run that begins with these settings does without it.
    """
    tasks = pool.longest(_TOKENISED)
    lengths = [_tokens(chat_format, task.messages, task.tools) for task in tasks]
    longest = max(lengths)
    before = capture_random_state()
    opened = player.opening(pool.make, tasks[lengths.index(longest)])
    restore_random_state(before)
    if opened is not None:
        longest = max(longest, _tokens(chat_format, opened.prompt, opened.tools))
    return Need(pool.settings.label, longest, pool.most_turns, pool.max_tokens)


def _tokens(chat_format: ChatFormat, messages: Sequence[Any], tools: Sequence[Any]) -> int:
    """The length of a prompt; 0 for one that the chat template cannot render, as its rollouts will say."""
    try:
        return len(chat_format.prompt(messages, tools))
    except TemplateError:
        return 0


def _tell_length(need: Need, length: int, settings: RlSettings, of_model: int | None, log: Log) -> None:
    text = f"sampler.max_length is {length:,} tokens per sequence"
    if length < need.tokens:
        limit = "all that fits into memory"
        if length == settings.sampler.max_episode_tokens:
            limit = "as sampler.max_episode_tokens says"
        elif length == of_model:
            limit = "all that the model takes"
        text += f", {limit}; {need.tokens:,} were wanted"
    log(f"{text} ({need})")
    if need.prompt >= length:
        log(
            f"the longest prompt of {need.label} has {need.prompt:,} tokens, which leaves none for a reply: "
            "rollouts of such tasks fail; leave these tasks out"
        )
    elif need.prompt + need.reply > length:
        log(
            f"after the longest prompt of {need.label} a reply has room for {length - need.prompt:,} tokens, "
            f"not for the {need.reply:,} of max_tokens"
        )


def _tell_slots(slots: int, length: int, settings: RlSettings, memory: _Memory, log: Log) -> None:
    cache, wanted = memory.cache(slots * length), _wanted_slots(settings)
    text = f"sampler.slots is {slots} sequences at once"
    if cache is not None:
        text += f", with {gib(cache)} of keys and values"
    if slots < wanted:
        text += f"; for {wanted} there is no memory: a lower sampler.max_length or max_turns makes room"
    log(text)


def _wanted_slots(settings: RlSettings) -> int:
    return min(_MOST_SLOTS, settings.groups_drawn * settings.group_size)


def _rounded(tokens: int) -> int:
    return -(-tokens // _ROUNDED_TO) * _ROUNDED_TO
