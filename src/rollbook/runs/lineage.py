"""What a checkpoint, a dataset or a collection was made from, back to the first file, each link compared.

    node = lineage("artifacts/model/demo/checkpoint-30")
    node.parents[0].what, node.parents[0].status       # "run", "verified"

A run names its inputs in run.json, a dataset in its manifest, a collection in that of its sessions, each with
the digest of the bytes that were read. A link is verified when the file still has these bytes. A file that is
not where it was is looked for beside what was made from it, and known by its digest. Nothing that is read
here is run, and no digest is guessed: what was not recorded is `unrecorded`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from importlib.util import decode_source
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollbook.errors import UsageError
from rollbook.records.complete import COMPLETE, FileFacts, directory_facts, file_facts, problem, read_mark
from rollbook.records.datasets import is_collection, manifest_path, read_manifest
from rollbook.records.run_info import RunInfo, read_run_info

Advance = Callable[[int], None]


class Status(StrEnum):
    VERIFIED = "verified"  # the bytes are those that were read
    MOVED = "moved"  # likewise, at another place
    CHANGED = "changed"  # other bytes
    MISSING = "missing"  # not there, nor beside what was made from it
    UNRECORDED = "unrecorded"  # nobody wrote down what was read


BROKEN = frozenset({Status.CHANGED, Status.MISSING})


class Node(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A thing, how it is linked to what was made from it, and what it was made from itself."""

    what: str  # checkpoint, run, dataset, collection; else the part it plays: data, tasks, model, environment
    path: str
    status: Status | None = None  # of the link to the thing above; None for the first one
    why: str = ""
    facts: dict[str, Any] = {}
    parents: list[Node] = []

    def all(self) -> Iterator[Node]:
        yield self
        for parent in self.parents:
            yield from parent.all()

    @property
    def is_whole(self) -> bool:
        """Whether no link is broken."""
        return not any(node.status in BROKEN for node in self.all())


class Link(NamedTuple):
    """What was recorded of something that was read."""

    what: str
    path: Path
    bytes: int | None = None
    digest: str | None = None
    algorithm: str = "xxh3_128"
    facts: dict[str, Any] = {}


def lineage(thing: str | Path, *, advance: Advance = lambda _: None) -> Node:
    """The chain of a checkpoint, a run, a dataset or a collection.

    `advance` is called with the number of bytes just read.
    """
    path = Path(thing).expanduser().absolute()
    if not path.exists():
        raise UsageError(f"{thing}: no such file or directory")
    return _Tracer(advance).node(path)


