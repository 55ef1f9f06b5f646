"""Which environments gave the rewards of a dataset, by the manifest beside it.

A collection's manifest describes the environment of each session; that of any other dataset carries on, as
`graders`, what those of its inputs said. Rewards of two graders are two scales: no gap, no mean and no pass
rate over both says what it seems to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollbook.records.config import diff_configs
from rollbook.records.datasets import is_collection, read_manifest

Grader = dict[str, Any]  # as an environment describes itself


def graders_of(path: Path) -> list[Grader]:
    """The different ones, in order; none where nothing says."""
    manifest = read_manifest(path)
    if not is_collection(manifest):
        return distinct(one for one in manifest.get("graders") or () if isinstance(one, dict))
    sessions = manifest.get("sessions")
    # A manifest of version 1 has the number of its sessions, and what the earlier ones meant apart.
    given = sessions if isinstance(sessions, list) else [*manifest.get("earlier_meanings", ()), manifest]
    agents = [(one.get("meaning") or {}).get("agent") or {} for one in given]
    return distinct(agent["env"] for agent in agents if isinstance(agent.get("env"), dict))


def distinct(graders: Iterable[Grader]) -> list[Grader]:
    """Each once."""
    found: list[Grader] = []
    for one in graders:
        if not any(differences(one, other) == [] for other in found):
            found.append(one)
    return found


def differences(one: Grader, other: Grader) -> list[str]:
    """What differs, a text for each setting; none where they are the same."""
    changes = diff_configs(with_version(one, other), with_version(other, one))
    return [str(change) for change in changes]


def with_version(env: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """An environment with its version where digests of its source were before, to compare it with another.

    Those digests are of version 1 of a built-in environment: they changed with every comment.
    """
    if "version" not in other or "source_sha256" in other or "source_sha256" not in env:
        return dict(env)
    return {key: value for key, value in env.items() if key != "source_sha256"} | {"version": 1}
