"""What a collection is: the digests of its input and of everything that changes the meaning of a row.

Resuming compares the manifest on disk with the present one and refuses, naming the keys, when they differ:
rows of two different policies or graders must not end up in one file unnoticed. How fast to go, where the
server is and how to log in may change freely.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import orjson

from rollbook.errors import BadFileError, UsageError
from rollbook.records.atomic import write_atomic
from rollbook.records.config import ConfigChange, diff_configs
from rollbook.records.plain import utc_now
from rollbook.records.redact import redact_tree
from rollbook.records.run_info import versions

SCHEMA_VERSION = 1


class EarlierMeaning(msgspec.Struct):
    """What rows of earlier sessions mean, where others were mixed with them knowingly."""

    meaning: dict[str, Any]
    until_session: int  # the last one, counted from 1
    until_byte: int | None = None  # of the output


class Manifest(msgspec.Struct, kw_only=True):
    schema_version: int = SCHEMA_VERSION
    created_at: str = msgspec.field(default_factory=utc_now)
    updated_at: str = msgspec.field(default_factory=utc_now)
    output: str = ""  # the file's name
    input: str = ""
    input_sha256: str = ""
    input_bytes: int = 0
    rows: int = 0
    repeats: int
    meaning: dict[str, Any]  # agent, sampling parameters: what makes a row what it is
    earlier_meanings: list[EarlierMeaning] = []
    operation: dict[str, Any] = {}  # concurrency and the like, for the record
    versions: dict[str, str] = {}  # found when it is written, which the first request need not wait for
    sessions: int = 1
    coverage: dict[str, int] = {}  # expected, ok, failed, missing, once a session has ended


def read_manifest(path: Path) -> Manifest | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadFileError(
            path, f"cannot be read: {error.strerror or error}; choose another output"
        ) from error
    except msgspec.MsgspecError as error:
        raise BadFileError(path, f"not a manifest ({error}); restore it or choose another output") from error


def write_manifest(path: Path, manifest: Manifest) -> None:
    manifest.updated_at = utc_now()
    manifest.versions = versions()
    plain = redact_tree(msgspec.to_builtins(manifest))
    write_atomic(path, orjson.dumps(plain, option=orjson.OPT_INDENT_2) + b"\n")


def drift(old: Manifest, new: Manifest, *, same_input: bool) -> list[ConfigChange]:
    """The keys in which two manifests mean different things; rows added to the input change none."""
    sides = []
    for manifest in (old, new):
        content: dict[str, Any] = {"meaning": _with_version(manifest.meaning, new.meaning)}
        if not same_input:
            content["input_sha256"] = manifest.input_sha256
        sides.append(redact_tree(content))
    return diff_configs(*sides)


def _with_version(meaning: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The meaning with the version of a built-in environment where digests of its source stood before.

    Those digests are of version 1: they changed with every comment.
    """
    agent, env_now = meaning.get("agent") or {}, (now.get("agent") or {}).get("env") or {}
    env = dict(agent.get("env") or {})
    if "version" not in env_now or "source_sha256" in env_now or "source_sha256" not in env:
        return meaning
    del env["source_sha256"]
    return {**meaning, "agent": {**agent, "env": {**env, "version": 1}}}


def go_on_from(old: Manifest, new: Manifest, output_bytes: int) -> None:
    """Make `new` the manifest of the session after `old`'s, with a trace of what is mixed in one file."""
    new.sessions, new.created_at = old.sessions + 1, old.created_at
    new.earlier_meanings = list(old.earlier_meanings)
    if drift(old, new, same_input=True):
        new.earlier_meanings.append(EarlierMeaning(old.meaning, old.sessions, output_bytes))


def stay_as(old: Manifest, new: Manifest) -> None:
    """Make `new` the manifest after a session without anything to do, which changed the meaning of no row."""
    new.sessions, new.created_at = old.sessions, old.created_at
    new.meaning, new.earlier_meanings = old.meaning, old.earlier_meanings


def forget_unused_meaning(manifest: Manifest, output_bytes: int) -> None:
    """A session that ended before its first line was written leaves a meaning that no row has."""
    if manifest.earlier_meanings and manifest.earlier_meanings[-1].until_byte == output_bytes:
        manifest.meaning = manifest.earlier_meanings.pop().meaning


def refuse_drift(output: Path, changes: list[ConfigChange]) -> None:
    listed = "\n  ".join(
        f"{change.key}: was {change.old!r}, now {change.new!r}{_hint(change.key)}" for change in changes
    )
    raise UsageError(
        f"{output} was collected with other settings, so it is not resumed:\n  {listed}\n"
        "Choose another output_jsonl_fpath, restore the settings, or mix them knowingly with --resume=always"
    )


def _hint(key: str) -> str:
    """What people did, where two digests do not say it."""
    if key == "input_sha256":
        return " (the input is another file, or was edited)"
    if key == "meaning.agent.env.source_sha256":
        return " (the environment's code was edited; rollbook data reverify grades what is there again)"
    return " (the script was edited)" if key.endswith(".source_sha256") else ""
