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

import pytest
import yaml
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st

from rollbook.errors import UsageError
from rollbook.runs.handoff.emit import Unset
from rollbook.runs.handoff.nodes import SpliceError
from rollbook.runs.handoff.splice import set_paths
from runs.handoff.config_texts import ARTIFACTS, METRICS, ConfigText, ConfigWriter, json_config

OUTPUT = ("runtime_info", "output")
UNKNOWN = Unset.NULL_IF_PRESENT
NASTY = Path(__file__).parent / "nasty_yaml"
REASONS: dict[str, str] = json.loads((NASTY / "refused" / "reasons.json").read_text())

DEMO = {
    (*OUTPUT, "checkpoint_path"): "artifacts/model/demo/checkpoint-24",
    (*OUTPUT, "training_metrics"): {
        "final_loss": 0.342,
        "train_runtime": 6075.1,
        "total_steps": 24,
        "last_loss": 0.2306,
        "mean_loss": UNKNOWN,
    },
    (*OUTPUT, "artifacts"): {
        "train_results": "artifacts/model/demo/train_results.json",
        "train_loss_plot": UNKNOWN,
        "training_log": "artifacts/logs/demo_1.log",
    },
    (*OUTPUT, "training_curves"): "12e4567",
}

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


def outputs() -> st.SearchStrategy[dict[tuple[str, ...], Any]]:
    return st.fixed_dictionaries(
        {
            (*OUTPUT, "checkpoint_path"): texts | st.just(UNKNOWN),
            (*OUTPUT, "training_metrics"): st.fixed_dictionaries(dict.fromkeys(METRICS, scalars)),
            (*OUTPUT, "artifacts"): st.fixed_dictionaries(
                {name: texts | st.just(UNKNOWN) for name in ARTIFACTS}
            ),
            (*OUTPUT, "training_curves"): texts | st.none(),
        }
    )


# -- what is meant, said a second time on plain data ---------------------------------------------------


def meant(data: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    data = copy.deepcopy(data)
    for path, value in values.items():
        holder: Any = {"": data}
        data = _set(holder, ["", *path], value)[""]
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


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(configs(), outputs())
def test_only_the_leaves_change(config: ConfigText, values: dict[tuple[str, ...], Any]) -> None:
    result = set_paths(config.text, values)
    check_bytes(config, result)
    before, after = yaml.safe_load(config.text), yaml.safe_load(result)
    assert same(after, meant(before, values))
    assert set_paths(result, values) == result


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(configs(), outputs(), outputs())
def test_a_second_run_leaves_nothing_of_the_first(config: ConfigText, first: Any, second: Any) -> None:
    both = set_paths(set_paths(config.text, first), second)
    again = set_paths(set_paths(both, first), second)
    assert same(yaml.safe_load(again), yaml.safe_load(both))
    assert len(set_paths(again, first).splitlines()) <= len(set_paths(both, first).splitlines())


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML without libyaml")
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(configs(), outputs())
def test_another_parser_reads_the_same(config: ConfigText, values: dict[tuple[str, ...], Any]) -> None:
    try:
        yaml.load(config.text, yaml.CSafeLoader)
    except yaml.YAMLError:
        reject()  # the other parser does not read `{key:, ...}`
    result = set_paths(config.text, values)
    assert same(yaml.load(result, yaml.CSafeLoader), yaml.safe_load(result))


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), outputs())
def test_json_stays_json(rng: random.Random, values: dict[tuple[str, ...], Any]) -> None:
    text = json_config(rng)
    result = set_paths(text, values)
    assert same(json.loads(result), meant(json.loads(text), values))


@settings(max_examples=150, deadline=None)
@given(texts)
@example("\ufeff\u2028\x85\x00\x7f\U0001f642\ufffe")
@example("")
def test_any_string_comes_back(text: str) -> None:
    for before in ("", "a: 1", "{}", "b: ''", 'b: "x"', "b: [1]"):
        result = set_paths(before, {("b",): text})
        assert yaml.safe_load(result)["b"] == text
        assert len(result.splitlines()) <= len(before.splitlines()) + 1


