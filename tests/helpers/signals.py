"""Signals as from a terminal, also for tests that run under nohup or in the background of a script."""

from __future__ import annotations

import os
import signal

_HANDED_DOWN = "TESTS_IGNORE_SIGNALS"  # pytest-xdist's workers are children too: they must go on ignoring


def let_children_hear_signals() -> None:
    """Ignores here what was inherited as ignored (SIGINT, SIGHUP), but without handing that down.

    A child inherits "ignored", and then no test could interrupt it. It does not inherit a handler: with one
    that does nothing this process goes on as it was meant to, and its children start with the default.
    """
    before = os.environ.get(_HANDED_DOWN, "").split()
    ignored = [
        number
        for number in (signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_IGN or number.name in before
    ]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    if ignored:
        os.environ[_HANDED_DOWN] = " ".join(number.name for number in ignored)
