"""artifacts/index.yaml as bytes: plain YAML that is only ever appended to.

The file begins with `runs:`; each event is one line, one `write(2)` on an `O_APPEND` descriptor under a lock,
fsynced. A line is `- ` and a JSON object, written so that YAML 1.1 reads exactly what JSON reads: `1e-05`
would be text there, U+2028 a line break, a long key an error. So `yaml.safe_load` works at any time, while
we read lines with a JSON parser, and a killed append leaves at most an unterminated last line, which the
next append cuts. Lists that other tools or people wrote in another style are read, and appended to, as they
are; a file that cannot be appended to safely is refused and not touched.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from rollbook.errors import BadFileError, WriteError
from rollbook.records.atomic import fsync_directory, write_atomic
from rollbook.records.line_secrets import LineSecrets
from rollbook.records.locks import FileLock
from rollbook.records.plain import encode, to_plain

HEADER = b"runs:\n"
Event = dict[str, Any]

_OUR_START = b'- {"'
_OUR_LINE = re.compile(rb"( *)- (\{.*\})\s*")
_ANY_ITEM = re.compile(rb"^( *)- ", re.MULTILINE)
_EMPTY_LIST = re.compile(rb"^(runs:)[ \t]*(?:\[\s*\]|null|~)(?=[ \t]*(?:#|\r?$))", re.MULTILINE)
# Legal inside a JSON string, but not inside a YAML 1.1 one: not printable there, or a line break.
_NEEDS_ESCAPE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_LONGEST_SIMPLE_KEY = 1000  # YAML gives up after 1024 characters unless `?` announces a key
_PLACEHOLDER = "rollbook line "
_TAIL_WINDOW = 1 << 16


def encode_item(event: Event) -> bytes:
    """One event as one line; whatever the values are, YAML and JSON read the same back."""
    plain = orjson.loads(LineSecrets().cleaned_json(encode(to_plain(event))))
    return f"- {_flow(plain)}\n".encode()


def _flow(value: Any) -> str:
    if isinstance(value, str):
        return _NEEDS_ESCAPE.sub(lambda match: f"\\u{ord(match[0]):04x}", orjson.dumps(value).decode())
    if isinstance(value, float):
        mantissa, mark, exponent = repr(value).partition("e")
        return mantissa + (".0" if "." not in mantissa else "") + mark + exponent
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    return orjson.dumps(value).decode()


def _key(key: str) -> str:
    text = _flow(key)
    return text if len(text) <= _LONGEST_SIMPLE_KEY else f"? {text}"


def parse(path: Path, data: bytes) -> list[Event]:
    """Every event of the file in order; an unterminated torn last line is a write that never happened."""
    *lines, tail = data.split(b"\n")
    if tail and not _is_torn(tail):
        lines.append(tail)
    first_item = _ANY_ITEM.search(data)
    start = (first_item[1] if first_item else b"") + b"- {"  # deeper ones belong to someone's nested list
    events: dict[int, Event] = {}
    only_ours = not lines or lines[0].rstrip() == b"runs:"
    for number, line in enumerate(lines):
        if line.startswith(start):
            with contextlib.suppress(orjson.JSONDecodeError):
                events[number] = orjson.loads(line[len(start) - 1 :])
                continue
        only_ours = only_ours and (number == 0 or line.strip() == b"")
    if not only_ours:
        return _parse_with_yaml(path, lines, events)
    return list(events.values())


def _parse_with_yaml(path: Path, lines: list[bytes], known: dict[int, Event]) -> list[Event]:
    """Other styles are YAML's business; the lines we know stand in by number, so that it has little to do."""
    import yaml

    text = b"\n".join(
        _indent(line) + f"- {_PLACEHOLDER}{number}".encode() if number in known else line
        for number, line in enumerate(lines)
    )
    try:
        content = yaml.load(text + b"\n", Loader=_yaml_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "context_mark", None) or getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        why = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise BadFileError(path, f"{where}not valid YAML ({why}); correct it by hand") from None
    if content is None:
        return []
    if not isinstance(content, dict) or not isinstance(content.get("runs") or [], list):
        raise BadFileError(path, "no `runs:` list; is this another program's file?")
    events = []
    for entry in content.get("runs") or []:
        if isinstance(entry, str) and entry.startswith(_PLACEHOLDER):
            events.append(known[int(entry.removeprefix(_PLACEHOLDER))])
        elif isinstance(entry, dict):
            events.append(to_plain(_with_text_times(entry)))
        else:
            raise BadFileError(path, f"{entry!r} in the `runs:` list is not a record of a run")
    return events


def _with_text_times(value: Any) -> Any:
    """YAML reads an unquoted time as one; records hold text, in UTC."""
    if isinstance(value, dict):
        return {key: _with_text_times(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_text_times(item) for item in value]
    if isinstance(value, datetime):
        return zulu(value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC))
    return value


