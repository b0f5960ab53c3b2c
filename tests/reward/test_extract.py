"""The final answer is found wherever a model usually writes it, in time linear in the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.reward.extract import MAX_SEARCHED_CHARS, after, boxed, first_of, last_number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed {5} and \fbox{6}", "6"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"first \boxed{4}, then cut: \boxed{5", "4"),
        (r"\boxed{}", None),
        (r"boxed{5}", None),
        ("} \\boxed{5} {", "5"),
    ],
)
def test_the_last_complete_box_is_the_answer(text: str, answer: str | None) -> None:
    assert boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("5 apples, then 7.", "7"),
        ("It is -3.5", "-3.5"),
        ("−3", "-3"),
        ("$1,234.50 in total", "1234.50"),
        ("x = 3/4", "3/4"),
        ("50% of it", "50%"),
        ("1e-7", "1e-7"),
        ("1.5e3 units", "1.5e3"),
        (".5", ".5"),
        ("version v2", None),
        ("none", None),
        ("1,2", "1,2"),
    ],
)
def test_the_last_number_is_the_answer(text: str, answer: str | None) -> None:
    assert last_number(text) == answer


def test_the_text_after_a_marker_and_the_first_extractor_that_finds_something() -> None:
    extract = first_of(after("####"), boxed, last_number)
    assert extract("#### 1\n#### 2 \nthen 3") == "2"
    assert extract(r"\boxed{4} and 5") == "4"
    assert extract("6") == "6"
    assert extract("####") is None


def test_only_the_end_of_a_response_is_searched() -> None:
    assert last_number("7" + " " * MAX_SEARCHED_CHARS) is None


@given(st.text(alphabet="\\boxedfrac{}0123456789.,$%/eE+- \n#"))
def test_any_text_has_an_answer_or_none(text: str) -> None:
    for extract in (boxed, last_number, after("####")):
        answer = extract(text)
        assert answer is None or answer.strip()
