"""Typed records keep what they do not know, and a bad line is named by file, number and key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.errors import BadLineError
from rollbook.records.checkpoints import CheckpointRecord
from rollbook.records.jsonl import Line
from rollbook.records.plain import encode
from rollbook.records.record import Record, decode_line, decode_record, read_records

PATH = Path("log.jsonl")


class Sample(Record, kw_only=True):
    REQUIRED: ClassVar[frozenset[str]] = frozenset({"reward"})

    name: str
    step: int = 0
    reward: float | None = None
    note: str | None = None
    metrics: dict[str, Any] = {}


def line(data: bytes, number: int = 7) -> Line:
    return Line(data, number, 0, len(data) + 1)


def test_a_record_on_the_wire() -> None:
    record = Sample(name="a", step=2, reward=0.5, note="n", metrics={"m": 1}, extra={"new/key": [1]})
    assert json.loads(record.encode()) == {
        "name": "a",
        "step": 2,
        "reward": 0.5,
        "note": "n",
        "metrics": {"m": 1},
        "new/key": [1],
    }


def test_none_is_left_out_unless_required() -> None:
    assert Sample(name="a").to_plain() == {"name": "a", "step": 0, "reward": None, "metrics": {}}


def test_fields_come_before_unknown_keys_in_the_order_they_are_declared() -> None:
    record = Sample.from_plain({"zebra": 1, "reward": 0.0, "name": "a"})
    assert list(record.to_plain()) == ["name", "step", "reward", "metrics", "zebra"]


def test_unknown_keys_survive_a_round_trip() -> None:
    plain = {
        "name": "a",
        "step": 1,
        "reward": 1.0,
        "metrics": {},
        "new": {"deep": [1, {"x": None}]},
        "extra": 3,
    }
    record = Sample.from_plain(plain)
    assert record.extra == {"new": {"deep": [1, {"x": None}]}, "extra": 3}
    assert record.to_plain() == plain
    assert json.loads(Sample.from_plain(json.loads(record.encode())).encode()) == plain


def test_an_unknown_key_never_overrides_a_field() -> None:
    assert Sample(name="a", extra={"name": "b", "other": 1}).to_plain()["name"] == "a"


def test_records_do_not_share_their_defaults() -> None:
    first, second = Sample(name="a"), Sample(name="b")
    first.metrics["m"] = 1
    first.extra["e"] = 1
    assert (second.metrics, second.extra) == ({}, {})


def test_non_finite_numbers_are_null_and_listed() -> None:
    record = Sample(name="a", reward=float("nan"), metrics={"kl": float("inf")}, extra={"lr": float("-inf")})
    assert record.to_plain() == {
        "name": "a",
        "step": 0,
        "reward": None,
        "metrics": {"kl": None},
        "lr": None,
        "nonfinite": ["reward", "metrics.kl", "lr"],
    }


def test_the_list_of_non_finite_numbers_survives_a_round_trip() -> None:
    written = Sample(name="a", reward=float("nan"), metrics={"kl": float("inf")}).encode()
    assert Sample.from_plain(json.loads(written)).encode() == written


def test_a_value_of_the_wrong_type_names_the_key() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"`str`.*\$\.step"):
        Sample.from_plain({"name": "a", "step": "three"})
    with pytest.raises(BadLineError, match=r"^log\.jsonl:7: not a Sample: .*\$\.step"):
        decode_record(PATH, line(b'{"name":"a","step":"three"}'), Sample)
    with pytest.raises(BadLineError, match=r"^log\.jsonl:7: not a Sample: .*missing required field `name`"):
        decode_record(PATH, line(b"{}"), Sample)


@pytest.mark.parametrize(
    "data", [b"", b"garbage", b'{"a":1', b'{"a":1}{"b":2}', b'{"a":"\xff"}', b'{"a":Nan}']
)
def test_a_line_that_is_not_json_names_file_and_line(data: bytes) -> None:
    with pytest.raises(BadLineError, match=r"^log\.jsonl:7: not valid JSON"):
        decode_line(PATH, line(data))


@pytest.mark.parametrize("data", [b"[1]", b"3", b'"text"', b"null", b"[NaN]"])
def test_a_line_that_is_not_an_object_names_file_and_line(data: bytes) -> None:
    with pytest.raises(BadLineError, match=r"^log\.jsonl:7: not a JSON object"):
        decode_line(PATH, line(data))


def test_bare_nan_of_other_writers_reads_as_ours_does() -> None:
    data = b'{"loss":NaN,"kl":{"v1":-Infinity},"list":[Infinity,1],"text":"NaN","ok":1.5}'
    assert decode_line(PATH, line(data)) == {
        "loss": None,
        "kl": {"v1": None},
        "list": [None, 1],
        "text": "NaN",
        "ok": 1.5,
        "nonfinite": ["loss", "kl.v1", "list.0"],
    }


def test_records_stream_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert list(read_records(path, Sample)) == []
    path.write_bytes(b'{"name":"a"}\n{"name":"b","new":1}\n{"half')
    assert list(read_records(path, Sample)) == [Sample(name="a"), Sample(name="b", extra={"new": 1})]
    assert [record.name for record in read_records(path, Sample, start=13)] == ["b"]
    path.write_bytes(b'{"name":"a"}\n{"step":1}\n')
    stream = read_records(path, Sample)
    assert next(stream).name == "a"
    with pytest.raises(BadLineError, match=rf"^{path}:2: "):
        next(stream)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(unknown=st.dictionaries(st.text(), JSON_VALUES, max_size=5), reward=st.none() | st.floats())
def test_any_unknown_keys_survive(unknown: dict[str, Any], reward: float | None) -> None:
    unknown = {key: value for key, value in unknown.items() if key not in Sample.__struct_fields__}
    record = Sample(name="a", reward=reward, extra=unknown)
    again = decode_record(PATH, line(record.encode()), Sample)
    assert {key: value for key, value in again.extra.items() if key != "nonfinite"} == {
        key: value for key, value in unknown.items() if key != "nonfinite"
    }
    assert again.encode() == record.encode()


def test_names_of_numbers_that_were_not_finite_add_up() -> None:
    line = {"name": "x", "old": None, "nonfinite": ["old"]}
    record = CheckpointRecord.from_plain(line)
    record.extra["new"] = math.nan
    assert json.loads(record.encode()) == {"name": "x", "old": None, "nonfinite": ["old", "new"], "new": None}


@pytest.mark.parametrize(
    "value",
    [
        *(1.5, [1, 2.5], [[1], {"a": None}], 2**70, [2**70], [0.5, 2**2000], True, (1, 2), "a\ud800"),
        *(np.float32(0.5), [np.int64(3)], {1: 2}, math.inf, [1.0, -math.inf], {"a": [{"b": math.nan}]}),
    ],
)
def test_a_line_is_the_same_whether_or_not_its_values_are_plain(value: object) -> None:
    record = CheckpointRecord(name="x", extra={"value": value})
    assert json.loads(record.encode()) == json.loads(encode(record.to_plain()))
