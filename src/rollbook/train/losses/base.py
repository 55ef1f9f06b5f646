"""What a loss is: a frozen struct whose fields are its settings, and whose call is its formula.

`loss: {name: ppo, clip_high: 0.28}` in a config becomes such a struct, and the struct is what the record says
about the loss. A loss of your own is a subclass that you pass to the engine; nothing has to be registered.

A loss returns a SUM over tokens: the engine divides it by the weight of all trained tokens of the step, which
is fixed before the loss leaves any out. It also returns the per-token facts it used, detached, so that
metrics and exports never compute them again. Two names mean the same for every loss: `ratio` is the
importance ratio it used, `reason` the `Reason` of each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from rollbook.errors import RollbookError
from rollbook.rollouts.failures import error_with_place, name_and_place

if TYPE_CHECKING:  # a config names losses, and reading one loads no torch
    from torch import Tensor

LOG_RATIO_CAP = (
    20.0  # exp(20) is five hundred million; beyond it the ratio stays there, and the token is counted
)


class Reason(IntEnum):
    """Whether a token moved the weights, and which bound of the loss left it out."""

    TRAINED = 0
    CLIPPED_HIGH = 1  # its probability had risen too far
    CLIPPED_LOW = 2  # its probability had fallen too far


class LossInputs(NamedTuple):
    """What a loss is given: one value per trained token, float32; `example_N` says which belong together."""

    logprob_N: Tensor
    example_N: Tensor
    columns_N: Mapping[str, Tensor]

    def column(self, name: str) -> Tensor:
        """A column that the loss cannot do without."""
        try:
            return self.columns_N[name]
        except KeyError:
            raise ValueError(f"the loss needs the column {name!r}, which no example has") from None


class LossOutput(NamedTuple):
    loss_sum: Tensor
    facts_N: dict[str, Tensor]  # ratio, kept, reason, clamped, ...: detached


class Loss(msgspec.Struct, tag_field="name", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Subclass it with a `tag`, its settings as fields, and `__call__`."""

    samples: ClassVar[bool] = (
        True  # whether its tokens were sampled by a policy, so that entropy is of interest
    )
    fixed: ClassVar[tuple[str, ...]] = ()  # names of its thresholds that are no settings

    def __call__(self, given: LossInputs) -> LossOutput:
        raise NotImplementedError(f"{type(self).__name__} has no formula: define __call__")

    def described(self) -> dict[str, Any]:
        """Its name, its settings, and the thresholds that are none: all that its masks follow from."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found | {name: getattr(self, name) for name in self.fixed}


class LossError(RollbookError):
    """A loss failed, or returned something else than a loss; the text names its function and file."""


def loss_of(loss: Loss, given: LossInputs) -> LossOutput:
    """Call a loss, which may be a user's own, and check what it returns."""
    try:
        made = loss(given)
    except RollbookError:
        raise
    except Exception as error:
        if _is_of_the_machine(error):
            raise
        raise LossError(f"the loss {place_of(loss)} failed: {error_with_place(error)}") from error
    if why := _flaw(made, given):
        raise LossError(f"the loss {place_of(loss)} {why}")
    return made


def place_of(loss: Loss) -> str:
    """`Class.__call__ (file:line)`"""
    return name_and_place(type(loss).__call__.__get__(loss))


def place_of_own(loss: Loss) -> str:
    """The same of a loss that is not built in; else nothing."""
    return "" if type(loss).__module__.startswith("rollbook.") else place_of(loss)


def _is_of_the_machine(error: Exception) -> bool:
    """Out of memory, for which the engine has an answer of its own."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError)


def _flaw(made: Any, given: LossInputs) -> str | None:
    import torch

    if not isinstance(made, LossOutput):
        return f"returned a {type(made).__name__}; it must return a LossOutput(loss_sum, facts_N)"
    total, count = made.loss_sum, given.logprob_N.shape[0]
    if not isinstance(total, torch.Tensor):
        return f"returned a loss_sum of type {type(total).__name__}; it must be a tensor, made of logprob_N"
    if total.numel() != 1 or total.dim() != 0:
        return f"returned a loss_sum of shape {list(total.shape)}; it must be one number: use weighted_sum"
    if given.logprob_N.requires_grad and not total.requires_grad:
        return "returned a loss_sum without a gradient; it must be made of logprob_N, which is not detached"
    if not isinstance(made.facts_N, dict):
        return f"returned facts of type {type(made.facts_N).__name__}; they must be a dict of tensors"
    for name, fact_N in made.facts_N.items():
        if not isinstance(fact_N, torch.Tensor):
            return f"returned the fact {name!r} as a {type(fact_N).__name__}; it must be a tensor"
        if fact_N.shape != (count,):
            return (
                f"returned the fact {name!r} of shape {list(fact_N.shape)}; it must be {[count]}: one a token"
            )
    return None


class Ratio(NamedTuple):
    """pi / mu of each token: how much likelier it is now than when it was sampled."""

    log_N: Tensor  # as it is
    ratio_N: Tensor  # of the log ratio between -20 and 20, with no gradient outside
    clamped_N: Tensor


def ratio_of(given: LossInputs) -> Ratio:
    log_N = given.logprob_N - given.column("sampled_logprob")
    clamped_N = log_N.detach().abs() > LOG_RATIO_CAP
    return Ratio(log_N, log_N.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp(), clamped_N)


def weighted_sum(loss_N: Tensor, given: LossInputs) -> Tensor:
    """The sum with the weight of each token; one of weight 0 adds nothing, whatever its loss is."""
    weight_N = given.columns_N.get("weight")
    if weight_N is None:
        return loss_N.sum()
    return (weight_N * loss_N).where(weight_N > 0, 0.0).sum()


def has_no_weight(given: LossInputs) -> Tensor:
    """Which tokens have weight 0: they may lack every value."""
    import torch

    weight_N = given.columns_N.get("weight")
    return torch.zeros_like(given.logprob_N, dtype=torch.bool) if weight_N is None else weight_N <= 0


def facts_of(ratio: Ratio, reason_N: Tensor) -> dict[str, Tensor]:
    """The facts that every loss with a ratio reports."""
    return {
        "ratio": ratio.ratio_N.detach(),
        "kept": reason_N == Reason.TRAINED,
        "reason": reason_N,
        "clamped": ratio.clamped_N,
    }


def reasons(high_N: Tensor, low_N: Tensor) -> Tensor:
    """CLIPPED_HIGH and CLIPPED_LOW where these are true, else TRAINED."""
    import torch

    reason_N = torch.where(low_N, int(Reason.CLIPPED_LOW), int(Reason.TRAINED))
    return torch.where(high_N, int(Reason.CLIPPED_HIGH), reason_N).to(torch.int8)
