"""Training: one engine (model, packing, step, optimiser, checkpoints) and the jobs that run on it."""
