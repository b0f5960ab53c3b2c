"""The final answer is found wherever a model usually writes it, in time linear in the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_rewards.extract import MAX_SEARCHED_CHARS, after, boxed, boxes, final_answer, first_of, last_number


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


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$", "(2, 2), (6, 2)"),
        (r"\boxed{(3, 3)} \text{ for part (a) and } \boxed{(1, 1)}", "(3, 3), (1, 1)"),
        (r"\boxed{1} papers and \boxed{2} bins", "1, 2"),
        (r"x = \boxed{1}, y = \boxed{2}", "1, 2"),
        (r"\boxed{42}. Then again \boxed{42}", "42"),
        (r"\boxed{42}, \boxed{42}", "42"),
        (r"\boxed{41}, no: \boxed{42}", "42"),
        (r"\boxed{1} no no no no no \boxed{2}", "2"),
        (r"\boxed{42} or \boxed{43}", "42, 43"),
        (r"\boxed{\boxed{3}}", "3"),
        ("none", None),
    ],
)
def test_the_boxes_of_the_last_answer_are_one_list(text: str, answer: str | None) -> None:
    assert boxes(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"The answer is $x \ge 5$.", r"x \ge 5"),
        (r"The answer is x \ge 5.", r"x \ge 5"),
        ("The answer is\n\\[ x = 5 \\]", "x = 5"),
        (r"**Answer:** $\sqrt{2}$", r"\sqrt{2}"),
        ("The final answer is 3/4. I hope it is correct.", "3/4"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        ("The answer is 2x+3, where x is the price.", "2x+3"),
        ("The answer is 42 or 43.", "42 or 43"),
        ("The answer is $42$ or 43.", "$42$ or 43"),
        ("The answer is not 42.", "not 42"),
        (r"The sum is $\begin{pmatrix}1\\2\end{pmatrix}$.", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"Hence \(x \ge 5\) holds.", r"x \ge 5"),
        ("He pays $5 and $3, $8 in total.", "8"),
        (r"Thus $x = 5$ after 3 steps", "3"),
        (r"The answer is 41. So \boxed{42}", "42"),
        ("I do not know.", None),
    ],
)
def test_an_answer_without_a_box_is_what_the_sentence_states(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "part", ["\\(", "$", "$$", "$5 ", "\\boxed{", "\\boxed{1}", "answer is ", "answer: $", "1,", "answer a b c d e f "]
)
def test_a_response_of_repeated_marks_is_searched_soon(part: str) -> None:
    answer = final_answer(part * (10 * MAX_SEARCHED_CHARS // len(part)))
    assert answer is None or answer.strip()


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
    for extract in (boxed, last_number, after("####"), final_answer):
        answer = extract(text)
        assert answer is None or answer.strip()
