"""index.yaml is YAML at any time, is only ever appended to, and survives a torn tail and other hands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollbook.errors import BadFileError, LockedError, WriteError
from rollbook.records.locks import FileLock
from rollbook.runs.jobs.index_file import HEADER, IndexFile, encode_item, parse

LOADERS = [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
keys = st.text()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(keys, values, max_size=5))
@example({"<<": {"a": 1}, "=": "!", "": [], "a: b": "- c # d", "lr": 1e-05, "big": 1e22, "zero": -0.0})
@example({"text": "\t\r\n\x00\x1f\x7f\x80\x85\x9f\xa0\u2028\u2029\ufeff\ufffe\uffff\U0001f600\U0010ffff"})
@example({"k" * 3000: {"q" * 1024: 1}, "123": "0x1F", "yes": "no", "time": "2026-11-15T19:40:12Z"})
@example({"deep": [[[[[[[[{"x": [{}]}]]]]]]]]})
def test_yaml_and_we_read_exactly_what_was_written(event: dict[str, Any]) -> None:
    data = HEADER + encode_item(event) + encode_item({"id": "next"})
    assert data.count(b"\n") == 3
    for loader in LOADERS:
        assert yaml.load(data, Loader=loader) == {"runs": [event, {"id": "next"}]}
    assert parse(Path("index.yaml"), data) == [event, {"id": "next"}]


@pytest.mark.parametrize("alphabet", ["k", "kä", "\u2028", '"\\', "\U0001f600"])
@pytest.mark.parametrize(
    "length", [160, 170, 499, 500, 511, 512, 999, 1000, 1001, 1022, 1023, 1024, 1025, 5000]
)
def test_long_keys_and_values_are_read_back(alphabet: str, length: int) -> None:
    text = (alphabet * length)[:length]
    event = {"id": text, text: {text: [text], "last": 1}}
    data = HEADER + encode_item(event)
    for loader in LOADERS:
        assert yaml.load(data, Loader=loader) == {"runs": [event]}
    assert parse(Path("index.yaml"), data) == [event]


def test_a_lone_surrogate_does_not_cost_the_record() -> None:
    data = HEADER + encode_item({"id": "a", "text": "bad \ud800 here"})
    assert yaml.safe_load(data) == {"runs": [{"id": "a", "text": "bad \ufffd here"}]}


def append(path: Path, *events: dict[str, Any]) -> None:
    with IndexFile(path).appending() as index:
        for event in events:
            index.append(event)


def test_the_bytes_before_an_append_never_change(tmp_path: Path) -> None:
    path = tmp_path / "artifacts" / "index.yaml"
    seen = b""
    for number in range(20):
        append(path, {"id": f"run {number}", "text": "ü" * number})
        now = path.read_bytes()
        assert now.startswith(seen) and len(now) > len(seen)
        seen = now
    assert [run["id"] for run in yaml.safe_load(seen)["runs"]] == [f"run {number}" for number in range(20)]


def test_a_tail_torn_at_any_byte_is_healed_and_no_earlier_record_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "index.yaml"
    append(path, {"id": "first", "name": "grüße"}, {"id": "second", "metrics": {"loss": 1e-5}})
    before = path.read_bytes()
    torn = encode_item({"id": "torn", "name": "wörter \U0001f600", "list": [1, {"a": "}"}]})
    for length in range(len(torn) + 1):
        path.write_bytes(before + torn[:length])
        kept = ["torn"] if length >= len(torn) - 1 else []  # only its newline was missing
        assert [event["id"] for event in IndexFile(path).events()] == ["first", "second", *kept]
        append(path, {"id": "next"})
        assert path.read_bytes().startswith(before)
        assert [run["id"] for run in yaml.safe_load(path.read_bytes())["runs"]] == [
            "first",
            "second",
            *kept,
            "next",
        ]


def test_a_first_write_torn_at_any_byte_is_healed(tmp_path: Path) -> None:
    path = tmp_path / "index.yaml"
    first = HEADER + encode_item({"id": "first"})
    for length in range(len(first)):
        path.write_bytes(first[:length])
        append(path, {"id": "next"})
        kept = [{"id": "first"}] if length == len(first) - 1 else []
        assert yaml.safe_load(path.read_bytes()) == {"runs": [*kept, {"id": "next"}]}


def test_zeros_that_a_power_cut_left_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "index.yaml"
    append(path, {"id": "first"})
    with path.open("ab") as file:
        file.write(b"\0" * 300)
    assert IndexFile(path).events() == [{"id": "first"}]
    append(path, {"id": "next"})
    assert yaml.safe_load(path.read_bytes()) == {"runs": [{"id": "first"}, {"id": "next"}]}


FOREIGN = {
    "safe_dump": "runs:\n- id: run_001\n  status: completed\n  notes: a\n",
    "indented": "runs:\n  - id: run_001\n    status: completed\n",
    "no final newline": "runs:\n- id: run_001\n  notes: last words",
    "comments": "# ours\n---\nruns:   # all\n\n- id: run_001 # one\n\n# end\n",
    "block text": "runs:\n- id: run_001\n  notes: |\n    - {not: an item}\n    - {}\n",
    "carriage returns": "runs:\r\n- id: run_001\r\n  status: failed\r\n",
    "other keys before": 'version: 1\nextra:\n- {"a": 1}\nruns:\n- id: run_001\n',
    "flow over lines": "runs:\n- {id: run_001,\n   status: completed}\n",
    "nested list": 'runs:\n- id: run_001\n  checkpoints:\n  - {"step": 1}\n  - {"step": 2}\n',
    "byte order mark": "\ufeffruns:\n- id: run_001\n",
    "anchors": "runs:\n- &a\n  id: run_001\n- <<: *a\n  status: failed\n",
}


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_list_in_another_style_is_read_and_appended_to(tmp_path: Path, text: str) -> None:
    path = tmp_path / "index.yaml"
    path.write_bytes(text.encode())
    before = yaml.safe_load(text.encode())["runs"]
    assert IndexFile(path).events() == before
    append(path, {"id": "new"})
    append(path, {"id": "newer"})
    assert path.read_bytes().startswith(text.encode())
    assert yaml.safe_load(path.read_bytes())["runs"] == [*before, {"id": "new"}, {"id": "newer"}]
    assert IndexFile(path).events() == [*before, {"id": "new"}, {"id": "newer"}]


@pytest.mark.parametrize(
    "text", ["", "\n\n", "# nothing yet\n", "runs:\n", "runs: []\n", "runs: null # none\n"]
)
def test_an_empty_list_is_begun(tmp_path: Path, text: str) -> None:
    path = tmp_path / "index.yaml"
    path.write_text(text)
    assert IndexFile(path).events() == []
    append(path, {"id": "new"})
    assert yaml.safe_load(path.read_bytes()) == {"runs": [{"id": "new"}]}


@pytest.mark.parametrize(
    "text",
    ["runs:\n- id: a\nother: 1\n", "runs: [{id: a}]\n", "runs:\n- id: a\n...\n", "- id: a\n", "text\n"],
)
def test_a_file_that_cannot_be_appended_to_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "index.yaml"
    path.write_text(text)
    with pytest.raises(BadFileError, match=r"index\.yaml"):
        append(path, {"id": "new"})
    assert path.read_text() == text


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "index.yaml"
    path.write_bytes(HEADER + encode_item({"id": "a"}) + b'- {"id": "b", "na\n' + encode_item({"id": "c"}))
    with pytest.raises(BadFileError, match=r"line 3"):
        IndexFile(path).events()


def test_times_that_yaml_understands_become_text_in_utc(tmp_path: Path) -> None:
    path = tmp_path / "index.yaml"
    path.write_text(
        "runs:\n- id: a\n  started_at: 2026-08-12T10:00:00+02:00\n  completed_at: 2026-08-12 10:30:00\n"
    )
    (event,) = IndexFile(path).events()
    assert event["started_at"] == "2026-08-12T08:00:00.000Z"
    assert event["completed_at"] == "2026-08-12T10:30:00.000Z"


def test_a_held_lock_is_waited_for_and_then_named(tmp_path: Path) -> None:
    path = tmp_path / "index.yaml"
    holder = FileLock(path)
    with pytest.raises(LockedError, match=str(os.getpid())), IndexFile(path, lock_timeout_s=0.05).appending():
        raise AssertionError("two writers at once")
    holder.release()
    append(path, {"id": "a"})


def test_a_disk_that_fills_up_costs_only_the_new_record(tmp_path: Path) -> None:
    path = tmp_path / "index.yaml"
    append(path, {"id": "first"})
    before = path.read_bytes()
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from rollbook.runs.jobs.index_file import IndexFile\n"
        "from rollbook.errors import WriteError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "path = Path(sys.argv[1])\n"
        "with IndexFile(path).appending() as index:\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10,) * 2)\n"
        "    try: index.append({'id': 'second', 'text': 'x' * 50})\n"
        "    except WriteError as error: print('refused:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert "refused:" in done.stdout
    assert path.read_bytes() == before


def test_an_index_that_cannot_be_created_says_so(tmp_path: Path) -> None:
    (tmp_path / "index.yaml").mkdir()
    with pytest.raises((WriteError, BadFileError), match=r"index\.yaml"):
        append(tmp_path / "index.yaml", {"id": "a"})
