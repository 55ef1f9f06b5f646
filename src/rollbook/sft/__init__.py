"""Supervised fine-tuning: a job on the training core."""
