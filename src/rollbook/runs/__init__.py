"""A run's life: its directory, its writer, its reader, resume."""
