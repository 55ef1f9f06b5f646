"""Where a model acts: environments, and the graders that make one out of three lines."""

from rollbook.envs.base import Environment, single_turn
from rollbook.rollouts.types import Feedback, Opening, Task

__all__ = ["Environment", "Feedback", "Opening", "Task", "single_turn"]
