"""Room for the connections of all rollouts in flight, made before the first of them.

A process may have only so many files open (`ulimit -n`), connections among them. One that runs out can write
neither its results nor how it stands; so the limit is raised as far as anyone may raise it, and where that is
not enough, fewer rollouts are in flight.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import suppress

import msgspec

from rollbook.collect.settings import CollectSettings

_OWN_FILES = 64  # besides the connections: results, locks, the history, what libraries open
_FILES_A_WORKER = 4
_FILES_A_ROLLOUT = 2  # its request, and one that its environment may open


def with_room(settings: CollectSettings, say: Callable[[str], None]) -> CollectSettings:
    """The settings, with no more in flight than files may be open; actors on Ray have limits of their own."""
    if settings.engine == "ray":
        return settings
    own = _OWN_FILES + (_FILES_A_WORKER * settings.workers if settings.workers > 1 else 0)
    limit = _raise_limit(own + _FILES_A_ROLLOUT * settings.num_samples_in_parallel)
    files = _FILES_A_ROLLOUT if "judge" in settings.agent.env else 1
    most = max(1, (limit - own) // files) * settings.workers
    if settings.num_samples_in_parallel <= most:
        return settings
    say(
        f"num_samples_in_parallel={settings.num_samples_in_parallel} is lowered to {most}: this process may "
        f"have {limit} files open and no more; a higher `ulimit -Hn` allows more"
    )
    return msgspec.structs.replace(settings, num_samples_in_parallel=most)


def _raise_limit(wanted: int) -> int:
    """How many files may be open, after trying for so many; worker processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
        return possible
    return soft
