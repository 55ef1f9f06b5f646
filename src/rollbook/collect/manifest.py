"""What a collection is: a list of its sessions, each with its input, its settings and where its lines begin.

Resuming compares the settings that decide what a row is with those of the last session that wrote a line, and
refuses, naming the keys, when they differ: rows of two different policies or graders must not end up in one
file unnoticed. How fast to go, where the server is and how to log in may change freely.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec

from rollbook.errors import BadFileError, UsageError
from rollbook.records.atomic import write_atomic
from rollbook.records.complete import FileFacts
from rollbook.records.config import ConfigChange, diff_configs
from rollbook.records.graders import with_version
from rollbook.records.plain import encode_document, utc_now
from rollbook.records.redact import redact_tree
from rollbook.records.run_info import versions
from rollbook.records.versions import made_by_newer

SCHEMA_VERSION = 2


class Session(msgspec.Struct, kw_only=True):
    """What one session had to do. Its lines begin at `output_start`."""

    started_at: str = msgspec.field(default_factory=utc_now)
    output_start: int = 0
    input: str = ""
    input_sha256: str = ""
    input_bytes: int = 0
    rows: int = 0
    repeats: int
    meaning: dict[str, Any]  # agent, sampling parameters: what makes a row what it is
    operation: dict[str, Any] = {}  # concurrency and the like, for the record
    versions: dict[str, str] = msgspec.field(default_factory=versions)


class Manifest:
    """The file. Keys that this version does not know stay in it."""

    def __init__(self, path: Path, output: str, content: dict[str, Any] | None = None) -> None:
        self.path = path
        self._content = content or {"created_at": utc_now(), "output": output, "sessions": []}
        self.sessions = msgspec.convert(self._content["sessions"], list[Session])

    @property
    def output(self) -> str:
        """The name of the collection's output."""
        return str(self._content.get("output") or "")

    @property
    def coverage(self) -> dict[str, int]:
        found: dict[str, int] = self._content.get("coverage") or {}
        return found

    def session_at(self, byte: int) -> Session | None:
        """The session that wrote the line at this byte of the output, unless that was put in order since."""
        return next((one for one in reversed(self.sessions) if one.output_start <= byte), None)

    def begin(self, session: Session) -> None:
        """Add a session; its keys are at the top too, as the present ones."""
        self.sessions.append(session)
        plain = msgspec.to_builtins(session)
        self._content = {**self._content, **plain, "sessions": [*self._content["sessions"], plain]}
        for key in ("coverage", "output_bytes", "output_xxh3_128"):
            self._content.pop(key, None)
        self._write()

    def end(self, coverage: dict[str, int], output: FileFacts, *, is_ordered: bool) -> None:
        """`output`: its size and digest now, by which `rollbook lineage` knows it.

        `is_ordered`: lines were moved, so that `session_at` cannot tell them apart any more.
        """
        self._content["coverage"] = coverage
        self._content |= {"output_bytes": output.bytes, "output_xxh3_128": output.xxh3_128}
        if is_ordered:
            self._content["ordered"] = True
        self._write()

    def _write(self) -> None:
        head = {"schema_version": SCHEMA_VERSION, "updated_at": utc_now()}
        self._content = redact_tree({**self._content, **head})
        write_atomic(self.path, encode_document(self._content))


def read_manifest(path: Path) -> Manifest | None:
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if why := made_by_newer(content.get("schema_version"), SCHEMA_VERSION):
            raise BadFileError(path, why)
        if not isinstance(content.get("sessions"), list):
            content = _from_version_1(content)
        return Manifest(path, "", content)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}; choose another output"
        raise BadFileError(path, why) from error
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise BadFileError(path, f"not a manifest ({error}); restore it or choose another output") from error


def _from_version_1(content: dict[str, Any]) -> dict[str, Any]:
    """A manifest that held the last session's settings, and the earlier ones with the byte where they end."""
    earlier = content.pop("earlier_meanings", [])
    starts = [0, *(entry["until_byte"] or 0 for entry in earlier)]
    meanings = [*(entry["meaning"] for entry in earlier), content["meaning"]]
    same = {key: value for key, value in content.items() if key in Session.__struct_fields__}
    same |= {"started_at": content["created_at"]}
    sessions = [
        {**same, "output_start": start, "meaning": meaning}
        for start, meaning in zip(starts, meanings, strict=True)
    ]
    return {**content, "sessions": sessions}


def refuse_drift(output: Path, old: Session, new: Session, *, same_input: bool) -> None:
    """Refuse settings and an input under which rows mean something else; rows added to the input do not."""
    sides = []
    for session in (old, new):
        content: dict[str, Any] = {"meaning": _with_version(session.meaning, new.meaning)}
        if not same_input:
            content["input_sha256"] = session.input_sha256
        sides.append(redact_tree(content))
    if changes := diff_configs(*sides):
        listed = "\n  ".join(_described(change) for change in changes)
        rest = "" if same_input or old.input in ("", new.input) else f"{_missing_of(old)}\n"
        raise UsageError(
            f"{output} was collected with other settings, so it is not resumed:\n  {listed}\n{rest}"
            "Choose another output_jsonl_fpath, restore the settings, or mix them with --resume=always"
        )


def _missing_of(old: Session) -> str:
    """The command that collects what is missing of an earlier input: no part of it has to be cut out."""
    words = f"+input_jsonl_fpath={shlex.quote(old.input)} +limit={old.rows}"
    return f"To collect what is missing of {old.input}, type the same command with {words}"


def _with_version(meaning: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The meaning with the version of a built-in environment where digests of its source were before."""
    agent, agent_now = meaning.get("agent") or {}, now.get("agent") or {}
    if not agent.get("env"):
        return meaning
    return {**meaning, "agent": {**agent, "env": with_version(agent["env"], agent_now.get("env") or {})}}


def _described(change: ConfigChange) -> str:
    """The change, and what people did where two digests do not say it."""
    hint = " (the script was edited)" if change.key.endswith(".source_sha256") else ""
    if change.key == "input_sha256":
        hint = " (the input is another file, or was edited)"
    elif change.key == "meaning.agent.env.source_sha256":
        hint = " (the environment's code was edited; rollbook data reverify grades what is there again)"
    return f"{change.key}: was {change.old!r}, now {change.new!r}{hint}"