class _Tracer:
    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._known: dict[tuple[Path, str, int | None], FileFacts] = {}  # what was read already
        self._open: list[Path] = []  # the things below: what was made of itself would never end

    def node(self, path: Path, role: str | None = None) -> Node:
        """The thing at this place with all that it was made from."""
        place = path.resolve()
        node = self._described(path, role)
        if path.is_file() and (why := self._own_difference(path)) is not None:
            node.status, node.why = Status.CHANGED, why
        if place in self._open:
            node.why = "was made from itself"
            return node
        self._open.append(place)
        node.parents = [self._follow(link, path) for link in self._links(path)]
        self._open.pop()
        return node

    def _described(self, path: Path, role: str | None) -> Node:
        if path.is_dir():
            if (path / "run.json").exists():
                return Node(what="run", path=str(path), facts=_run_facts(read_run_info(path / "run.json")))
            if run_of_checkpoint(path) is not None:
                return Node(what="checkpoint", path=str(path), facts={"step": path.name})
            return Node(what=role or "directory", path=str(path))
        manifest = read_manifest(path)
        if is_collection(manifest):
            return Node(what="collection", path=str(path), facts=_collection_facts(manifest))
        if manifest.get("command"):
            facts = {key: manifest[key] for key in _DATASET_FACTS if manifest.get(key) is not None}
            return Node(what="dataset", path=str(path), facts=facts)
        return Node(what=role or "file", path=str(path))

    def _links(self, path: Path) -> list[Link]:
        if path.is_dir():
            if (path / "run.json").exists():
                return _links_of_run(read_run_info(path / "run.json"))
            run = run_of_checkpoint(path)
            return [] if run is None else [Link("run", run)]
        manifest = read_manifest(path)
        return _links_of_collection(manifest) if is_collection(manifest) else _links_of_dataset(manifest)

    def _follow(self, link: Link, child: Path) -> Node:
        """The node of what was read, with the verdict on the link."""
        if link.what == "run":
            return self._checkpoint_link(link, child)
        if link.what in _NAMED:
            return _named(link)
        found, status, why = self._found(link, child)
        if found is None:
            return Node(what=link.what, path=str(link.path), status=status, why=why, facts=link.facts)
        node = self.node(found, link.what)
        if node.what != link.what:
            node.facts = {"as": link.what, **node.facts}
        node.status = node.status if status not in BROKEN and node.status in BROKEN else status
        node.why = "; ".join(filter(None, (why, node.why)))
        return node

    def _own_difference(self, path: Path) -> str | None:
        """Whether a dataset or collection is what its own manifest says."""
        digest = (manifest := read_manifest(path)).get("output_xxh3_128")
        if digest is None or self._facts(path).xxh3_128 == digest:
            return None
        size = f"{manifest.get('output_bytes', 0):,} bytes with digest {digest}"
        return f"it was changed after it was made: {manifest_path(path).name} says {size}"

    def _checkpoint_link(self, link: Link, checkpoint: Path) -> Node:
        """A checkpoint is of the run that it stands in, if it is still what was saved."""
        node = self.node(link.path)
        mark = read_mark(checkpoint)
        if mark is None or mark.files is None:
            node.status, node.why = Status.UNRECORDED, f"{checkpoint.name}/{COMPLETE} names no digests"
            return node
        wrong = problem(checkpoint, verify=True)
        node.status = Status.VERIFIED if wrong is None else Status.CHANGED
        node.why = wrong or f"{len(mark.files)} files of the checkpoint are as they were saved"
        self._advance(sum(facts.bytes for facts in mark.files.values()))
        return node

    def _found(self, link: Link, child: Path) -> tuple[Path | None, Status, str]:
        if link.digest is None:
            if link.path.exists():
                return link.path, Status.UNRECORDED, "its digest was not written down"
            return None, Status.MISSING, "not there, and its digest was not written down"
        other: tuple[Path, str] | None = None
        for place in _places(link.path, child):
            if (difference := self._difference(link, place)) is None:
                if place == link.path or not link.path.is_absolute():
                    return place, Status.VERIFIED, _growth(link, place)
                return place, Status.MOVED, f"was at {link.path}"
            other = other or (place, difference)
        if other is not None:
            return other[0], Status.CHANGED, other[1]
        return None, Status.MISSING, "not there, nor beside what was made from it"

    def _difference(self, link: Link, place: Path) -> str | None:
        """What differs from what was recorded; None where it is the same."""
        facts = self._facts(place, link.bytes, link.algorithm)
        if link.bytes is not None and facts.bytes < link.bytes:
            return f"has {facts.bytes:,} bytes, and {link.bytes:,} were read"
        if facts.xxh3_128 != link.digest:
            return f"its digest is {facts.xxh3_128}, and {link.digest} was read"
        return None

    def _facts(self, place: Path, end: int | None = None, algorithm: str = "xxh3_128") -> FileFacts:
        if place.is_file() and end is not None and place.stat().st_size <= end:
            end = None
        key = place.resolve(), algorithm, end
        if key not in self._known:
            if place.is_dir():
                facts = directory_facts(place, verify=True, advance=self._advance)
            elif algorithm == "sha256":
                facts = _sha256(place, end, self._advance)
            else:
                facts = file_facts(place, end=end, advance=self._advance)
            self._known[key] = facts
        return self._known[key]


def run_of_checkpoint(path: Path) -> Path | None:
    """The directory of the run that a checkpoint stands in."""
    if not (path / COMPLETE).exists():
        return None
    return next((above for above in list(path.parents)[:2] if (above / "run.json").exists()), None)


