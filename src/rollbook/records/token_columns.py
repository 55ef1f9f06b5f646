"""The columns of a token export, in one list, and those that follow from others, by one formula.

The list says what a column is called in a record (an array with one value per token) and in a query (the
value of one token). Writers, the reader, the view `tokens` and the settings are held to it.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float32]]

Kind = Literal["int32", "bool", "float32"]  # as numpy and Arrow call them


class Origin(StrEnum):
    TRAINING = "training"  # made in the step
    DERIVED = "derived"  # follows from others: Parquet leaves it out
    LOSS = "loss"  # what the loss left out, as it said
    SOMETIMES = "sometimes"  # only where a batch has it
    PRIME_RL = "prime_rl"  # only in the files of prime-rl


class TokenColumn(NamedTuple):
    array: str  # in a record
    name: str  # in a query
    kind: Kind
    origin: Origin
    meaning: str


TOKEN_COLUMNS = tuple(
    TokenColumn(*row)
    for row in (
        ("token_ids", "token_id", "int32", Origin.TRAINING, "in the vocabulary"),
        ("position_ids", "position_id", "int32", Origin.DERIVED, "what the model was told; 0 at the start"),
        ("loss_mask", "loss_mask", "bool", Origin.TRAINING, "whether the loss saw it"),
        ("rewards", "reward", "float32", Origin.TRAINING, "of the rollout, as the trainer had it"),
        ("advantages", "advantage", "float32", Origin.TRAINING, "what the loss was given"),
        ("inference_logprobs", "inference_logprob", "float32", Origin.TRAINING, "when it was sampled"),
        ("trainer_logprobs", "trainer_logprob", "float32", Origin.TRAINING, "when it was trained on"),
        ("entropy", "entropy", "float32", Origin.TRAINING, "of the trainer's distribution, in nats"),
        ("log_importance_ratio", "log_importance_ratio", "float32", Origin.DERIVED, "trainer - inference"),
        ("importance_ratio", "importance_ratio", "float32", Origin.TRAINING, "as the loss used it"),
        ("mismatch_kl", "mismatch_kl", "float32", Origin.DERIVED, "exp(lr) - lr - 1 of the log ratio"),
        ("prob_delta", "prob_delta", "float32", Origin.DERIVED, "trainer - inference, as probabilities"),
        ("is_masked", "is_masked", "bool", Origin.LOSS, "left out by the loss"),
        ("is_masked_high", "is_masked_high", "bool", Origin.LOSS, "by its upper bound"),
        ("is_masked_low", "is_masked_low", "bool", Origin.LOSS, "by its lower bound"),
        ("reference_logprobs", "reference_logprob", "float32", Origin.SOMETIMES, "of the reference model"),
        ("weights", "weight", "float32", Origin.SOMETIMES, "in the loss, where it is not 1"),
        ("rl_weights", "rl_weight", "float32", Origin.PRIME_RL, "of the policy loss"),
        ("ce_weights", "ce_weight", "float32", Origin.PRIME_RL, "of the cross entropy"),
        ("ref_kl_weights", "ref_kl_weight", "float32", Origin.PRIME_RL, "of the KL to the reference"),
    )
)

KINDS: dict[str, Kind] = {column.array: column.kind for column in TOKEN_COLUMNS} | {"text_offsets": "int32"}
ALL_COLUMNS = tuple(column.array for column in TOKEN_COLUMNS)
EXPORTED = tuple(column.array for column in TOKEN_COLUMNS if column.origin is not Origin.PRIME_RL)
COLUMNS = tuple(
    column.array for column in TOKEN_COLUMNS if column.origin not in (Origin.SOMETIMES, Origin.PRIME_RL)
)
MASKS = tuple(column.array for column in TOKEN_COLUMNS if column.origin is Origin.LOSS)
DERIVED = ("log_importance_ratio", "mismatch_kl", "prob_delta")
_SOURCES = ("inference_logprobs", "trainer_logprobs")  # what the derived ones follow from


def with_sources(names: Collection[str]) -> frozenset[str]:
    """These columns, and the ones that they follow from."""
    return frozenset(names if set(DERIVED).isdisjoint(names) else (*names, *_SOURCES))


def derived(inference: Floats | None, trainer: Floats | None) -> dict[str, Floats | None]:
    """Log ratio, KL (`exp(lr) - lr - 1`) and change of probability, made in float64; NaN where one is NaN.

    All are None where one of the two columns does not apply.
    """
    if inference is None or trainer is None:
        return dict.fromkeys(DERIVED)
    import numpy as np  # settings are checked without it

    mu, pi = inference.astype(np.float64), trainer.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        log_ratio = pi - mu
        return {
            "log_importance_ratio": log_ratio.astype(np.float32),
            "mismatch_kl": (np.expm1(log_ratio) - log_ratio).astype(np.float32),
            "prob_delta": (np.exp(pi) - np.exp(mu)).astype(np.float32),
        }
