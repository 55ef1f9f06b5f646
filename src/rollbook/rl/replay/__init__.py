"""Replay: recorded steps taken once more, and compared with the record."""
