"""A directory as one zip file to hand on, and back again from somebody who is not trusted.

What is unpacked is what was asked for: plain files whose names are allowed, no more bytes than allowed
(counted as they come, whatever the file says of itself), into a directory that is new. No link, no path that
leads elsewhere, nothing encrypted.
"""

from __future__ import annotations

import stat
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from rollbook.errors import BadFileError, UsageError
from rollbook.records.atomic import replacing

_CHUNK = 1 << 20
_WHEN = (1980, 1, 1, 0, 0, 0)  # equal directories give equal files
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1


def pack(directory: Path, target: Path) -> None:
    """Write every file below the directory into a zip that is there when it is whole."""
    with replacing(target) as file, zipfile.ZipFile(file, "w") as archive:
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(path.relative_to(directory).as_posix(), _WHEN)
            # Weights do not become smaller.
            is_dense = path.suffix == ".safetensors"
            entry.compress_type = zipfile.ZIP_STORED if is_dense else zipfile.ZIP_DEFLATED
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            with path.open("rb") as source, archive.open(entry, "w", force_zip64=True) as copy:
                while chunk := source.read(_CHUNK):
                    copy.write(chunk)


def unpack(
    path: Path, directory: Path, *, is_allowed: Callable[[str], bool], most_bytes: int, most_files: int
) -> None:
    """Write the files of a zip below a directory; BadFileError for a zip that is not what it must be."""
    try:
        if path.stat().st_size > most_bytes:
            raise BadFileError(path, f"is larger than {most_bytes:,} bytes")
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            _check(path, entries, is_allowed, most_bytes, most_files)
            left = most_bytes
            for entry in entries:
                left -= _write(archive, entry, directory / entry.filename, left, path)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        raise BadFileError(path, f"is not a whole zip file: {error}") from None


def _check(
    path: Path,
    entries: list[zipfile.ZipInfo],
    is_allowed: Callable[[str], bool],
    most_bytes: int,
    most_files: int,
) -> None:
    if len(entries) > most_files:
        raise BadFileError(path, f"has {len(entries)} files, and at most {most_files} are allowed")
    seen: set[str] = set()
    for entry in entries:
        name = entry.filename
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if not is_allowed(name) or name.startswith("/") or ".." in name.split("/") or "\\" in name:
            raise BadFileError(path, f"has a file {name!r}, which does not belong there")
        if kind not in (0, stat.S_IFREG) or entry.is_dir():
            raise BadFileError(path, f"{name!r} is not a plain file")
        if name.casefold() in seen:
            raise BadFileError(path, f"has two files {name!r}")
        if entry.flag_bits & _ENCRYPTED or entry.compress_type not in _METHODS:
            raise BadFileError(path, f"{name!r} is packed in a way that is not read here")
        seen.add(name.casefold())
    if sum(entry.file_size for entry in entries) > most_bytes:
        raise BadFileError(path, f"unpacks to more than {most_bytes:,} bytes")


def _write(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path, left: int, path: Path) -> int:
    """Returns how many bytes it was; a file that is longer than it says is cut off with an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with archive.open(entry) as source, target.open("xb") as copy:
        while chunk := source.read(_CHUNK):
            written += len(chunk)
            if written > left:
                raise BadFileError(path, f"{entry.filename!r} unpacks to more than is allowed")
            copy.write(chunk)
    return written
