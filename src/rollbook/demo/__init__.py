"""The whole loop on a model so small that a laptop trains it while you watch."""
