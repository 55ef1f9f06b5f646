"""Leaves of a YAML text are set, and nothing else moves by a byte."""

from __future__ import annotations

import copy
import json
import math
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st
from msgspec import UNSET as UNKNOWN

from rollbook.runs.handoff.yaml_block import BlockError, scalar_text, set_block
from runs.handoff.config_texts import ARTIFACTS, METRICS, ConfigText, ConfigWriter, json_config

OUTPUT = ("runtime_info", "output")
NASTY = Path(__file__).parent / "nasty_yaml"
REASONS: dict[str, str] = json.loads((NASTY / "refused" / "reasons.json").read_text())

DEMO = {
    "checkpoint_path": "artifacts/model/demo/checkpoint-24",
    "training_metrics": {
        "final_loss": 0.342,
        "train_runtime": 6075.1,
        "total_steps": 24,
        "last_loss": 0.2306,
        "mean_loss": UNKNOWN,
    },
    "artifacts": {
        "train_results": "artifacts/model/demo/train_results.json",
        "train_loss_plot": UNKNOWN,
        "training_log": "artifacts/logs/demo_1.log",
    },
    "training_curves": "12e4567",
}


def with_output(text: str, values: Any) -> str:
    return set_block(text, OUTPUT, values)


def with_values(text: str, values: Any) -> str:
    """At the top of the document."""
    return set_block(text, (), values)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "yes",
        "0755",
        "1e-4",
        "12:30",
        "1_000",
        "2024-01-01",
        "~",
        "null",
        "a/b-24",
        "../x",
        "# x",
        "a: b",
        "{",
        "y",
    ]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.just(UNKNOWN)


def outputs() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "checkpoint_path": texts | st.just(UNKNOWN),
            "training_metrics": st.fixed_dictionaries(dict.fromkeys(METRICS, scalars)),
            "artifacts": st.fixed_dictionaries({name: texts | st.just(UNKNOWN) for name in ARTIFACTS}),
            "training_curves": texts | st.none(),
        }
    )


# -- what is meant, said a second time on plain data ---------------------------------------------------


def meant(data: Any, values: Mapping[str, Any]) -> Any:
    data = copy.deepcopy(data)
    for name, value in values.items():
        holder: Any = {"": data}
        data = _set(holder, ["", *OUTPUT, name], value)[""]
    return data


