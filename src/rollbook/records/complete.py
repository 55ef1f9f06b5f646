"""Files and directories that are complete or absent, whatever kills their writer and however many write them.

A directory is written beside its place, as `.<name>.making`, by the one process that holds the lock of
`<name>`. Then every file is put on the disk, `COMPLETE` is written last, with the size and digest of every
file, and one rename gives the directory its name. A finished directory is never replaced unless the caller
says that it is of no use. Files are written the same way and appear together. What a killed writer left is
removed by the next one.

    with complete_directory(path) as aside:            # a checkpoint: one writer, a second is refused
        save_into(aside)

    make_once(path, tokenise_into)                     # a cache: a second process waits for the first one's

    with complete_files(path, other) as (aside, beside):   # files that appear together, or none of them
        (aside / path.name).write_bytes(...)

Several processes of one job write one directory like this: the first one opens `complete_directory`, all
write into `unfinished_path(path)` between two barriers, and the first one leaves the block.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from rollbook.errors import LockedError, WriteError
from rollbook.records.atomic import fsync_directory, make_directory, write_atomic
from rollbook.records.locks import FileLock
from rollbook.records.plain import encode_document, utc_now

COMPLETE = "COMPLETE"  # the mark, a file of the directory
_MAKING = ".making"
_OLD, _LINK = ".old", ".link"  # beside a file aside: what it replaced, and a second name for it
_CHUNK = 1 << 20


class FileFacts(msgspec.Struct):
    bytes: int
    xxh3_128: str  # as `xxh128sum` prints it


class CompleteMark(msgspec.Struct):
    """What `COMPLETE` holds. `files` is None for a mark of an older version: empty, or a time."""

    completed_at: str | None = None
    files: dict[str, FileFacts] | None = None


def file_facts(
    path: Path, *, end: int | None = None, sync: bool = False, advance: Callable[[int], None] | None = None
) -> FileFacts:
    """Size and digest of a file, or of its first `end` bytes; `sync` also puts it on the disk.

    `advance` is called with the number of bytes just read.
    """
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK if end is None else min(_CHUNK, end - size)):
            digest.update(chunk)
            size += len(chunk)
            if advance is not None:
                advance(len(chunk))
        if sync:
            os.fsync(file.fileno())
    return FileFacts(size, digest.hexdigest())


def directory_facts(
    directory: Path, *, verify: bool = False, advance: Callable[[int], None] | None = None
) -> FileFacts:
    """Size of all files of a directory, and a digest of their names, sizes and digests.

    Files that `COMPLETE` names are not read again, unless they are to be verified; others do not count there.
    """
    mark = read_mark(directory)
    files = (mark.files or None) if mark is not None else None
    if files is None or verify:
        found = [path for path in directory.rglob("*") if path.is_file() and path.name != COMPLETE]
        names = [path.relative_to(directory).as_posix() for path in found]
        chosen = [name for name in names if files is None or name in files]
        files = {name: file_facts(directory / name, advance=advance) for name in chosen}
    lines = (f"{name}\0{facts.bytes}\0{facts.xxh3_128}\n" for name, facts in sorted(files.items()))
    digest = xxhash.xxh3_128_hexdigest("".join(lines).encode("utf-8", "surrogateescape"))
    return FileFacts(sum(facts.bytes for facts in files.values()), digest)


def unfinished_path(target: Path) -> Path:
    """Where `target` is written until it is complete."""
    return target.with_name(f".{target.name}{_MAKING}")


@contextlib.contextmanager
def complete_directory(
    target: Path, *, displace: Callable[[Path], object] | None = None, wait_s: float = 0.0
) -> Iterator[Path]:
    """Yields an empty directory that becomes `target` when the block ends, or is removed when it raises.

    An existing `target` is refused, at once, unless `displace` is given: it is called at the end with the
    old directory and must move it away. A second writer is refused (`LockedError`), or waits for `wait_s`
    seconds.
    """
    with FileLock(target, wait_s=wait_s):
        if displace is None:
            _refuse_existing(target)
        with _making(target) as aside:
            yield aside
            _publish(aside, target, displace)


def make_once(
    target: Path,
    make: Callable[[Path], None],
    *,
    is_usable: Callable[[Path], bool] | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Path:
    """Returns `target`, after `make(directory)` has written it if it was not there.

    When several processes ask at once, one makes it and the others wait; `on_wait` is called once, with a
    sentence that says for whom. A directory that is there and not usable (by default: not complete) is made
    again; it stays in place until its successor is finished.
    """
    usable = is_usable or is_complete
    if usable(target):
        return target
    with FileLock(target, wait_s=math.inf, on_wait=on_wait):
        if not usable(target):  # the process we waited for may have made it
            with _making(target) as aside:
                make(aside)
                _publish(aside, target, remove_directory)
    return target


@contextlib.contextmanager
def complete_files(*targets: Path, overwrite: bool = False) -> Iterator[list[Path]]:
    """Yields an empty directory for each target; at the end the files in them appear beside the targets.

    All of them appear or none: the first target last, whose name says that the others are there. A target
    that exists is refused, also one that appeared meanwhile, unless `overwrite`; other files (a manifest) are
    replaced. Directories in those that were yielded are for scratch. A second writer is refused.
    """
    with contextlib.ExitStack() as held:
        for target in targets:
            _make_parent(target)
            held.enter_context(FileLock(target))
            if not overwrite:
                _refuse_existing(target)
        _take_back_after_a_kill(targets)
        asides = [held.enter_context(_making(target)) for target in targets]
        yield asides
        _appear(_files_aside(targets), new=() if overwrite else targets)


def is_complete(directory: Path, *, verify: bool = False) -> bool:
    """Whether the directory was finished and has all its files in their full size; see `problem`."""
    return problem(directory, verify=verify) is None


def problem(directory: Path, *, verify: bool = False) -> str | None:
    """What keeps a directory from being complete, in words; None when it is.

    `verify` also reads every file and compares its digest. Files that were added later are nobody's business.
    Marks of older versions name no files, so they are taken at their word.
    """
    if not directory.is_dir():
        return f"{directory} is not there"
    mark = read_mark(directory)
    if mark is None:
        return f"{directory} has no {COMPLETE} file: it was never finished"
    for name, facts in (mark.files or {}).items():
        path = directory / name
        if not path.is_file():
            return f"{path} is missing"
        if (size := path.stat().st_size) != facts.bytes:
            return f"{path} has {size:,} bytes instead of {facts.bytes:,}"
        if verify and file_facts(path) != facts:
            return f"{path} was changed: its digest is not the recorded one"
    return None


def read_mark(directory: Path) -> CompleteMark | None:
    """The mark of a directory; None where it has none."""
    try:
        data = (directory / COMPLETE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return msgspec.json.decode(data, type=CompleteMark)
    except msgspec.MsgspecError:  # of an older version
        return CompleteMark(completed_at=data.decode(errors="replace").strip() or None)


def remove_unfinished(parent: Path) -> list[Path]:
    """Remove what killed writers left below `parent`, and nothing that is being written now."""
    removed = []
    for aside in sorted(parent.glob(f".*{_MAKING}")):
        target = aside.with_name(aside.name.removeprefix(".").removesuffix(_MAKING))
        with contextlib.suppress(LockedError), FileLock(target):
            shutil.rmtree(aside, ignore_errors=True)
            removed.append(aside)
    return removed


def remove_directory(target: Path) -> None:
    """Remove a directory so that a kill leaves no half of it under its name; see `remove_unfinished`."""
    if target.is_dir() and not target.is_symlink():
        old = target.with_name(f".{target.name}.old{_MAKING}")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    else:
        target.unlink()


@contextlib.contextmanager
def _making(target: Path) -> Iterator[Path]:
    """An empty directory to write into, gone when the block ends; its lock is held by the caller."""
    _make_parent(target)
    aside = unfinished_path(target)
    try:
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir()
    except OSError as error:
        raise WriteError(f"{target}: cannot write here: {error.strerror or error}") from error
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _publish(aside: Path, target: Path, displace: Callable[[Path], object] | None) -> None:
    try:
        files = _sync_and_digest(aside)
        mark = msgspec.to_builtins(CompleteMark(utc_now(), files))
        write_atomic(aside / COMPLETE, encode_document(mark))
        if displace is None:
            _refuse_existing(target)
        elif os.path.lexists(target):
            displace(target)
        aside.rename(target)
        fsync_directory(target.parent)
    except OSError as error:
        free = shutil.disk_usage(target.parent).free
        raise WriteError(
            f"{target}: not written ({error.strerror or error}), nothing of it is left; "
            f"{free:,} bytes are free on this disk"
        ) from error


def _make_parent(target: Path) -> None:
    try:
        make_directory(target.parent)
    except OSError as error:
        raise WriteError(f"{target}: cannot write here: {error.strerror or error}") from error


def _files_aside(targets: Sequence[Path]) -> list[tuple[Path, Path]]:
    """Each file that was written aside, with its place; the first target comes last."""
    found = [
        (path, target.parent / path.name, (path.name == target.name) * (len(targets) - number))
        for number, target in enumerate(targets)
        if unfinished_path(target).is_dir()
        for path in sorted(unfinished_path(target).iterdir())
        if path.is_file() and not path.name.endswith((_OLD, _LINK))
    ]
    return [(path, place) for path, place, _ in sorted(found, key=lambda one: one[2])]


def _appear(files: Sequence[tuple[Path, Path]], new: Collection[Path]) -> None:
    """Give every file its name, or take all names back; they stay aside too, until the caller cleans up."""
    place = files[-1][1]
    try:
        for aside, _ in files:
            _sync(aside)
        for aside, place in files:
            _take_name(aside, place, is_new=place in new)
        for directory in {place.parent for _, place in files}:
            fsync_directory(directory)
    except BaseException as error:
        _take_names_back(files)
        if not isinstance(error, OSError):
            raise
        why = (
            f"{error.strerror or error}; {shutil.disk_usage(place.parent).free:,} bytes are free on this disk"
        )
        if isinstance(error, FileExistsError):
            why = "another program created it meanwhile; choose another name, or replace it knowingly"
        raise WriteError(f"{place}: not written, nor what belongs to it ({why})") from error


def _take_name(aside: Path, place: Path, *, is_new: bool) -> None:
    """Links, so that a name that is taken is never lost and can be given back."""
    old, link = (aside.with_name(f"{aside.name}{ending}") for ending in (_OLD, _LINK))
    try:
        if is_new or not place.exists():
            place.hardlink_to(aside)
        else:
            old.hardlink_to(place)
            link.hardlink_to(aside)
            link.replace(place)
    except FileExistsError:
        raise
    except OSError:  # a disk without links
        if is_new:
            _refuse_existing(place)
        aside.rename(place)


def _take_names_back(files: Sequence[tuple[Path, Path]]) -> None:
    for aside, place in files:
        old = aside.with_name(f"{aside.name}{_OLD}")
        if old.exists():
            old.replace(place)
        elif aside.exists() and place.exists() and place.samefile(aside):
            place.unlink()


def _take_back_after_a_kill(targets: Sequence[Path]) -> None:
    """Names that were given when the writer was killed before the first target had its own."""
    first = unfinished_path(targets[0]) / targets[0].name
    if first.exists() and not (targets[0].exists() and targets[0].samefile(first)):
        _take_names_back(_files_aside(targets))


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_and_digest(directory: Path) -> dict[str, FileFacts]:
    """Put everything below on the disk, and say what it is."""
    files = {}
    for folder, _, names in os.walk(directory):
        for name in sorted(names):
            path = Path(folder) / name
            if path.is_symlink() or not path.is_file():
                continue  # a link is part of its directory; a socket has nothing to sync
            if path == directory / COMPLETE:
                continue
            files[path.relative_to(directory).as_posix()] = file_facts(path, sync=True)
        fsync_directory(Path(folder))
    return dict(sorted(files.items()))


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise WriteError(f"{target} exists already, and is not replaced; move it away or choose another name")
