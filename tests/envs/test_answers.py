"""The last number of a text, and whether two numbers are the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.envs.answers import as_number, last_number, look_up, same_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", "42"),
        ("x = -5", "-5"),
        ("\N{MINUS SIGN}8", "-8"),
        ("10-5", "5"),
        ("(3)-4", "4"),
        ("\\boxed{-7}", "-7"),
        ("$1,234,567.50", "1234567.50"),
        ("1,2,3", "3"),
        ("1.5e-3 metres", "1.5e-3"),
        ("50%", "50"),
        ("first 1, then 2", "2"),
        ("about .5", ".5"),
        ("see No.5", "5"),
        ("a loss of -$5", "-5"),
        ("it is 3/4.", "3/4"),
        ("x=-1,000/3 then", "-1000/3"),
        ("_3/4_", "3/4"),
        ("1/2 and 3 / 4", "4"),
        ("on 3/14/2024", "2024"),
        ("a/3/4", "4"),
        ("version 1.2/3", "3"),
        ("2 3/4", "4"),
        ("3/-4", "-4"),
        ("1/0", "0"),
        ("1/2.5", "2.5"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@settings(deadline=None)
@given(st.integers(-(10**30), 10**30), st.text(alphabet="abc xyz.\n", max_size=30), st.integers(0, 3000))
def test_a_number_said_last_is_found_wherever_it_stands(number: int, words: str, padding: int) -> None:
    text = f"{words} 17 and {number}" + " so" * padding
    found = last_number(text)
    assert found is not None
    assert same_number(found, str(number))


def test_a_number_at_the_edge_of_the_tail_is_read_whole() -> None:
    for padding in range(2040, 2056):
        assert last_number("123456789" + "." + " " * padding) == "123456789"


def test_same_number_is_exact_unless_told() -> None:
    assert same_number("0.10", "0.1")
    assert same_number("1e3", "1000")
    assert same_number("007", "7")
    assert same_number("0", "000")
    assert not same_number("70", "7")
    assert same_number("7", "8", tolerance=1.0)
    assert not same_number("0.30000000000000004", "0.3")
    assert same_number("0.30000000000000004", "0.3", tolerance=1e-9)
    assert not same_number("3.2", "3.14", tolerance=0.01)
    assert not same_number("1e999999", "5", tolerance=1.0)
    assert not same_number("x", "5")


def test_fractions_are_compared_by_their_value() -> None:
    assert same_number("1/2", "0.5")
    assert same_number("2/6", "1/3")
    assert same_number("-1/3", "-3/9")
    assert not same_number("1/3", "0.3333333333333333333333333333")
    assert not same_number("1/3", "0.3334", tolerance=1e-5)
    assert same_number("1/3", "0.3333", tolerance=1e-3)
    long = "7" * 10_000
    assert same_number(f"{long}/{long}", "1")
    assert not same_number(f"{long}/{long[1:]}", "1", tolerance=0.1)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (42, "42"),
        (-2.5, "-2.5"),
        (1e-07, "1e-07"),
        (" -1,234.50 ", "-1234.50"),
        ("\N{MINUS SIGN}8", "-8"),
        (".5", ".5"),
        ("42.", "42."),
        ("1.5E3", "1.5E3"),
        ("$1,000", "1000"),
        ("-$5", "-5"),
        ("\N{EURO SIGN}-5", "-5"),
        ("5 \N{EURO SIGN}", "5"),
        ("50%", "50"),
        ("10\\%", "10"),
        ("1/2", "1/2"),
        ("-3/4", "-3/4"),
        ("#### 1,000", "1000"),
        ("He has 3 * 4 = 12 left.\n#### 12", "12"),
    ],
)
def test_an_expected_answer_is_one_number(value: object, number: str) -> None:
    assert as_number(value, "k") == number


@pytest.mark.parametrize(
    "value",
    [
        *("none", None, True, [], "", "about 7 of 1000", "1 2", "5 km", "1,23", "1.234,5", "- 5", "-$-5"),
        *("1/0", "1/2/3", "2 3/4", "1/2.5", "10-5", "nan", "1e9999999", "12 ####", "#### 12\nor 13"),
    ],
)
def test_expected_answers_that_are_not_one_number_are_errors(value: object) -> None:
    with pytest.raises(ValueError, match=r"k is .* not one number"):
        as_number(value, "k")


def test_dots_descend_and_a_key_with_dots_wins() -> None:
    row = {"a": {"b": 1}, "a.c": 2}
    assert look_up(row, "a.b") == 1
    assert look_up(row, "a.c") == 2
    with pytest.raises(KeyError, match="it has: a, "):
        look_up(row, "a.d")
