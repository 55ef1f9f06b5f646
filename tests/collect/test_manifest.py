"""A manifest is a list of sessions; those of earlier versions are read into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

import rollbook
from collecting import config, run, script, small_input
from rollbook.audit.find import find_thing
from rollbook.collect.manifest import Manifest, Session, read_manifest
from rollbook.data.stats import stats
from rollbook.errors import BadFileError, UsageError
from rollbook.records.complete import FileFacts
from rollbook.runs.resolve import Role, find_sources

VERSION_1 = {
    "schema_version": 1,
    "created_at": "2026-01-01T00:00:00.000000Z",
    "updated_at": "2026-01-02T00:00:00.000000Z",
    "output": "out.jsonl",
    "input": "in.jsonl",
    "input_bytes": 0,
    "rows": 3,
    "repeats": 1,
    "operation": {"concurrency": 128, "workers": 1},
    "versions": {"rollbook": "0.0.1"},
    "coverage": {"expected": 3, "ok": 2, "failed": 0, "missing": 1},
}


def meaning(temperature: float | None = None) -> dict[str, Any]:
    env = {"name": "arithmetic", "version": 1}
    policy = {"kind": "scripted", "script": ["2"]}
    params = {} if temperature is None else {"temperature": temperature}
    return {
        "agent": {"env": env, "policy": policy, "max_turns": 64},
        "responses_create_params": params,
        "num_repeats_add_seed": False,
    }


def begun_before(directory: Path, lines: int, **manifest: Any) -> bytes:
    """A collection of three rows of which some lines are there, with a manifest of version 1; the lines."""
    source = small_input(directory, 3)
    config(directory)
    run(directory, f"limit={lines}")
    sha256 = orjson.loads((directory / "out_manifest.json").read_bytes())["input_sha256"]
    content = {**VERSION_1, "input_sha256": sha256, "input_bytes": source.stat().st_size, **manifest}
    (directory / "out_manifest.json").write_bytes(orjson.dumps(content))
    return (directory / "out.jsonl").read_bytes()


def test_a_collection_begun_by_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    lines = begun_before(tmp_path, 2, sessions=4, meaning=meaning(), earlier_meanings=[])
    with pytest.raises(UsageError, match=r"temperature: was \(absent\), now 1"):
        run(tmp_path, "responses_create_params.temperature=1")
    assert run(tmp_path).done_before == 2
    assert (tmp_path / "out.jsonl").read_bytes().startswith(lines)
    manifest = read_manifest(tmp_path / "out_manifest.json")
    assert manifest is not None
    assert [session.output_start for session in manifest.sessions] == [0, len(lines)]
    assert manifest.sessions[0].versions == {"rollbook": "0.0.1"}


def test_settings_that_an_earlier_version_had_mixed_stay_apart(tmp_path: Path) -> None:
    first = 300  # somewhere in the first line is as good as its end
    earlier = [{"meaning": meaning(0.5), "until_session": 2, "until_byte": first}]
    begun_before(tmp_path, 2, sessions=3, meaning=meaning(), earlier_meanings=earlier)
    manifest = read_manifest(tmp_path / "out_manifest.json")
    assert manifest is not None
    found = [manifest.session_at(byte) for byte in (0, first - 1, first)]
    assert [one and one.meaning for one in found] == [meaning(0.5), meaning(0.5), meaning()]
    assert run(tmp_path).done == 3


def test_a_meaning_of_an_earlier_version_that_no_line_has_does_not_count(tmp_path: Path) -> None:
    lines = begun_before(tmp_path, 2)
    earlier = [{"meaning": meaning(), "until_session": 1, "until_byte": len(lines)}]
    path = tmp_path / "out_manifest.json"
    content = orjson.loads(path.read_bytes())
    path.write_bytes(
        orjson.dumps({**content, "sessions": 2, "meaning": meaning(0.5), "earlier_meanings": earlier})
    )
    assert run(tmp_path).done == 3


def test_keys_that_this_version_does_not_know_are_kept(tmp_path: Path) -> None:
    begun_before(tmp_path, 2, sessions=1, meaning=meaning(), of_a_later_version={"x": [1]})
    run(tmp_path)
    assert orjson.loads((tmp_path / "out_manifest.json").read_bytes())["of_a_later_version"] == {"x": [1]}


def test_the_last_session_stands_at_the_top(tmp_path: Path) -> None:
    manifest = Manifest(tmp_path / "m.json", "out.jsonl")
    for rows in (1, 2):
        manifest.begin(Session(repeats=1, rows=rows, meaning={}, output_start=rows))
        manifest.end({"expected": rows}, FileFacts(rows, "d"), is_ordered=False)
    content = orjson.loads((tmp_path / "m.json").read_bytes())
    assert (content["schema_version"], content["rows"], content["coverage"]) == (2, 2, {"expected": 2})
    assert [session["rows"] for session in content["sessions"]] == [1, 2]


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"sessions": [3]}'])
def test_what_is_no_manifest_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_bytes(content)
    with pytest.raises(BadFileError, match=r"m\.json: not a manifest"):
        read_manifest(tmp_path / "m.json")


def test_lines_that_were_moved_say_so(tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    config(
        tmp_path, script(tmp_path, "await asyncio.sleep(0.3 if 'hang' in str(request) else 0)\nreturn '2'")
    )
    rows = (tmp_path / "in.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "in.jsonl").write_bytes(b"".join([rows[0].replace(b"1 + 1", b"hang"), *rows[1:]]))
    run(tmp_path)
    assert "ordered" not in orjson.loads((tmp_path / "out_manifest.json").read_bytes())
    run(tmp_path, "ordered=true")
    assert orjson.loads((tmp_path / "out_manifest.json").read_bytes())["ordered"] is True


def test_a_collection_whose_files_have_their_names_of_before_goes_on_with_them(tmp_path: Path) -> None:
    fails = (
        "if not (pathlib.Path(__file__).parent / 'mended').exists():\n    raise ValueError('no')\nreturn '2'"
    )
    config(tmp_path, script(tmp_path, fails))
    own = ("input_jsonl_fpath=null", "limit=3", "retry.bad_answer=1", "retry.environment=1")
    assert run(tmp_path, *own, "max_failure_rate=1").failed == 3
    for name in ("failures", "tasks"):
        (tmp_path / f"out_{name}.ndjson").rename(tmp_path / f"out_{name}.jsonl")
    manifest = tmp_path / "out_manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"_tasks.ndjson", b"_tasks.jsonl"))
    before = (tmp_path / "out_failures.jsonl").read_bytes()
    assert run(tmp_path, *own, "max_failure_rate=1").failed == 3
    assert (tmp_path / "out_failures.jsonl").read_bytes().startswith(before)
    (tmp_path / "mended").touch()
    assert run(tmp_path, *own).missing == 0
    assert orjson.loads(manifest.read_bytes())["input"] == str(tmp_path / "out_tasks.jsonl")
    assert not list(tmp_path.glob("*.ndjson"))
    assert sum(stats([tmp_path / "out.jsonl"]).failures.values()) == 6
    assert find_sources([tmp_path / "out.jsonl"]).of(Role.FAILURES)[0].path.name == "out_failures.jsonl"
    assert find_thing(tmp_path / "out_failures.jsonl").path == tmp_path / "out.jsonl"
    assert rollbook.audit(tmp_path / "out_failures.jsonl").findings == []


@pytest.mark.parametrize("name", ["out_tasks.jsonl", "out_failures.jsonl"])
def test_a_file_of_somebodys_with_a_name_of_before_is_left_alone(name: str, tmp_path: Path) -> None:
    config(tmp_path)
    (tmp_path / name).write_text("mine\n")
    run(tmp_path, "input_jsonl_fpath=null", "limit=3")
    assert (tmp_path / name).read_text() == "mine\n"
    assert (tmp_path / "out_tasks.ndjson").exists() and (tmp_path / "out_failures.ndjson").exists()
