"""The losses: each a struct of its settings with its formula; `AnyLoss` is what a config may name."""

from rollbook.train.losses.base import Loss, LossInputs, LossOutput, Reason, ratio_of, weighted_sum
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
    "LossInputs",
    "LossOutput",
    "PpoClip",
    "Reason",
    "ReferenceKl",
    "ratio_of",
    "weighted_sum",
]
