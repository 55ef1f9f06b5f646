"""From rollouts to datasets: every command streams, is seeded, checks, and reports what it did."""
