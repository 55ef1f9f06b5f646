"""Rollout collection: every (task, repeat) exactly once, whatever happens."""
