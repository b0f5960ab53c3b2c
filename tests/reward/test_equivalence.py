"""Mathematically equal answers are right, others wrong; a hostile answer is wrong, a broken grader is a fault."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import anyio
import pytest

from agentrl.errors import EnvironmentFault
from agentrl_rewards.equivalence import MathGrader, MathOutcome
from agentrl_rewards.workers import GraderLimits

pytestmark = pytest.mark.starts

pytest.importorskip("math_verify", reason="the extra agentrl[math]")

EQUAL = [
    ("42", "42"),
    ("42", "$42$"),
    ("1/2", r"\dfrac12"),
    (r"\frac{1}{2}", "0.5"),
    (r"$\frac{1}{2}$", r"\boxed{\frac{2}{4}}"),
    (r"\boxed{7}", "7"),
    ("1,000", "1000"),
    ("18", r"\$18.00"),
    ("1e-7", r"10^{-7}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("p-q", "-q+p"),
    (r"\sqrt{8}", r"2\sqrt2"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("x>2", "2<x"),
    ("y=2x+1", "y = 2x + 1"),
    ("5", "x=5"),
    (r"3\text{ cm}", "3"),
    (r"90^\circ", "90"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("2+3i", "3i+2"),
    (r"\text{Evelyn}", "evelyn"),
    ("even", r"\text{Even}"),
    (r"\text{(C)}", "C"),
    (r"\emptyset", r"\emptyset"),
    (r"\infty", r"\infty"),
    ("-5", "−5"),
    ("1000", r"1\,000"),
    ("1000.99", "1000,99"),
    ("3s^2", "3*s**2"),
    (r"(-\infty,3]", r"x \le 3"),
    ("-1", r"e^{i\pi}"),
    ("1/2", r"\cos 60^\circ"),
    ("1/3", r"0.\overline{3}"),
    (r"10:00 \text{ a.m.}", "10:00 AM"),
    (r"\emptyset", r"\varnothing"),
    ("C", "C. x = 42"),
    (r"5\text{ cm}", r"5\text{ centimeters}"),
    ("1/12", "0.0833333333333333"),
    (r"\frac{\sqrt3}{3}", r"\frac{\sqrt3}{3} \approx 0.577"),
]
DIFFERENT = [
    ("42", "43"),
    ("42", "42, 43"),
    ("42", r"42 \text{ or } 43"),
    ("42", r"\pm 42"),
    ("42", r"\neq 42"),
    ("42", "43 = 42"),
    ("42", "x"),
    ("42", ""),
    ("0", r"\frac{0}{0}"),
    ("0", r"\infty"),
    ("0", "1e-7"),
    ("1/3", "0.3333"),
    ("x>2", "x<2"),
    ("(0,1]", "[0,1)"),
    ("even", "neve"),
    (r"\text{Evelyn}", "Elynve"),
    ("no", "on"),
    ("C", "B"),
    ("x^2", "(x+1)^{2}"),
    ("42", r"42 \approx 43"),
    ("42", r"\neg 42"),
    ("42", r"42 \text{ or 43}"),
    ("85", "42 43"),
    (r"5\text{ cm}", r"5\text{ m}"),
    (r"5\text{ cm}", r"5\text{ cm}^2"),
    (r"\pi", "3.14159265"),
    ("0", "0.0000001"),
    ("33.3", r"\frac{100}{3}"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    ("3", r"x=1\pm 2,y=3"),
    ("204_5", "204_6"),
    ("C", "C. or D. 42"),
]
HOSTILE = [
    "9^{9^{9^{9}}}",
    r"\sum_{i=1}^{1000000000} i^{i}",
    "(" * 450 + "42" + ")" * 450,
]


@pytest.fixture
def anyio_backend() -> str:
    """What depends on the event loop is tested with the workers; these compare formulas."""
    return "asyncio"


@pytest.fixture
async def grader() -> AsyncGenerator[MathGrader]:
    """One that grades formulas, however slow the machine is."""
    async with MathGrader(limits=GraderLimits(cpu_s=20)) as grader:
        yield grader


@pytest.fixture
async def strict_grader() -> AsyncGenerator[MathGrader]:
    """One whose jobs soon spend their CPU time."""
    async with MathGrader(limits=GraderLimits(cpu_s=0.6)) as grader:
        yield grader


async def test_equal_answers_are_right_and_others_wrong(grader: MathGrader) -> None:
    graded = [(pair, await grader(f"So \\boxed{{{pair[1]}}}.", pair[0])) for pair in EQUAL + DIFFERENT]
    assert [pair for pair, reward in graded if reward == 1.0] == EQUAL
    assert [pair for pair, reward in graded if reward == 0.0] == DIFFERENT


async def test_an_answer_that_spends_a_jobs_cpu_time_is_wrong_and_the_next_one_is_graded(strict_grader: MathGrader) -> None:
    for answer in HOSTILE:
        grade = await strict_grader.grade(f"\\boxed{{{answer}}}", "42")
        assert (grade.outcome, grade.reward) == (MathOutcome.TOO_EXPENSIVE, 0.0), answer
    assert await strict_grader("It is 42.", "42") == 1.0


async def test_text_of_ten_megabytes_is_wrong_or_searched_at_its_end(grader: MathGrader) -> None:
    size = 10 * 2**20
    for response, outcome in (
        ("4" * size, MathOutcome.TOO_LONG),
        (f"\\boxed{{{'4' * size}}}", MathOutcome.TOO_LONG),
        ("\\boxed{" * (size // 7), MathOutcome.NO_ANSWER),
        ("{" * size, MathOutcome.NO_ANSWER),
        ("x" * size + r" \boxed{42}", MathOutcome.EQUAL),
    ):
        assert (await grader.grade(response, "42")).outcome is outcome, response[-20:]


async def test_a_response_without_an_answer_is_wrong_and_says_why(grader: MathGrader) -> None:
    for response in (None, "", "I do not know.", r"\boxed{4"):
        grade = await grader.grade(response, "42")
        assert grade.reward == 0.0
        assert grade.outcome in (MathOutcome.NO_ANSWER, MathOutcome.DIFFERENT)
    assert (await grader.grade("no idea", "42")).outcome is MathOutcome.NO_ANSWER


async def test_a_reference_that_is_empty_or_spends_the_limits_is_a_fault_of_the_task(strict_grader: MathGrader) -> None:
    with pytest.raises(EnvironmentFault, match="reference answer of the task is empty"):
        await strict_grader("42", " ")
    with pytest.raises(EnvironmentFault, match="spends the cpu of a job; simplify the reference"):
        await strict_grader("42", "9^{9^{9^{9}}}")


async def test_many_responses_are_graded_at_once(grader: MathGrader) -> None:
    rewards: dict[int, float] = {}

    async def grade(number: int) -> None:
        rewards[number] = await grader(f"\\boxed{{{number}}}", "7")

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(grade, number)
    assert [number for number, reward in rewards.items() if reward] == [7]
