"""Policies that learn: they sample with the weights that a trainer changes."""
