"""Answers match as text, as numbers and as sets; whatever a model writes is a match or not, never an error."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl_rewards.match import exact_match, numeric_match, read_number, set_match


@pytest.mark.parametrize(
    ("answer", "reference", "matches"),
    [
        ("Paris", "paris", True),
        (" The Hague. ", "the hague", True),
        (r"\text{The Hague}", "The Hague", True),
        ("**Paris**", "Paris", True),
        ("Paris or Rome", "Paris", False),
        ("", "Paris", False),
        (None, "Paris", False),
        ("", "?", False),
        ("?", "?", True),
        ("1.5", "15", False),
    ],
)
def test_text_matches_without_case_space_and_markup(answer: str | None, reference: str, matches: bool) -> None:
    assert exact_match(answer, reference) is matches


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", Fraction(5)),
        ("+5.50", Fraction(11, 2)),
        ("−5", Fraction(-5)),
        ("1,234", Fraction(1234)),
        ("1,23", None),
        ("$3", Fraction(3)),
        (r"\$3", Fraction(3)),
        ("1e3", Fraction(1000)),
        ("-.5", Fraction(-1, 2)),
        ("3/4", Fraction(3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        ("3/0", None),
        ("3/4/5", None),
        (r"12\%", Fraction(3, 25)),
        ("nan", None),
        ("inf", None),
        ("1e9999", None),
        ("9" * 5_000, None),
        ("", None),
        ("5 apples", None),
    ],
)
def test_a_number_is_read_exactly(text: str, number: Fraction | None) -> None:
    assert read_number(text) == number


def test_numbers_match_within_a_tolerance() -> None:
    assert numeric_match("3.1416", math.pi, relative_tolerance=1e-4)
    assert not numeric_match("3.14", math.pi, relative_tolerance=1e-4)
    assert numeric_match("0.00000000001", 0)
    assert not numeric_match("0", "1e-7")
    assert not numeric_match(None, 3)


@pytest.mark.parametrize("reference", ["three", "", math.nan, math.inf])
def test_a_reference_that_is_no_number_is_refused(reference: str | float) -> None:
    with pytest.raises(ConfigError, match="the reference must be a"):
        numeric_match("3", reference)


def test_sets_match_item_by_item() -> None:
    assert set_match(r"\{1/2, 3\}", "3; 0.5")
    assert not set_match("1, 1, 2", "1, 2")
    assert not set_match("1, 2", "1, 1, 2")
    assert not set_match("1, 2, 3", "1, 2")
    assert not set_match("", "1")
    assert not set_match(None, "1")
    assert set_match("Red\nblue", ["Blue", "red"])
    assert set_match("1, 2", "1, 2", ordered=True)
    assert not set_match("2, 1", "1, 2", ordered=True)


@given(st.text(), st.text(alphabet="0123456789eE+-./,%$\\frac{} "))
def test_any_answer_matches_or_does_not(text: str, number: str) -> None:
    for answer in (text, number):
        for matches in (exact_match(answer, "x"), numeric_match(answer, 1), set_match(answer, "1, x")):
            assert isinstance(matches, bool)


@given(st.fractions())
def test_a_number_matches_however_it_is_written(value: Fraction) -> None:
    assert numeric_match(f"\\frac{{{value.numerator}}}{{{value.denominator}}}", f"{value}")
