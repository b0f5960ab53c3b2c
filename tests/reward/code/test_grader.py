"""What a grade says, and whose fault an end is, with a sandbox that does what the test says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import anyio
import pytest

from agentrl.env import watch_faults
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_rewards.code import (
    CaseOutcome,
    CodeGrader,
    ProgramTests,
    StdinCase,
    call_tests,
    last_code_block,
    whole_response,
)
from agentrl_rewards.code.compare import Comparison
from agentrl_rewards.code.values import decode_value, encode_value
from agentrl_sandbox.types import Ending, Program, Result
from tests.support.sandboxes import AnsweringSandbox, job_of

CODE = "```python\ndef f(x): return x\n```\n"
TESTS = call_tests([(f"f({number})", str(number)) for number in range(1, 5)])
Answer = Callable[[Program], Awaitable[Result]]


def number_of(program: Program) -> int:
    return int(job_of(program)["arguments"].removeprefix('["list",').removesuffix("]"))


def said(program: Program, text: str, *, ended: Ending = Ending.EXITED, status: int | None = 0) -> Result:
    nonce = job_of(program)["nonce"]
    lines = "".join(
        f"{line} {nonce} {rest}\n" for line, _, rest in (part.partition(" ") for part in ["ready", text] if part)
    )
    return Result(ended=ended, exit_status=status, stdout=lines.encode())


def answering(answer: Callable[[Program], Result]) -> AnsweringSandbox:
    async def reply(program: Program) -> Result:
        await anyio.lowlevel.checkpoint()
        return answer(program)

    return AnsweringSandbox(reply)


async def test_the_reward_is_all_or_nothing_unless_a_share_is_asked_for() -> None:
    sandbox = answering(lambda program: said(program, "value 1"))
    grade = await CodeGrader(sandbox).grade(CODE, TESTS)
    assert (grade.reward, grade.passed_share, grade.is_solved) == (0, 0.25, False)
    assert (grade.metrics["passed"], grade.metrics["wrong_value"]) == (0.25, 0.75)
    assert (await CodeGrader(sandbox, partial_credit=True).grade(CODE, TESTS)).reward == 0.25


async def test_a_right_submission_gets_everything() -> None:
    grade = await CodeGrader(answering(lambda program: said(program, f"value {number_of(program)}"))).grade(CODE, TESTS)
    assert (grade.reward, grade.metrics["solved"], grade.feedback()) == (1.0, 1.0, "4 of 4 tests passed.")


@pytest.mark.parametrize(
    ("said_by_it", "line"),
    [
        ('error ["SyntaxError","(3, 4)",34]', "Test 1: raised SyntaxError"),
        ('error ["ValueError","(3, 4)",34]', "Test 1: raised an error"),
        ('error ["Args_3_4","",34]', "Test 1: raised an error"),
        ('error ["print","",34]', "Test 1: raised an error"),
        ('raised ["ValueError","(3, 4)",34]', "Test 1: raised an error"),
        ('raised ["NameError","(3, 4)",34]', "Test 1: raised an error"),
        ('unsupported ["TypeError","value of type Args_3_4",34]', "Test 1: unsupported value"),
        ('missing ["AttributeError","3 4",34]', "Test 1: missing function"),
        ('value ["args 3 4"]', "Test 1: forged result"),
        ('value ["list",3,4]', "Test 1: wrong type"),
        ('value "3 4"', "Test 1: wrong type"),
        ("value 34", "Test 1: wrong value"),
        ("args_3_4 null", "Test 1: forged result"),
    ],
)
async def test_feedback_holds_nothing_that_a_submission_wrote(said_by_it: str, line: str) -> None:
    grader = CodeGrader(answering(lambda program: said(program, said_by_it)))
    grade = await grader.grade(CODE, call_tests([("f(1)", "1")]))
    assert grade.feedback() == f"0 of 1 tests passed.\n{line}"


async def test_the_kind_of_an_error_at_import_is_told_if_it_is_the_same_in_all_tests() -> None:
    same = await CodeGrader(answering(lambda program: said(program, 'error ["ImportError","",1]'))).grade(CODE, TESTS)
    assert same.feedback().splitlines()[1:] == [f"Test {number}: raised ImportError" for number in range(1, 5)]
    names = ["", "ImportError", "ImportError", "NameError", "ImportError"]
    sandbox = answering(lambda program: said(program, f'error ["{names[number_of(program)]}","",1]'))
    chosen = await CodeGrader(sandbox).grade(CODE, TESTS)
    assert chosen.feedback().splitlines()[1:] == [f"Test {number}: raised an error" for number in range(1, 5)]


@pytest.mark.parametrize("outcome", [{"exit_status": 34}, {"signal": 34}, {"exit_status": 0}])
async def test_feedback_on_a_program_holds_no_output_status_or_signal(outcome: dict[str, int]) -> None:
    def answer(program: Program) -> Result:
        status, signal = outcome.get("exit_status"), outcome.get("signal")
        ended = Ending.KILLED if status is None else Ending.EXITED
        ready = f"{program.argv[-1]}\n".encode()
        return Result(ended=ended, exit_status=status, signal=signal, stdout=ready + b"3 4", stderr=b"3 4", wall_s=3.4)

    grade = await CodeGrader(answering(answer)).grade(CODE, ProgramTests(cases=(StdinCase(stdin="3 4", expected="7"),)))
    assert not {"3", "4"} & set(grade.feedback())
    assert grade.cases[0].detail


async def test_dicts_of_arguments_keep_their_order() -> None:
    sandbox = answering(lambda program: said(program, "value 1"))
    await CodeGrader(sandbox).grade(CODE, call_tests([("f({'b': {'d': 1, 'c': 2}, 'a': 3}, k={'y': 1, 'x': 2})", "1")]))
    job = job_of(sandbox.programs[0])
    assert [*job["arguments"]].index("b") < [*job["arguments"]].index("a")
    assert repr(decode_value(job["arguments"])) == "[{'b': {'d': 1, 'c': 2}, 'a': 3}]"
    assert repr(decode_value(job["keywords"])) == "{'k': {'y': 1, 'x': 2}}"


@pytest.mark.parametrize(
    ("call", "expected", "returned", "passes"),
    [
        ("set(f(1))", "{1, 2}", [2, 1, 2], True),
        ("set(f(1))", "{1, 2}", [1], False),
        ("set(f(1))", "{1, 2}", 3, False),
        ("set(f(1))", "{(1, 2)}", [(1, 2)], True),
        ("set(f(1))", "{(1, 2)}", [[1, 2]], False),
        ("set(f(1))", "{((1, 2),)}", [([1, 2],)], False),
        ("len(set(f(1)))", "1", [{1}], False),
        ("set(f(1))", "{b'a'}", [bytearray(b"a")], False),
        ("len(set(f(1)))", "1", [{"a": 1}], False),
        ("sorted(f(1))", "[1, 2]", (2, 1), True),
        ("sorted(f(1))", "[1, 2]", ["a", 1], False),
        ("len(set(f(1)))", "2", "aba", True),
        ("list(f(1))", "['a', 'b']", {"a": 1, "b": 2}, True),
    ],
)
@pytest.mark.parametrize("comparison", ["exact", "python"])
async def test_a_view_is_applied_to_the_result(
    call: str, expected: str, returned: object, *, passes: bool, comparison: Comparison
) -> None:
    grader = CodeGrader(answering(lambda program: said(program, f"value {encode_value(returned)}")))
    tests = call_tests([(call, expected)], comparison=comparison)
    assert (await grader.grade(CODE, tests)).is_solved is passes


HOSTILE_TEXTS = [
    *(
        "[]",
        "{}",
        "1.5",
        '[["list"]]',
        '["dict",1]',
        '["dict",["a"]]',
        '["dict","ab"]',
        '["int",[]]',
        '["int","0x"]',
        '["bytes",3]',
        "[" * 9999,
    ),
    *(
        '["set",["list",1]]',
        '["dict",[["set"],1]]',
        '["complex","0x1p0"]',
        '["float",null]',
        "\xff",
        '"\xff"',
        '["list",{}]',
    ),
    '["list",' * 800 + "1" + "]" * 800,
]


@pytest.mark.parametrize("kind", ["value", "error", "raised", "missing", "unsupported", "\xff"])
@pytest.mark.parametrize(("call", "expected"), [("f(1)", "{'a': 1.0}"), ("set(f(1))", "{1}"), ("sorted(f(1))", "[1]")])
async def test_no_text_of_a_submission_is_a_fault_of_the_grader(kind: str, call: str, expected: str) -> None:
    tests = [call_tests([(call, expected)], comparison="python"), call_tests([(call, expected)], tolerance=0.1)]
    for text in HOSTILE_TEXTS:
        for each in tests:

            def answer(program: Program, text: str = text) -> Result:
                line = f"{kind} {job_of(program)['nonce']} {text}\n".encode("latin-1")
                result = said(program, "")
                return replace(result, stdout=result.stdout + line)

            assert not (await CodeGrader(answering(answer)).grade(CODE, each)).is_solved


async def test_a_wrong_value_of_colliding_numbers_is_shown_without_a_set_of_them() -> None:
    numbers = [number * (2**61 - 1) for number in range(20_000)]  # all of one hash
    text = encode_value(numbers).replace("list", "set", 1)
    grader = CodeGrader(answering(lambda program: said(program, f"value {text}")))
    grade = await grader.grade(CODE, call_tests([("f(1)", "{1}"), ("sorted(f(1))", "[1]")], comparison="python"))
    assert [case.outcome for case in grade.cases] == ["wrong_value"] * 2
    shown = grade.cases[0].returned or ""
    assert shown.startswith("{0, 2305843009213693951, ")
    assert shown.endswith(" ...")  # of a set or a sorted list, Python would compare each number with all others


async def test_feedback_does_not_show_what_is_expected() -> None:
    tests = call_tests([("f(1)", "'secret'")])
    for text in ("value 1", 'value "other"', 'error ["ValueError","no",3]', "missing null", ""):
        grade = await CodeGrader(answering(lambda program, text=text: said(program, text))).grade(CODE, tests)
        assert "secret" not in grade.feedback()
        assert grade.reward == 0


@pytest.mark.parametrize(
    ("ended", "status", "outcome"),
    [
        (Ending.TIMEOUT, None, CaseOutcome.TIMEOUT),
        (Ending.MEMORY, None, CaseOutcome.MEMORY),
        (Ending.OUTPUT, None, CaseOutcome.OUTPUT),
        (Ending.FILES, None, CaseOutcome.FILES),
        (Ending.EXITED, 1, CaseOutcome.EXIT_STATUS),
    ],
)
async def test_a_right_value_does_not_count_unless_the_process_ends_well(
    ended: Ending, status: int | None, outcome: CaseOutcome
) -> None:
    sandbox = answering(lambda program: said(program, f"value {number_of(program)}", ended=ended, status=status))
    grade = await CodeGrader(sandbox, max_timeouts=9).grade(CODE, TESTS)
    assert [case.outcome for case in grade.cases] == [outcome] * 4
    assert grade.reward == 0


@pytest.mark.parametrize(
    "result",
    [
        Result(ended=Ending.TIMEOUT, wall_s=20.0),
        Result(ended=Ending.EXITED, exit_status=127, stderr=b"python3: not found"),
        Result(ended=Ending.KILLED, signal=9, stdout=b"ready"),
        Result(ended=Ending.EXITED, exit_status=0, stdout=b"ready 0\nvalue 0 1\n"),
    ],
)
async def test_a_sandbox_that_does_not_begin_is_a_fault(result: Result) -> None:
    sandbox = answering(lambda _: result)
    with watch_faults() as faults, pytest.raises(EnvironmentFault, match="before the submission began"):
        await CodeGrader(sandbox, num_concurrent=1).grade(CODE, call_tests([("f(1)", "1")]))
    assert list(faults) == ["code grader"]
    assert len(sandbox.programs) == 2


async def test_a_program_that_does_not_begin_is_a_fault() -> None:
    tests = ProgramTests(cases=(StdinCase(stdin="", expected=""),))
    with pytest.raises(EnvironmentFault, match="before the submission began"):
        await CodeGrader(answering(lambda _: Result(ended=Ending.TIMEOUT))).grade(CODE, tests)


async def test_a_sandbox_that_fails_once_is_asked_again() -> None:
    failed: set[int] = set()

    def answer(program: Program) -> Result:
        number = number_of(program)
        if number not in failed:
            failed.add(number)
            raise EnvironmentFault("sandbox: it is gone")
        return said(program, f"value {number}")

    sandbox = answering(answer)
    assert await CodeGrader(sandbox)(CODE, TESTS) == 1.0
    assert len(sandbox.programs) == 8
    assert len({job_of(program)["nonce"] for program in sandbox.programs}) == 8


async def test_after_too_many_timeouts_the_later_tests_are_not_run() -> None:
    def answer(program: Program) -> Result:
        number = number_of(program)
        late = number in (1, 3)
        return said(program, f"value {number}", ended=Ending.TIMEOUT if late else Ending.EXITED, status=None if late else 0)

    for places in (1, 4):
        grade = await CodeGrader(answering(answer), num_concurrent=places).grade(CODE, TESTS)
        assert [case.outcome for case in grade.cases] == ["timeout", "passed", "timeout", "not_run"]


async def test_no_more_sandboxes_run_at_a_time_than_there_are_places() -> None:
    running, most = 0, 0

    async def reply(program: Program) -> Result:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        running -= 1
        return said(program, f"value {number_of(program)}")

    await CodeGrader(AnsweringSandbox(reply), num_concurrent=3).grade(CODE, TESTS)
    assert most == 3


async def test_a_cancelled_grade_ends_its_sandboxes() -> None:
    began, ended = anyio.Event(), 0

    async def reply(program: Program) -> Result:
        nonlocal ended
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended += 1
        return said(program, "")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(CodeGrader(AnsweringSandbox(reply), num_concurrent=2).grade, CODE, TESTS)
        await began.wait()
        tasks.cancel_scope.cancel()
    assert ended >= 1


@pytest.mark.parametrize(
    "response", [None, "", "no code", "```python\n```", "```python\ndef f(x): return x", "```js\nf()\n```"]
)
async def test_a_response_without_code_gets_nothing(response: str | None) -> None:
    sandbox = answering(lambda program: said(program, ""))
    grade = await CodeGrader(sandbox).grade(response, TESTS)
    assert ({case.outcome for case in grade.cases}, grade.reward, sandbox.programs) == ({CaseOutcome.NO_CODE}, 0.0, [])


async def test_code_that_is_too_long_gets_nothing() -> None:
    grader = CodeGrader(answering(lambda program: said(program, "")), max_code_chars=10, extract=whole_response)
    assert {case.outcome for case in (await grader.grade("x" * 11, TESTS)).cases} == {CaseOutcome.NO_CODE}


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_timeouts must be at least 1"):
        CodeGrader(answering(lambda program: said(program, "")), max_timeouts=0)


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```\na\n```", "a\n"),
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```text\nb\n```", "a\n"),
        ("```text\n```\n```python3\na\n```", "a\n"),
        ("````python\n```\nx\n```\n````", "```\nx\n```\n"),
        ("  ```python\na\n  ```", "a\n"),
        ("text ```python\na\n```", None),
        ("```Python\r\na\r\n```\r\n", "a\r\n"),
        ("```python\na\n```\nExample output:\n```\nb\n```", "a\n"),
        ("```\nb\n```\n```python\na\n```\n```\nc\n```\n```text\nd\n```", "a\n"),
        ("```python\na\n```\n```\nimport b\n```", "a\n"),
        ("```\nimport a\n```\nOutput:\n```\n42\n```", "import a\n"),
        ("```\nx = f(1)\n```\n```\ny == 2\n```", "x = f(1)\n"),
        ("```\nfirst\n```\n```\nlast\n```", "last\n"),
        ("~~~python\na\n```\n~~~", "a\n```\n"),
        ("~~~~ py\na\n~~~\n~~~~~\n", "a\n~~~\n"),
        ("```PYTHON3\na\n```", "a\n"),
        ("```python3.11\na\n```", "a\n"),
        ("```{.python .numberLines}\na\n```", "a\n"),
        ('```python title="a.py"\na\n```', "a\n"),
        ("```pycon\n>>> a\n```", None),
        ("```pytb\nTraceback\n```\n```\na\n```", "a\n"),
        ("1. So:\n\n    ```python\n    if a:\n        b\n    ```\n", "if a:\n    b\n"),
        ("\t```py\n\tif a:\n\t\tb\n\t```\n", "if a:\n\tb\n"),
        ('```python\n"""\n    ```\n    x\n    ```\n"""\n```', '"""\n    ```\n    x\n    ```\n"""\n'),
        ("```\nnever closed\n```python\na\n```", "a\n"),
        ("```python\ncut\n\nAgain:\n```python\na\n```", "a\n"),
        ("````markdown\n```python\nb\n```\n````\n```\na\n```", "a\n"),
        ("```python\na\n```\n```python\ncut off", "a\n"),
        ("```python x```\n```python\na\n```", "a\n"),
    ],
)
def test_the_last_block_that_names_python_is_the_code(response: str, code: str | None) -> None:
    assert last_code_block(response) == code
