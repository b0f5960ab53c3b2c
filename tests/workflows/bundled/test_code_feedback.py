"""Code with test feedback, in the real sandbox: what the model reads after each attempt, and what the last one pays."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.types import StopReason, Task
from agentrl_workflows.code_feedback import CodeFeedback
from agentrl_workflows.programming import programming_tasks
from tests.support.player import Player
from tests.support.sandboxes import usable_host

pytestmark = pytest.mark.starts

DATA: dict[str, Any] = {
    "question": "Write f(x): twice x, but 100 for an x over 5.",
    "examples": {"calls": [["f(1)", "2"], ["f(4)", "8"]]},
    "tests": {"calls": [["f(3)", "6"], ["f(7)", "100"], ["f(2)", "4"], ["f(20)", "100"]]},
}
TASK = Task(id="t", data=DATA)


def code(body: str) -> str:
    return f"Here it is.\n```python\ndef f(x):\n    {body}\n```"


RIGHT, HALF = code("return 2 * x if x <= 5 else 100"), code("return 2 * x")


@pytest.fixture(autouse=True)
def sandbox() -> None:
    usable_host()


@pytest.mark.parametrize("start", ["cold", "warm"])
async def test_feedback_shows_examples_in_full_and_of_hidden_tests_what_the_program_did(play: Player, start: str) -> None:
    workflow = CodeFeedback(max_attempts=4, start=start)  # pyright: ignore[reportArgumentType] - a parameter of the test
    episode = await play(workflow, TASK, "I do not know.", code("return x + 1"), HALF, RIGHT)
    read = play.read(episode)
    assert "The answer has no block of Python code." in read[1]
    assert "f(4) returned 5, expected 8." in read[2]
    assert "2 of 4 tests passed.\nTest 2: wrong value\n" in read[3]
    assert "100" not in read[3]
    assert "Correct the program" in read[3]
    shares = [episode.metrics[f"passed_share.{attempt}"] for attempt in (1, 2, 3, 4)]
    assert (shares, episode.metrics["attempts"], episode.metrics["success"]) == ([0.0, 0.0, 0.5, 1.0], 4, 1)
    assert episode.final_reward == pytest.approx(0.9**3)


async def test_a_second_attempt_learns_no_argument_of_a_hidden_test(play: Player) -> None:
    """Neither from the message of an error, nor from the name of its class, nor from an output."""
    leaks = [code(text) for text in ("raise ValueError(x)", "raise type(f'Args{x}', (Exception,), {})", "return f'Args{x}'")]
    for leak in leaks:
        task = Task(id="t", data={"question": "Write f.", "tests": {"calls": [["f(31337)", "1"]]}})
        assert "31337" not in play.read(await play(CodeFeedback(), task, leak, RIGHT, RIGHT))[1]
    program = "```python\nimport sys\nx = input()\nprint(x)\nprint(x, file=sys.stderr)\nsys.exit(x)\n```"
    task = Task(id="t", data={"question": "Write it.", "tests": {"runs": [["31337", "1"]]}})
    assert "31337" not in play.read(await play(CodeFeedback(), task, program, RIGHT, RIGHT))[1]


async def test_a_submission_that_attacks_warm_grading_changes_no_episode_after_it(play: Player) -> None:
    attack = """```python
import os, signal, threading, time
def spoil():
    while True:
        for name in ("/work/solution.py", "/tmp/x", "/dev/shm/x"):
            with open(name, "w") as file:
                file.write("def f(x): return 2 * x if x <= 5 else 100")
if os.fork() == 0:
    os.setsid()
    threading.Thread(target=spoil).start()
    time.sleep(600)
os.set_blocking(2, False)
os.kill(os.getppid(), signal.SIGSTOP)
def f(x): return None
```"""
    workflow = CodeFeedback(max_attempts=1, start="warm")
    rewards = [(await play(workflow, TASK, text)).final_reward for text in (attack, code("return 0"), RIGHT)]
    both = f"{attack}\n{RIGHT}"  # the last block counts
    rewards.append((await play(workflow, TASK, both)).final_reward)
    assert rewards == [0.0, 0.0, 1.0, 1.0]


async def test_the_last_attempt_counts_in_part_or_in_full(play: Player) -> None:
    for credit, texts, reward in (
        ("partial", [RIGHT], 1.0),
        ("partial", [code("return 0"), HALF], 0.5 * 0.9),
        ("full", [code("return 0"), HALF], 0.0),
        ("partial", [HALF, code("return 0")], 0.0),
    ):
        workflow = CodeFeedback(max_attempts=2, credit=credit, start="warm")  # pyright: ignore[reportArgumentType]
        episode = await play(workflow, TASK, *texts)
        assert episode.stop_reason is StopReason.COMPLETED
        assert episode.final_reward == pytest.approx(reward)
        assert episode.metrics["attempts"] == len(texts)


async def test_an_error_reads_with_its_line_and_a_program_of_standard_input_with_its_output(play: Player) -> None:
    programs = {"examples": {"runs": [["3", "6"]]}, "tests": {"runs": [["4", "8"]]}}
    task = Task(id="p", data={"question": "Read a number, and print twice it.", **programs})
    workflow = CodeFeedback(max_attempts=3)
    first = await play(workflow, TASK, code("return y"), RIGHT)
    assert "f(1) NameError: name 'y' is not defined (line 2), expected 2." in play.read(first)[1]
    second = await play(workflow, task, "```python\nprint(int(input()))\n```", "```python\nprint(2 * int(input()))\n```")
    assert "With the input '3', the program wrote '3\\n', expected '6'." in play.read(second)[1]
    assert second.metrics["success"] == 1


@pytest.mark.parametrize("start", ["cold", "warm"])
async def test_examples_and_hidden_tests_can_be_test_files(play: Player, start: str) -> None:
    files = [f"from solution import f\ndef test_it():\n    assert f({x}) == {y}\n" for x, y in ((4, 8), (7, 100))]
    data = {"question": "Write f.", "examples": {"test_file": files[0]}, "tests": {"test_file": files[1]}}
    workflow = CodeFeedback(max_attempts=3, start=start)  # pyright: ignore[reportArgumentType] - a parameter of the test
    episode = await play(workflow, Task(id="t", data=data), code("return 0"), HALF, RIGHT)
    read = play.read(episode)
    assert "In test_it of the test file, the program failed an assertion." in read[1]
    assert "0 of 1 tests passed.\nTest 1: wrong value" in read[2]
    assert (episode.metrics["success"], episode.metrics["attempts"]) == (1, 3)


async def test_a_bundled_programming_task_is_solved_by_its_reference(play: Player) -> None:
    task = programming_tasks(split="held_out")[0]
    episode = await play(CodeFeedback(start="warm"), task, task["reference"])
    assert (episode.final_reward, episode.metrics["success"]) == (1.0, 1)


def test_wrong_settings_are_refused() -> None:
    for settings, message in (
        ({"max_attempts": 0}, "max_attempts >= 1"),
        ({"retry_factor": 0.0}, "0 < retry_factor <= 1"),
        ({"credit": "half"}, "credit partial or full"),
        ({"start": "hot"}, "start cold or warm"),
    ):
        with pytest.raises(ConfigError, match=message):
            CodeFeedback(**settings)  # pyright: ignore[reportArgumentType] - mistakes of a run file