def _run_facts(info: RunInfo) -> dict[str, Any]:
    last = info.attempts[-1] if info.attempts else None
    facts = {
        "kind": info.kind,
        "id": info.id,
        "started_at": info.started_at,
        "attempts": len(info.attempts),
        "outcome": last.outcome if last is not None else None,
        "rollbook": info.versions.get("rollbook"),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _links_of_run(info: RunInfo) -> list[Link]:
    links = []
    for one in info.inputs or []:
        facts = {"code": one.code} if one.code else {}
        if one.attempt > 1:
            facts["attempt"] = str(one.attempt)
        links.append(Link(one.what, Path(one.path), one.bytes, one.xxh3_128, facts=facts))
    return links


_NAMED = ("environment", "policy", "hub model")  # by name and version; no file stands for them
_DATASET_FACTS = ("command", "arguments", "seed", "created_at", "rows_in", "rows_out")


def _links_of_dataset(manifest: Mapping[str, Any]) -> list[Link]:
    directory = Path(str(manifest.get("directory") or "."))
    return [
        Link("input", directory / str(one["path"]), one.get("bytes"), one.get("xxh3_128"))
        for one in manifest.get("inputs") or []
        if isinstance(one, dict) and one.get("path")
    ]


def _collection_facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    last = _sessions(manifest)[-1]
    agent = last.get("meaning", {}).get("agent") or {}
    policy = agent.get("policy") or {}
    facts = {
        "sessions": len(_sessions(manifest)),
        "coverage": manifest.get("coverage"),
        "environment": (agent.get("env") or {}).get("name"),
        "model": policy.get("model") or policy.get("path") or policy.get("kind"),
        "created_at": manifest.get("created_at"),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _sessions(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those of a manifest of version 1 are one: its keys at the top."""
    return manifest.get("sessions") or [manifest]


def _links_of_collection(manifest: Mapping[str, Any]) -> list[Link]:
    """Inputs, code of environments and models of all sessions, each once."""
    links: dict[str, Link] = {}
    for session in _sessions(manifest):
        agent = session.get("meaning", {}).get("agent") or {}
        if session.get("input"):
            path, digest = Path(str(session["input"])), session.get("input_sha256")
            link = Link("tasks", path, session.get("input_bytes"), digest, "sha256")
            links[f"{path} {digest}"] = link
        env, policy = agent.get("env") or {}, agent.get("policy") or {}
        if env.get("name"):
            code = env.get("source_sha256") or f"version {env.get('version')}"
            links[f"{env['name']} {code}"] = Link("environment", Path(env["name"]), facts={"code": code})
        if policy.get("kind") == "local" and policy.get("path"):
            links[f"model {policy['path']}"] = Link("model", Path(str(policy["path"])))
        elif policy:
            name = policy.get("model") or policy.get("script") or policy.get("kind")
            links[f"policy {name}"] = Link("policy", Path(str(name)), facts={"kind": policy.get("kind")})
    return list(links.values())


def _named(link: Link) -> Node:
    """Something that is known by its name: code, a model of a server or of the hub."""
    node = Node(what=link.what, path=str(link.path), status=Status.UNRECORDED, facts=link.facts)
    code = str(link.facts.get("code") or "")
    if code.startswith("version "):
        node.status, node.why = Status.VERIFIED, "of Rollbook's own"
    elif link.what == "hub model":
        node.status, node.why = Status.VERIFIED, "a commit does not change"
    elif code:
        node.status, node.why = _code_status(Path(str(link.path).rpartition(":")[0]), code)
    else:
        node.why = "only its name was written down"
    return node


def _code_status(file: Path, digest: str) -> tuple[Status, str]:
    """Code is compared as text, and never loaded: a digest that covers several files cannot be made again."""
    if not file.is_file():
        return Status.UNRECORDED, "its file is not here, so its digest cannot be compared"
    text = decode_source(file.read_bytes())
    whole = text if text.endswith("\n") else f"{text}\n"
    if hashlib.sha256(whole.encode()).hexdigest() == digest:
        return Status.VERIFIED, ""
    return Status.UNRECORDED, "its text differs from what was loaded, or the digest covers other files too"


def _places(recorded: Path, child: Path) -> Iterator[Path]:
    """Where it is if nobody moved it, then where it would be if it was moved with what was made from it."""
    first = recorded if recorded.is_absolute() else child.parent / recorded
    if first.exists():
        yield first
    parts = [part for part in recorded.parts if part not in (recorded.anchor, "..")]
    seen = {first}
    for length in range(1, len(parts) + 1):
        for above in list(child.parents)[:6]:
            place = above.joinpath(*parts[-length:])
            if place not in seen and place != child and place.exists():
                seen.add(place)
                yield place


def _growth(link: Link, place: Path) -> str:
    if link.bytes is None or place.is_dir():
        return ""
    more = place.stat().st_size - link.bytes
    return f"{more:,} bytes were appended since" if more > 0 else ""


def _sha256(path: Path, end: int | None, advance: Advance) -> FileFacts:
    """With the digest that collections write down of their input."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 20 if end is None else min(1 << 20, end - size)):
            digest.update(chunk)
            size += len(chunk)
            advance(len(chunk))
    return FileFacts(size, digest.hexdigest())