def _set(holder: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    key, *rest = path
    if rest:
        holder = dict(holder)
        inner = _set(holder.get(key) or {}, rest, value)
        if inner:
            holder[key] = inner
        return holder
    old = holder.get(key)
    if isinstance(value, dict):
        if isinstance(old, dict) and (
            "value" in old or ({"description", "path"} & set(old) and not set(value) & set(old))
        ):
            return {**holder, key: _set(old, ["value"], value)}
        inside = dict(old or {})
        for name, leaf in value.items():
            inside = _set(inside, [name], leaf)
        return {**holder, key: inside} if inside else holder
    if value is UNKNOWN and key not in holder:
        return holder
    if isinstance(old, dict) and {"value", "description", "path"} & set(old):
        return {**holder, key: _set(old, ["value"], value)}
    value = None if value is UNKNOWN or (isinstance(value, float) and not math.isfinite(value)) else value
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**64:
        value = str(value)
    return {**holder, key: value}


def same(left: Any, right: Any) -> bool:
    """Equal, with 1, 1.0 and True apart, and in the same order of keys."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) and repr(left) == repr(right)


def check_bytes(config: ConfigText, result: str) -> None:
    """Every character that the author of the text did not mark as a leaf is there, in order."""
    position = 0
    for fragment in config.fragments():
        found = result.find(fragment, position)
        assert found >= 0, f"lost {fragment!r}"
        position = found + len(fragment)
    comment = re.compile(r"# c\d+ [^\r\n]*")
    assert comment.findall(result) == comment.findall(config.text)
    assert result.startswith("\ufeff") == config.text.startswith("\ufeff")
    assert result.endswith("\n") == config.text.endswith("\n") or not config.text.strip("\ufeff")
    if "\r\n" in config.text:
        assert not re.search(r"(?<!\r)\n", result)


@st.composite
def configs(draw: st.DrawFn) -> ConfigText:
    rng = draw(st.randoms(use_true_random=False))
    return ConfigWriter(rng, draw(st.sampled_from(["\n", "\r\n"]))).config()


# -- properties ----------------------------------------------------------------------------------------


def test_only_the_values_change_or_the_text_is_refused() -> None:
    """Of texts with everything that YAML has, most are written and the rest is refused, none is damaged."""
    done = 0
    for seed in range(400):
        config = ConfigWriter(random.Random(seed), "\r\n" if seed % 3 == 0 else "\n").config()
        before = yaml.safe_load(config.text)
        try:
            result = with_output(config.text, DEMO)
        except BlockError:
            continue
        done += 1
        check_bytes(config, result)
        assert same(yaml.safe_load(result), meant(before, DEMO)), seed
        assert with_output(result, DEMO) == result, seed
    assert done > 200


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(configs(), outputs(), outputs())
def test_a_second_run_leaves_nothing_of_the_first(config: ConfigText, first: Any, second: Any) -> None:
    try:
        both = with_output(with_output(config.text, first), second)
    except BlockError:
        reject()
    assert same(yaml.safe_load(both), meant(meant(yaml.safe_load(config.text), first), second))
    again = with_output(with_output(both, first), second)
    assert same(yaml.safe_load(again), yaml.safe_load(both))
    assert len(with_output(again, first).splitlines()) <= len(with_output(both, first).splitlines())


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), outputs())
def test_json_stays_json(rng: random.Random, values: dict[str, Any]) -> None:
    text = json_config(rng)
    result = with_output(text, values)
    assert same(json.loads(result), meant(json.loads(text), values))


@settings(max_examples=150, deadline=None)
@given(texts)
@example("\ufeff\u2028\x85\x00\x7f\U0001f642\ufffe")
@example("")
def test_any_string_comes_back(text: str) -> None:
    for before in ("", "a: 1", "{}", "b: ''", 'b: "x"'):
        result = with_values(before, {"b": text})
        assert yaml.safe_load(result)["b"] == text
        assert len(result.splitlines()) <= len(before.splitlines()) + 1


# -- shapes --------------------------------------------------------------------------------------------


def test_a_described_output_has_its_value_set() -> None:
    text = "c: {description: d, value: old, path: p}\nm:\n  description: d\n"
    result = with_values(text, {"c": "new", "m": {"loss": 1}})
    assert result == "c: {description: d, value: new, path: p}\nm:\n  description: d\n  value:\n    loss: 1\n"


def test_leaves_beside_a_description_stay_where_they_are() -> None:
    text = "m:\n  description: d\n  loss: 1\n"
    assert (
        with_values(text, {"m": {"loss": 2, "steps": 3}}) == "m:\n  description: d\n  loss: 2\n  steps: 3\n"
    )


def test_an_unknown_value_clears_what_is_there_and_adds_nothing() -> None:
    text = "m: {loss: 1, other: 2}\nc: {description: d}\n"
    values = {
        "m": {"loss": UNKNOWN, "steps": UNKNOWN},
        "c": UNKNOWN,
        "d": UNKNOWN,
        "e": {"f": UNKNOWN},
    }
    assert with_values(text, values) == "m: {loss: null, other: 2}\nc: {description: d}\n"


def test_a_name_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(BlockError, match="UTF-8"):
        with_values("a: {}\n", {"a": {"b": "x\udcff"}})


# -- hand-written files --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(NASTY.glob("*.yaml")), ids=lambda path: path.stem)
def test_nasty_file(path: Path) -> None:
    before = path.read_bytes().decode()
    result = with_output(before, DEMO)
    assert result == path.with_suffix(".after").read_bytes().decode()
    assert with_output(result, DEMO) == result
    old, new = lenient_load(before), lenient_load(result)
    assert same(new, meant(old or {}, DEMO))
    assert sorted(re.findall(r"#.*", before)) == sorted(re.findall(r"#.*", result))


@pytest.mark.parametrize(("name", "reason"), REASONS.items())
def test_refused_file(name: str, reason: str) -> None:
    text = (NASTY / "refused" / f"{name}.yaml").read_bytes().decode()
    with pytest.raises(BlockError) as refused:
        with_output(text, DEMO)
    assert str(refused.value) == reason


def test_there_are_enough_nasty_files() -> None:
    assert len(list(NASTY.glob("*.yaml"))) >= 30
    not_text = {"latin1", "utf16"}
    assert set(REASONS) | not_text == {path.stem for path in (NASTY / "refused").glob("*.yaml")}


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(BlockError, match="nested too deeply"):
        with_output("a: " + "[" * 1200 + "]" * 1200, DEMO)


class _Lenient(yaml.SafeLoader):
    """Reads files with tags and dates that `safe_load` refuses, and cycles as text."""


def _any_node(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    return f"{node.tag} {yaml.serialize(node)}"


_Lenient.add_multi_constructor("", _any_node)
_Lenient.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: node.value)
_Lenient.add_constructor("tag:yaml.org,2002:seq", lambda loader, node: yaml.serialize(node))


def lenient_load(text: str) -> Any:
    return yaml.load(text, _Lenient)


# -- scalars -----------------------------------------------------------------------------------------------

# fmt: off
READ_OTHERWISE = [
    "1e-4", "1e5", "12e4567", "yes", "No", "ON", "off", "y", "N", "true", "FALSE", "null", "NULL", "~",
    "0755", "0o17", "0x1F", "0b11", "12:30", "1:02:03", "1_000", "1_23_1", "1", "-1", "+1", ".5", "5.", ".",
    "..", "1.2.3", ".inf", "-.INF", ".nan", "NaN", "inf", "2024-01-01", "2024-01-01T00:00:00Z", "=", "<<",
    "-", "--", "---", "...", "?", ":", "a:", ":a", "#a", "a#", "&a", "*a", "!a", "%a", "@a", "`a", "[a]",
    "{a}", "a,", "'a'", '"a"', "|a", ">a", "🙂", "\xa0", "3f9c8a1b", "", " ", "a b", "a\n", "a\tb",
]
# fmt: on


@pytest.mark.parametrize("text", READ_OTHERWISE)
def test_a_string_that_some_parser_reads_otherwise_is_quoted(text: str) -> None:
    written = scalar_text(text)
    assert written[0] == '"'
    assert yaml.safe_load(written) == text


@pytest.mark.parametrize(
    "text", ["artifacts/model/demo/checkpoint-24", "../a/b.json", "/abs/x", "./x", "abc_1", "a=b", "../../x~"]
)
def test_a_path_needs_no_quotes(text: str) -> None:
    assert scalar_text(text) == text


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "null"),
        (True, "true"),
        (24, "24"),
        (1e-05, "1.0e-05"),
        (1.5e-07, "1.5e-07"),
        (1e16, "1.0e+16"),
        (math.nan, "null"),
        (-math.inf, "null"),
        (np.float32(0.5), "0.5"),
        (np.float64(0.25), "0.25"),
        (np.int64(7), "7"),
        (np.bool_(True), "true"),
        (np.float64("nan"), "null"),
    ],
)
def test_numbers(value: Any, written: str) -> None:
    assert with_values("a: old # c\n", {"a": value}) == f"a: {written} # c\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 0.3420\n", 0.342),
        ("a: 3.420e-1\n", 0.342),
        ("a: 'x'\n", "x"),
        ("a:\n", None),
        ("a: ~\n", None),
        ("a: True\n", True),
        ("a: 3f9c\n", "3f9c"),
        ("{a, b}", None),
    ],
)
def test_a_value_that_is_there_already_is_left_as_it_is_spelled(text: str, value: Any) -> None:
    assert with_values(text, {"a": value}) == text


@pytest.mark.parametrize(
    ("text", "value", "written"),
    [
        ("a: 1\n", 1.0, "a: 1.0\n"),
        ("a: 1\n", True, "a: true\n"),
        ("a: '1'\n", 1, "a: 1\n"),
        ("a: 0.0\n", -0.0, "a: -0.0\n"),
    ],
)
def test_a_value_of_another_type_is_replaced(text: str, value: Any, written: str) -> None:
    assert with_values(text, {"a": value}) == written


@settings(max_examples=150, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
@example(1e-05)
@example(1e22)
@example(-0.0)
@example(5e-324)
def test_any_float_comes_back_as_a_float(value: float) -> None:
    read = yaml.safe_load(scalar_text(value))
    assert type(read) is float
    assert repr(read) == repr(value)
    assert repr(json.loads(scalar_text(value))) == repr(value)
