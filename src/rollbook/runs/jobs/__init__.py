"""A job's life: supervised from start to end, recorded in the history, with a snapshot of what it ran on."""
