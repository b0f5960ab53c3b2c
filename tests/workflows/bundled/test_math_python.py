"""Tool-integrated math: the session keeps its state, its output is bounded, and its faults are no rewards."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from agentrl.errors import ConfigError, EnvironmentFault, WorkflowError
from agentrl.tokens.verify import verify
from agentrl.types import StopReason, Task
from agentrl_sandbox import Limits, Program, Result, SandboxPool, Session
from agentrl_workflows.math_python import MathPython
from tests.support.player import Player, tool_call
from tests.support.sandboxes import usable_host

SUM = Task(id="sum", data={"question": "What is the sum of the squares of 1 to 100?", "answer": "338350"})


def python(code: str) -> str:
    return tool_call("python", code=code)


@pytest.mark.starts
async def test_a_session_keeps_its_variables_and_what_goes_wrong_in_it_is_for_the_model_to_read(play: Player) -> None:
    usable_host()
    right = [python("x = 100"), python("sum(n * n for n in range(x + 1))"), r"\boxed{338350}"]
    wrong = [
        python("1 / 0"),
        tool_call("python", source="1"),
        tool_call("run", code="1"),
        python("print('7' * 100_000)"),
        python("x = b'1' * 10**9"),
        "The answer is 338350.",
    ]
    endless = [python("338350")] * 8
    workflow = MathPython(num_workers=1, max_output_chars=200, sandbox={"limits": {"memory_mb": 128, "wall_s": 60}})
    solved, failed, unanswered = await play.all(workflow, SUM, right, wrong, endless)

    assert (solved.final_reward, solved.failure) == (1.0, None)
    assert solved.metrics == {"correct": 1.0, "python_calls": 2.0, "python_errors": 0.0}
    assert "(no output)" in play.read(solved)[1]
    assert "338350" in play.read(solved)[2]
    assert len(solved.branches()) == 1
    verify(solved)

    assert (failed.final_reward, failed.failure) == (0.0, None)  # its answer is in no box
    assert failed.metrics["python_errors"] == 2.0
    _, raised, unknown, other, long, over = play.read(failed)
    assert "ZeroDivisionError" in raised
    assert "Error: wrong arguments for python" in unknown
    assert "Error: there is no tool 'run'" in other
    assert "99800 characters left out" in long
    assert "memory" in over.lower()

    assert (unanswered.final_reward, unanswered.stop_reason, len(unanswered.turns)) == (0.0, StopReason.COMPLETED, 8)


class BrokenSandbox:
    """Starts nothing."""

    name, is_isolated = "broken", True
    limits = Limits()

    async def run(self, program: Program, limits: Limits | None = None) -> Result:
        raise EnvironmentFault("sandbox: cannot be started")

    @asynccontextmanager
    async def session(
        self, *, files: object = None, limits: Limits | None = None, port: int | None = None
    ) -> AsyncGenerator[Session]:
        raise EnvironmentFault("sandbox: cannot be started")
        yield

    def forks(self, *, limits: Limits | None = None) -> AbstractAsyncContextManager[Session]:
        return self.session(limits=limits)


@pytest.mark.starts
async def test_a_sandbox_that_breaks_is_an_environment_fault_and_no_reward(play: Player) -> None:
    usable_host()

    class OnBroken(MathPython):
        @property
        def sandbox(self) -> SandboxPool:
            return SandboxPool(BrokenSandbox(), max_running=1, max_sessions=1)

    episode = await play(OnBroken(), SUM, r"\boxed{338350}")
    assert (episode.stop_reason, episode.final_reward) == (StopReason.ENVIRONMENT_FAULT, None)


def test_a_workflow_whose_sandbox_is_closed_says_how_to_open_it() -> None:
    with pytest.raises(WorkflowError, match=r"async with workflow\.opened"):
        _ = MathPython().sandbox
    with pytest.raises(ConfigError, match="must be positive"):
        MathPython(max_turns=0)