def zulu(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _yaml_loader() -> Any:
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _indent(line: bytes) -> bytes:
    return line[: len(line) - len(line.lstrip(b" "))]


def _is_torn(tail: bytes) -> bool:
    """Whether an unterminated last line is what a killed append left, and not someone's last words."""
    if _is_complete(tail):
        return False
    body = tail.lstrip(b" ")
    return body.startswith((_OUR_START, b"\0")) or _OUR_START.startswith(body)


def _is_complete(line: bytes) -> bool:
    match = _OUR_LINE.fullmatch(line)
    if match is None:
        return False
    try:
        return isinstance(orjson.loads(match[2]), dict)
    except orjson.JSONDecodeError:
        return False


class IndexFile:
    """The file: `events` reads it without a lock, `appending` holds the lock and leaves it healed."""

    def __init__(self, path: Path, *, lock_timeout_s: float = 30.0) -> None:
        self.path = path
        self.lock_timeout_s = lock_timeout_s

    def events(self) -> list[Event]:
        try:
            return parse(self.path, self.path.read_bytes())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BadFileError(self.path, f"cannot be read: {error.strerror or error}") from error

    @contextlib.contextmanager
    def appending(self) -> Iterator[Appender]:
        with FileLock(self.path, wait_s=self.lock_timeout_s):
            if self.path.is_symlink():
                raise WriteError(f"{self.path} is a symlink; remove it, or link its whole directory instead")
            _open_up_empty_list(self.path)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                is_new = not self.path.exists()
                descriptor = os.open(self.path, flags, 0o666)
            except OSError as error:
                raise WriteError(f"{self.path}: cannot be appended to: {error.strerror or error}") from error
            try:
                if is_new:
                    fsync_directory(self.path.parent)
                yield Appender(self.path, descriptor)
            finally:
                os.close(descriptor)


class Appender:
    """Appends while the lock is held. What an append must begin with is settled by the state of the tail."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        size = os.fstat(descriptor).st_size
        data = os.pread(descriptor, _TAIL_WINDOW, max(0, size - _TAIL_WINDOW))
        if size > _TAIL_WINDOW and data.count(b"\n") < 3:
            data = os.pread(descriptor, size, 0)
        tail = data[data.rfind(b"\n") + 1 :]
        self._end = size
        if tail and (_is_torn(tail) or (len(tail) == size and HEADER.startswith(tail))):
            self._end -= len(tail)
            os.ftruncate(descriptor, self._end)
            os.fsync(descriptor)
            data, tail = data[: len(data) - len(tail)], b""
        self._start = b"\n" if tail else b""
        last = tail or data[data.rfind(b"\n", 0, -1) + 1 :].rstrip(b"\n")
        first_item = _ANY_ITEM.search(os.pread(descriptor, 4096, 0))
        if first_item and _is_complete(last) and first_item[1] == _indent(last):
            self._indent = first_item[1]
        else:
            self._indent = self._settle_style(os.pread(descriptor, self._end, 0))

    def append(self, event: Event) -> None:
        line = self._start + self._indent + encode_item(event)
        try:
            written = os.write(self._descriptor, line)
            why = "the disk is full"
        except OSError as error:
            written, why = 0, error.strerror or str(error)
        if written != len(line):
            with contextlib.suppress(OSError):  # the next append cuts it if this fails
                os.ftruncate(self._descriptor, self._end)
            raise WriteError(
                f"{self._path}: record not written: {why}; all earlier ones are intact. Free some space"
            )
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise WriteError(f"{self._path}: the disk did not confirm: {error.strerror or error}") from error
        self._start = b""
        self._end += len(line)

    def _settle_style(self, data: bytes) -> bytes:
        """Continue a list that ends in someone else's lines, after trying it on a copy in memory."""
        content = data.removeprefix(b"\xef\xbb\xbf")
        if not content.strip() or all(line.lstrip()[:1] in (b"", b"#") for line in content.split(b"\n")):
            self._start += HEADER
            return b""
        item = _ANY_ITEM.search(content)
        indent = item[1] if item else b""
        probe = {"id": "probe"}
        before = len(parse(self._path, data))
        try:
            after = parse(self._path, data + self._start + indent + encode_item(probe))
        except BadFileError:
            after = []
        if len(after) != before + 1 or after[-1] != probe:
            raise BadFileError(
                self._path,
                "cannot be appended to: `runs:` must be the last key and hold `- ` items. Move it to the "
                "end, or rename the file to start a new one",
            )
        return indent


def _open_up_empty_list(path: Path) -> None:
    """`runs: []` holds no record and cannot be appended to: make it `runs:`."""
    try:
        data = path.read_bytes() if path.stat().st_size < 4096 else b""
    except FileNotFoundError:
        return
    except OSError as error:
        raise WriteError(f"{path}: cannot be read: {error.strerror or error}") from error
    if _EMPTY_LIST.search(data) and not parse(path, data):
        write_atomic(path, _EMPTY_LIST.sub(rb"\1", data))
