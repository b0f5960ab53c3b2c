"""Right answers in every usual notation are right, and no wrong answer that is found cheaply is."""

from __future__ import annotations

import pytest

from agentrl_rewards.equivalence import MathGrader
from agentrl_rewards.workers import GraderLimits
from tests.reward.cheap_answers import cheap_answers

pytestmark = pytest.mark.starts

pytest.importorskip("math_verify", reason="the extra agentrl[math]")

ROOTS = r"\frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}"
UNION = r"(-\infty,-5)\cup(5,\infty)"
EQUAL = [
    (r"\log_2 3", r"\ln 3/\ln 2"), (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"), (r"\log_2 3", r"\log_2(3)"),
    ("12", r"\mathbf{12}"), ("12", r"\text{12}"), ("12", r"\textbf{12}"), ("12", "**12**"), ("12", r"\mathrm{12}"),
    ("12", r"\bm{12}"), ("12", r"{\bf 12}"), ("12", r"\underline{12}"), ("12", r"\textcolor{red}{12}"), ("12", r"\large 12"),
    ("x+1", r"\mathbf{x+1}"), ("1/2", r"\mathbf{\frac{1}{2}}"), ("12", r"\text{12 cm}"), ("x^2", r"x^\mathbf{2}"),
    ("12", "12."), ("12", "12,"), ("5", "x=5."), (r"\frac12", r"\frac12."), ("7", "**7**."), ("7", r"7\,."), ("5", "5。"),
    (r"\pi/2", "pi/2"), (r"2\pi", "2pi"), (r"\frac{\pi}{4}", "Pi/4"), (r"2\alpha", "2*alpha"), (r"\theta/2", "theta/2"),
    (r"\infty", "infinity"), (r"\sqrt{2}", "sqrt2"), (r"\sqrt{2+\sqrt{3}}", "sqrt(2+sqrt(3))"),
    ("42", r"\textbf{(C)}\ 42"), (r"\textbf{(C)}\ 42", "42"), ("C", r"\textbf{(C)}\ 42"), (r"\textbf{(C)}\ 42", "C"),
    ("42", "(C) 42"), ("42", "C. 42"), (r"\text{(C) }42", "42"), (r"\mathbf{(C)}", "C"), (r"(\text{C})", "C"),
    (r"\textbf{(C)}\ 42", r"\textbf{(C)}\ 42"), (r"\text{(B) Paris}", "Paris"),
    (UNION, r"x<-5 \text{ or } x>5"), (r"x<-5 \text{ or } x>5", UNION), (UNION, "x<-5 or x>5"), (UNION, "x > 5 ∨ x < −5"),
    (rf"x \in {UNION}", "x<-5 or x>5"), (r"(1,2)\cup(3,4)", r"1<x<2 \text{ or } 3<x<4"), ("[-2,2]", r"-2 \le x \le 2"),
    ("[-2,2]", r"x \ge -2 \text{ and } x \le 2"),
    (ROOTS, r"x = \frac{-1\pm\sqrt5}{2}"), (r"x = \frac{-1\pm\sqrt5}{2}", ROOTS), ("3,-3", r"x=\pm3"), (r"\pm 3", "3, -3"),
    (r"\{1+\sqrt2, 1-\sqrt2\}", "1±√2"),
    ("6", "2×3"), ("6", "2·3"), ("-5", "−5"), ("-5", "–5"), (r"\sqrt{5}", "√5"), (r"2\sqrt{3}", "2√3"),
    (r"\sqrt{12}", "√12"), (r"2\pi", "2π"), ("x^{10}", "x¹⁰"), ("x^{-2}", "x⁻²"), ("x_1", "x₁"),
    ("1/2", "½"), ("3/2", "1½"), ("1/2", "1⁄2"),
    ("42", "４２"), ("-1", "－1"), ("3.5", "３．５"), ("(1,2)", "（1，2）"), ("2", "4÷2"), ("42", "٤٢"),
    (r"\alpha+1", "α+1"), (r"x\in\mathbb{R}", "x∈ℝ"), ("90", "90°"), (r"\sqrt[3]{2}", "∛2"), ("5", "＝5"),
    (r"x\le 5", "x≤5"),
    ("5 cm", "5"), ("5", "5 cm"), (r"5\text{ cm}", "5cm"), ("12", "12 apples"), ("5 m", "5 meters"), ("5", r"\$5"),
    ("5", "€5"), (r"\frac{1}{2}\text{ m}", "0.5 m"), ("15 cm^2", r"15\text{ square centimeters}"),
]  # fmt: skip
STATED = [
    ("5", r"Hence $\boxed 5$"), ("5", r"Hence \boxed5."), ("-5", r"So \boxed -5 metres."), ("1/2", r"$\boxed \frac{1}{2}$"),
    ("42", "答案是42"), ("42", "это42"), ("42", "답은42입니다"), ("6", r"$\boxed{5}$, no: $\boxed 6$"),
]  # fmt: skip
DIFFERENT = [
    ("5 - 5c", "0"), ("5 - 5c", "5-5"), ("x+3m", "x+3"), ("5+4g", "9"), ("4t", "4h"), ("3c", "3d"), ("x+3", "x+3m"),
    ("3m", "3"), (r"5\text{ cm}", "5 m"), ("5 cm", "5 m"), ("5 cm", "5 kg"), (r"5\text{xy}", "5"),
    (r"\textbf{(C)}\ 42", r"\textbf{(B)}\ 42"), (r"\textbf{(C)}\ 42", r"\textbf{(C)}\ 43"), ("C", "A, B, C, D"),
    ("C", "ABCD"), ("C", "(A)(B)(C)(D)"), ("C", "A or C"), ("(A)x", "A"),
    (UNION, "x<-5"), (UNION, "-5<x<5"), (UNION, r"x<-5 \text{ or } y>5"), (r"-5<x<5", r"x>-5 \text{ or } x<5"),
    (ROOTS, r"\frac{-1+\sqrt5}{2}"), (r"\frac{-1+\sqrt5}{2}", r"\frac{-1\pm\sqrt5}{2}"), ("1", r"\pm 1"), ("12", r"12\pm1"),
    (r"\log_2 3", "2 3"), ("23", r"\log_2 3"), ("5", r"\log_2 3"), ("85", "42 43"), ("42", r"\text{42 or 43}"),
    ("42", "42 or 43"), ("42", r"\{42, 43\}"), ("42", r"42 \quad 43"), ("42", "42; 43"), (r"\{1,2\}", r"\{1,2,3\}"),
    ("1,2", "1,2,3"), ("42", r"\boxed{42} \boxed{43}"), ("12", "12.5"), ("1/2", "1½"), ("25", "2⁵"), ("2^3", "23"),
]  # fmt: skip
EVERY = 6
"""The default run takes each sixth of the cheap answers; the one with external tests takes all."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def verdicts(pairs: list[tuple[str, str]], answer: str = r"\boxed{%s}") -> list[tuple[str, str]]:
    """Return the pairs of a reference and an answer that the grader takes as equal."""
    async with MathGrader(limits=GraderLimits(cpu_s=20)) as grader:
        return [pair for pair in pairs if await grader(answer % pair[1], pair[0]) == 1.0]


async def test_right_answers_in_other_notations_are_right() -> None:
    taken = await verdicts(EQUAL)
    assert [pair for pair in EQUAL if pair not in taken] == []


async def test_an_answer_is_found_without_braces_and_behind_letters_of_other_scripts() -> None:
    assert await verdicts(STATED, "%s") == STATED


async def test_wrong_answers_near_right_ones_are_wrong() -> None:
    assert await verdicts(DIFFERENT) == []


async def test_a_sample_of_the_cheap_answers_is_wrong() -> None:
    assert await verdicts(cheap_answers()[::EVERY]) == []


@pytest.mark.long
async def test_all_cheap_answers_are_wrong() -> None:
    pairs = cheap_answers()
    assert len(pairs) > 500
    assert await verdicts(pairs) == []
