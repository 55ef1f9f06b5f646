"""What other thresholds, or another loss, would have left out of the same tokens.

    --what-if clip_high=0.4              the loss of the run with another bound
    --what-if name=dppo,mask_high=0.1    another loss

The rules are those that the losses themselves apply (`records/token_masks.py`). Weights that had been trained
otherwise would have sampled other tokens; this is about the tokens that there are.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from rollbook.errors import UsageError
from rollbook.records.token_masks import Masks, dppo_masks, ipo_masks, ppo_masks, reference_masks
from rollbook.tokens.chunks import Array, Chunk

Loss = Mapping[str, Any]  # `name` and the settings, as a manifest says it

# The bounds of the losses that have some, with their defaults; a test holds them to the losses themselves.
BOUNDS: dict[str, dict[str, float]] = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.28},
    "dppo": {"mask_low": 0.2, "mask_high": 0.2},
    "ipo": {"threshold": 0.1},
    "reference_kl": {"mask_low": 0.2},
    "importance_sampling": {},
    "cross_entropy": {},
}


class WhatIf(msgspec.Struct, kw_only=True):
    """What a scenario would have left out, beside what the loss did."""

    scenario: str
    loss: dict[str, Any]
    tokens: int = 0  # the ones that a rule could be applied to
    masked: int = 0
    high: int = 0
    low: int = 0
    pull_share: float | None = None  # of the sum of |advantage| x ratio, what the masks would have left out
    was_masked: int | None = None  # by the loss; None where no loss said so
    more: int | None = None  # masked here and not by the loss
    fewer: int | None = None  # the other way round


class Scenario:
    """One scenario over all chunks."""

    def __init__(self, words: str, losses: Mapping[int, Loss]) -> None:
        """`losses` has the loss of each exported iteration, as far as a manifest says it."""
        self.words, self._changes = words, _parsed(words)
        self._losses = losses
        self._result = WhatIf(scenario=words, loss={})
        self._pull = self._pull_masked = 0.0

    def add(self, chunk: Chunk) -> None:
        iterations = {sequence.iteration for sequence in chunk.sequences}
        for loss, mine_N in self._by_loss(chunk, iterations):
            self._result.loss = dict(loss)
            self._add(chunk, mine_N, *left_out(loss, chunk))

    def result(self) -> WhatIf:
        if self._pull:
            self._result.pull_share = self._pull_masked / self._pull
        return self._result

    def _by_loss(self, chunk: Chunk, iterations: set[int]) -> list[tuple[Loss, Array]]:
        """The tokens of a chunk by the loss that they are to be given to; a run rarely changes it."""
        groups: dict[str, tuple[Loss, list[int]]] = {}
        for iteration in iterations:
            loss = changed(self._losses.get(iteration), self._changes, self.words)
            groups.setdefault(repr(loss), (loss, []))[1].append(iteration)
        own_N = chunk.spread([sequence.iteration for sequence in chunk.sequences])
        return [(loss, np.isin(own_N, numbers)) for loss, numbers in groups.values()]

    def _add(self, chunk: Chunk, mine_N: Array, high_N: Array, low_N: Array, known_N: Array) -> None:
        mine_N = mine_N & known_N
        masked_N = (high_N | low_N) & mine_N
        result = self._result
        result.tokens += int(mine_N.sum())
        result.masked += int(masked_N.sum())
        result.high += int((high_N & mine_N).sum())
        result.low += int((low_N & mine_N).sum())
        pull_N = chunk.pull_N()
        self._pull += float(pull_N[mine_N].sum())
        self._pull_masked += float(pull_N[masked_N].sum())
        has_masks_N = chunk.has("is_masked") & mine_N
        if has_masks_N.any():
            was_N = chunk.flags("is_masked") & has_masks_N
            result.was_masked = (result.was_masked or 0) + int(was_N.sum())
            result.more = (result.more or 0) + int((masked_N & has_masks_N & ~was_N).sum())
            result.fewer = (result.fewer or 0) + int((was_N & ~masked_N).sum())


def left_out(loss: Loss, chunk: Chunk) -> tuple[Array, Array, Array]:
    """The two masks of a loss, and which tokens have what it takes to know them."""
    advantage_N, ratio_N = chunk.floats("advantages"), chunk.ratio_N()
    with np.errstate(over="ignore", invalid="ignore"):
        pi_N, mu_N = chunk.floats("trainer_logprobs"), chunk.floats("inference_logprobs")
        moved_N = np.exp(pi_N) - np.exp(mu_N)
        high_N, low_N = _RULES[loss["name"]](loss, advantage_N, ratio_N, moved_N)
    return high_N, low_N, _has_what_it_takes(loss["name"], chunk)


def _has_what_it_takes(name: str, chunk: Chunk) -> Array:
    """A value that is not finite is one too: the loss got it."""
    known_N = chunk.known("trainer_logprobs") & chunk.known("inference_logprobs")
    if name == "ppo":
        known_N |= chunk.known("importance_ratio")
    return known_N & chunk.known("advantages") if name in ("ppo", "dppo") else known_N


def _nothing(loss: Loss, advantage_N: Array, ratio_N: Array, moved_N: Array) -> Masks:
    none_N = np.zeros(len(ratio_N), np.bool_)
    return none_N, none_N


_RULES: dict[str, Callable[[Loss, Array, Array, Array], Masks]] = {
    "ppo": lambda loss, advantage_N, ratio_N, moved_N: ppo_masks(
        advantage_N, ratio_N, clip_low=loss["clip_low"], clip_high=loss["clip_high"]
    ),
    "dppo": lambda loss, advantage_N, ratio_N, moved_N: dppo_masks(
        advantage_N, moved_N, mask_low=loss["mask_low"], mask_high=loss["mask_high"]
    ),
    "ipo": lambda loss, advantage_N, ratio_N, moved_N: ipo_masks(moved_N, threshold=loss["threshold"]),
    "reference_kl": lambda loss, advantage_N, ratio_N, moved_N: reference_masks(
        moved_N, mask_low=loss["mask_low"]
    ),
    "importance_sampling": _nothing,
    "cross_entropy": _nothing,
}


def _parsed(words: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in filter(None, (part.strip() for part in words.split(","))):
        name, mark, value = (part.strip() for part in word.partition("="))
        if not mark:
            raise UsageError(f"--what-if {words}: {word!r} is no name=value, such as clip_high=0.4")
        if name == "name":
            found[name] = value
            continue
        try:
            found[name] = float(value)
        except ValueError:
            raise UsageError(f"--what-if {words}: {name} must be a number, not {value!r}") from None
        if not found[name] >= 0:
            raise UsageError(f"--what-if {words}: {name} must be 0 or more")
    return found


def changed(loss: Loss | None, changes: Mapping[str, Any], words: str) -> Loss:
    """The loss of a scenario: that of the run with the changes, or another one that is named."""
    name = changes.get("name", loss["name"] if loss else None)
    if name is None:
        raise UsageError(
            f"--what-if {words}: the export does not say which loss it was; name one: "
            f"--what-if name=dppo,mask_high=0.1 (known: {', '.join(BOUNDS)})"
        )
    if name not in BOUNDS:
        raise UsageError(
            f"--what-if {words}: the bounds of the loss {name!r} are not known; name another one, such as "
            f"name=ppo (known: {', '.join(BOUNDS)})"
        )
    own = {key: loss[key] for key in BOUNDS[name] if key in loss} if loss and loss["name"] == name else {}
    for key in changes.keys() - {"name"} - BOUNDS[name].keys():
        near = difflib.get_close_matches(key, BOUNDS[name], n=1)
        known = ", ".join(BOUNDS[name]) or "none"
        hint = f"did you mean {near[0]!r}?" if near else f"its bounds: {known}"
        raise UsageError(f"--what-if {words}: the loss {name!r} has no bound {key!r}; {hint}")
    return {"name": name, **BOUNDS[name], **own, **changes}
