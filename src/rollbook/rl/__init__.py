"""Reinforcement learning: settings, the loop, and what only this job needs."""
