"""Conditions over rows: what they mean, what they refuse, and that no text can hang or escape them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.data.expression import Expression, field_path, value_at
from rollbook.errors import UsageError

ROW: dict[str, Any] = {
    "reward": 0.9,
    "category": "Math",
    "correct": True,
    "nothing": None,
    "key with space": 3,
    "tags": ["a", "b"],
    "scores": [1, 5, 2.5],
    "response": {
        "usage": {"output_tokens": 1500},
        "output": [{"type": "message", "text": "The answer is 42."}, {"type": "function_call", "name": "f"}],
    },
}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("reward >= 0.8 and response.usage.output_tokens < 2000", True),
        ("0.5 < reward < 0.95 <= 1", True),
        ("0.5 < reward < 0.7", False),
        ("not correct", False),
        ("correct and not (reward < 0.5)", True),
        ("correct == true and correct == 1 and correct > 0.5 and correct + 1 == 2", True),
        ("category == 'Math' or missing > 3", True),
        ("category == 'Physics' and missing > 3", False),
        ("lower(category) in ['math', 'physics']", True),
        ("category not in ['Math']", False),
        ("'at' in category", True),
        ("'b' in tags and tags[0] == \"a\" and tags[-1] == 'b'", True),
        ('row["key with space"] == 3', True),
        ('response["usage"].output_tokens == 1500', True),
        ("reward * 2 + 1 - 0.8 / 2 > 2.39 and response.usage.output_tokens % 7 == 2", True),
        ("-reward < -0.5 and +reward > 0", True),
        ("len(tags) == 2 and len(category) == 4 and len(response) == 2", True),
        ("max(scores) == 5 and min(scores) == 1 and max(1, reward) == 1 and abs(-3) == 3", True),
        ("contains(response.output[0].text, '42') and startswith(category, 'Ma')", True),
        (r"matches(response.output[0].text, '\\b[0-9]+\\.$')", True),
        ("has(reward) and not has(nothing) and not has(no.such[3].field)", True),
        ("nothing == null and reward != null and missing == null", True),
        ("any(item.type == 'function_call' for item in response.output)", True),
        ("all(item.type == 'message' for item in response.output)", False),
        ("all(tag in ['a', 'b'] and reward > 0 for tag in tags)", True),
        # What a row does not say has no answer, and `not` does not make one of it.
        ("missing > 3", None),
        ("not (missing > 3)", None),
        ("missing != 3", None),
        ("correct and missing", None),
        ("missing.deeper + 1 > 0", None),
        ("category > 3", None),
        ("reward + category > 1", None),
        ("reward / 0 > 1", None),
        ("reward", None),
        ("len(reward) > 1", None),
        ("max([]) > 1", None),
        ("any(item.type == 'x' for item in category)", None),
        ("any(item.name == 'x' for item in response.output)", None),
        ("any(item.name == 'f' for item in response.output)", True),
        ("category == 3", False),
    ],
)
def test_answers(text: str, answer: bool | None) -> None:
    assert Expression(text).answer(ROW) is answer


def test_the_reason_is_that_of_the_present_row() -> None:
    condition = Expression("reward >= 0.8")
    assert condition.answer({}) is None
    assert condition.why == "reward is missing"
    assert condition.answer({"reward": "high"}) is None
    assert "text against a number" in condition.why
    assert condition.answer({"reward": 1}) is True


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("reward >= 0.8 and lenght(x) > 1", "no function lenght", 18),
        ("reward ** 2 > 1", "has no place", 0),
        ("reward > 9 ** 9 ** 9", "has no place", 9),
        ("reward = 1", "not understood", None),
        ("reward > ", "not understood", None),
        ("reward >= 0.8 and (lambda: 1)()", "has no place", 18),
        ("__import__('os').system('true')", "has no place", 0),
        ("reward.__class__() == 1", "has no place", 0),
        ("[x for x in tags] == 1", "has no place", 0),
        ("f'{reward}' == 'a'", "has no place", 0),
        ("(reward := 3) > 1", "has no place", None),
        ("reward if correct else 1", "has no place", 0),
        ("reward is null", "compare with", 0),
        ("tags[0:2] == 1", "field is written", 0),
        ("tags[category] == 1", "field is written", 0),
        ("reward // 2 == 1", "has no place", 0),
        ("reward >", "not understood", 8),
        ("1 + 1", "not a condition", 0),
        ("'text'", "not a condition", 0),
        ("correct and 5", "not a condition", 12),
        ("has(1)", "takes one field", 0),
        ("abs(1, 2) == 1", "is written abs", 0),
        ("matches(category, '(')", "not a regular expression", 18),
        ("matches(category, tags)", "as text", 0),
        ("any(tags)", "is written any", 0),
        ("b'x' == category", "has no place", 0),
        ("ä == 1 and foo(1) == 2", "no function foo", 11),
    ],
)
def test_refusals_point_at_the_place(text: str, message: str, column: int | None) -> None:
    with pytest.raises(UsageError, match=message) as refusal:
        Expression(text)
    lines = str(refusal.value).splitlines()
    assert "functions: abs, all, any, contains, has" in lines[3]
    assert lines[1] == f"  {text.strip()}"
    if column is not None:
        assert lines[2] == "  " + " " * column + "^"


@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000 + "1" + ")" * 5000,
        "not " * 2000 + "correct",
        "1+" * 4000 + "1 > 0",
        "a" + ".b" * 3000 + " > 1",
        "x" * 20_000,
        "9" * 9000 + " > 1",
    ],
)
def test_no_text_is_too_much(text: str) -> None:
    with pytest.raises(UsageError):
        Expression(text)


def test_nothing_grows_or_hangs() -> None:
    assert Expression("'a' * 1000000000 == 'b'").answer({}) is None
    assert Expression("matches(text, '(a+)+$')").answer({"text": "a" * 50_000 + "b"}) is False
    huge = " * ".join(["n"] * 60)
    assert Expression(f"{huge} > 1.5").answer({"n": 2**63}) is True
    assert Expression(f"({huge}) / 2.5 > 1.5").answer({"n": 2**63}) is None


def test_fields() -> None:
    assert field_path("response.usage.output_tokens") == ["response", "usage", "output_tokens"]
    assert field_path('row["a b"].c[0][-1]') == ["a b", "c", 0, -1]
    assert value_at({"a b": {"c": [[1, 2]]}}, ["a b", "c", 0, -1]) == 2
    assert value_at({"a": "text"}, ["a", 0]) is None
    for text in ("a + b", "1", "row", "null", "f(a)"):
        with pytest.raises(UsageError, match="not a field"):
            field_path(text)


# A second evaluator, of trees instead of text, with the answers of SQL: None is unknown.
NUMBERS = st.none() | st.integers(-3, 3) | st.floats(-3, 3)
LEAF = st.tuples(
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), st.sampled_from("abc"), st.integers(-3, 3)
)
TREE: st.SearchStrategy[Any] = st.recursive(
    LEAF,
    lambda inner: st.tuples(st.sampled_from(["and", "or"]), inner, inner) | st.tuples(st.just("not"), inner),
    max_leaves=8,
)


def written(tree: Any) -> str:
    if tree[0] == "not":
        return f"not ({written(tree[1])})"
    if tree[0] in ("and", "or"):
        return f"({written(tree[1])}) {tree[0]} ({written(tree[2])})"
    return f"{tree[1]} {tree[0]} {tree[2]}"


def reference(tree: Any, row: dict[str, Any]) -> bool | None:
    if tree[0] == "not":
        inner = reference(tree[1], row)
        return None if inner is None else not inner
    if tree[0] in ("and", "or"):
        sides = {reference(tree[1], row), reference(tree[2], row)}
        decisive = tree[0] == "or"
        return decisive if decisive in sides else None if None in sides else not decisive
    value, bound = row.get(tree[1]), tree[2]
    if value is None:
        return None
    return {
        "<": value < bound,
        "<=": value <= bound,
        ">": value > bound,
        ">=": value >= bound,
        "==": value == bound,
        "!=": value != bound,
    }[tree[0]]


@settings(max_examples=300, deadline=None)
@given(tree=TREE, row=st.dictionaries(st.sampled_from("abc"), NUMBERS))
def test_logic_matches_a_reference(tree: Any, row: dict[str, Any]) -> None:
    assert Expression(written(tree)).answer(row) is reference(tree, row)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40) | st.text(alphabet="ab.[]()\"'<>=+-*/% 01notandr", max_size=30))
def test_any_text_is_an_expression_or_a_usage_error(text: str) -> None:
    try:
        condition = Expression(text)
    except UsageError:
        return
    assert condition.answer(ROW) in (True, False, None)
