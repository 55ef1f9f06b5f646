"""The losses: each a struct of its settings with its formula; `AnyLoss` is what a config may name."""

from rollbook.train.losses.base import (
    Loss,
    LossError,
    LossInputs,
    LossOutput,
    Reason,
    loss_of,
    place_of_own,
    ratio_of,
    weighted_sum,
)
from rollbook.train.losses.cross_entropy import CrossEntropy
from rollbook.train.losses.dppo import Dppo, Ipo, ReferenceKl
from rollbook.train.losses.importance_sampling import ImportanceSampling
from rollbook.train.losses.ppo import PpoClip

AnyLoss = CrossEntropy | ImportanceSampling | PpoClip | Dppo | Ipo | ReferenceKl

__all__ = [
    "AnyLoss",
    "CrossEntropy",
    "Dppo",
    "ImportanceSampling",
    "Ipo",
    "Loss",
    "LossError",
    "LossInputs",
    "LossOutput",
    "PpoClip",
    "Reason",
    "ReferenceKl",
    "loss_of",
    "place_of_own",
    "ratio_of",
    "weighted_sum",
]
