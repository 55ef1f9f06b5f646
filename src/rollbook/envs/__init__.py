"""Where a model acts: environments, and the graders that make one out of three lines."""

from rollbook.envs.base import Environment, Feedback, Start, Task, single_turn

__all__ = ["Environment", "Feedback", "Start", "Task", "single_turn"]
