"""Outputs that somebody had a hand in: what is bad is named with the way out, what is blank is nothing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import orjson
import pytest

from collecting import assert_exactly_once, config, expected_keys, run, small_input
from rollbook.errors import BadLineError


@pytest.mark.parametrize(
    "bad", [b"no JSON", b'{"id":"foreign"}', b'{"_rb_key":"t0#0"}', b"[]", b'{"_rb_key":7}']
)
def test_a_bad_line_is_put_aside_by_the_command_that_is_named(bad: bytes, tmp_path: Path) -> None:
    directory = tmp_path / "it's here"
    directory.mkdir()
    small_input(directory, 6)
    config(directory)
    run(directory, "limit=4")
    lines = sorted((directory / "out.jsonl").read_bytes().splitlines(keepends=True))  # that of t0 first
    lines[2] = bad + b"\n"
    (directory / "kept.jsonl").write_bytes(b"".join(lines))
    (directory / "out.jsonl").unlink()
    (directory / "out.jsonl").symlink_to("kept.jsonl")
    with pytest.raises(BadLineError, match=r"out\.jsonl:3: ") as refused:
        run(directory)
    (named,) = re.findall(r"type (sed .*) and then", str(refused.value))
    subprocess.run(named, shell=True, check=True)
    assert (directory / "kept.jsonl.aside").read_bytes() == bad + b"\n"
    assert run(directory).done_before == 3
    assert_exactly_once(directory / "out.jsonl", expected_keys(6))
    assert (directory / "out.jsonl").is_symlink()


def test_an_output_with_blank_lines_is_put_in_order_whole(tmp_path: Path) -> None:
    small_input(tmp_path, 4)
    config(tmp_path)
    run(tmp_path, "limit=3")
    output = tmp_path / "out.jsonl"
    first, *rest = sorted(output.read_bytes().splitlines(keepends=True), reverse=True)
    output.write_bytes(b"\n" + first + b"  \n\n" + b"".join(rest) + b"\n")
    assert run(tmp_path, "ordered=true").done == 4
    found = [orjson.loads(line)["_rb_key"] for line in output.read_bytes().splitlines() if line.strip()]
    assert found == ["t0#0", "t1#0", "t2#0", "t3#0"]


def test_bad_failures_are_put_aside_by_the_command_that_is_named(tmp_path: Path) -> None:
    small_input(tmp_path, 2)
    config(tmp_path)
    failures = tmp_path / "out_failures.ndjson"
    failures.write_text("no JSON\n")
    with pytest.raises(BadLineError, match=r"out_failures\.ndjson:1: ") as refused:
        run(tmp_path)
    (named,) = re.findall(r"type (mv .*), then", str(refused.value))
    subprocess.run(named, shell=True, check=True)
    assert run(tmp_path).done == 2
    assert failures.with_name("out_failures.ndjson.bad").read_text() == "no JSON\n"