# -- shapes --------------------------------------------------------------------------------------------


def test_a_described_output_has_its_value_set() -> None:
    text = "c: {description: d, value: old, path: p}\nm:\n  description: d\n"
    result = set_paths(text, {("c",): "new", ("m",): {"loss": 1}})
    assert result == "c: {description: d, value: new, path: p}\nm:\n  description: d\n  value:\n    loss: 1\n"


def test_leaves_beside_a_description_stay_where_they_are() -> None:
    text = "m:\n  description: d\n  loss: 1\n"
    assert (
        set_paths(text, {("m",): {"loss": 2, "steps": 3}}) == "m:\n  description: d\n  loss: 2\n  steps: 3\n"
    )


def test_an_unknown_value_clears_what_is_there_and_adds_nothing() -> None:
    text = "m: {loss: 1, other: 2}\nc: {description: d}\n"
    values = {
        ("m",): {"loss": UNKNOWN, "steps": UNKNOWN},
        ("c",): UNKNOWN,
        ("d",): UNKNOWN,
        ("e",): {"f": UNKNOWN},
    }
    assert set_paths(text, values) == "m: {loss: null, other: 2}\nc: {description: d}\n"


def test_a_key_is_never_glued_to_a_comma() -> None:
    assert set_paths("{a: , b: }", {("c",): 1}) == "{a: , b: , c: 1 }"


def test_comments_around_a_replaced_list_keep_their_lines() -> None:
    text = "o:\n  c: # one\n    - a\n    - b # two\n  d: 1\n"
    assert set_paths(text, {("o", "c"): "x"}) == "o:\n  c: x # one\n     # two\n  d: 1\n"


def test_values_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="a is set"):
        set_paths("", {("a",): 1, ("a", "b"): 2})
    with pytest.raises(UsageError, match="a is set twice"):
        set_paths("", {("a", "b"): 2, ("a",): 1})
    with pytest.raises(UsageError, match="at least one key"):
        set_paths("", {(): 2})
    with pytest.raises(TypeError, match="list"):
        set_paths("", {("a",): [1]})  # type: ignore[dict-item]


def test_a_name_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(SpliceError, match=r"a\.b: .*UTF-8"):
        set_paths("a: {}\n", {("a", "b"): "x\udcff"})


# -- hand-written files --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(NASTY.glob("*.yaml")), ids=lambda path: path.stem)
def test_nasty_file(path: Path) -> None:
    before = path.read_bytes().decode()
    result = set_paths(before, DEMO)
    assert result == path.with_suffix(".after").read_bytes().decode()
    assert set_paths(result, DEMO) == result
    old, new = lenient_load(before), lenient_load(result)
    assert same(new, meant(old or {}, DEMO))
    assert sorted(re.findall(r"#.*", before)) == sorted(re.findall(r"#.*", result))


@pytest.mark.parametrize(("name", "reason"), REASONS.items())
def test_refused_file(name: str, reason: str) -> None:
    text = (NASTY / "refused" / f"{name}.yaml").read_bytes().decode()
    with pytest.raises(SpliceError) as refused:
        set_paths(text, DEMO)
    assert str(refused.value) == reason


def test_there_are_enough_nasty_files() -> None:
    assert len(list(NASTY.glob("*.yaml"))) >= 20
    not_text = {"latin1", "utf16"}
    assert set(REASONS) | not_text == {path.stem for path in (NASTY / "refused").glob("*.yaml")}


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(SpliceError, match="nested too deeply"):
        set_paths("a: " + "[" * 1200 + "]" * 1200, DEMO)


class _Lenient(yaml.SafeLoader):
    """Reads files with tags and dates that `safe_load` refuses, and cycles as text."""


def _any_node(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    return f"{node.tag} {yaml.serialize(node)}"


_Lenient.add_multi_constructor("", _any_node)
_Lenient.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: node.value)
_Lenient.add_constructor("tag:yaml.org,2002:seq", lambda loader, node: yaml.serialize(node))


def lenient_load(text: str) -> Any:
    return yaml.load(text, _Lenient)
