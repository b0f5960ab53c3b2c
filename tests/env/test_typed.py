"""An environment serves one episode, and its errors are its own."""

from __future__ import annotations

import math

import anyio
import pytest

from agentrl.env import open_environment
from agentrl.errors import EnvironmentFault, WorkflowError


class Countdown:
    """Done after as many steps as it was given; `breaks` names the method that raises."""

    def __init__(self, steps: int = 2, breaks: str = "") -> None:
        self.left = steps
        self.breaks = breaks
        self.closed = 0
        self.reward = 0.0

    @property
    def observation(self) -> str:
        return f"{self.left} left"

    @property
    def is_done(self) -> bool:
        return self.left == 0

    async def reset(self) -> None:
        self._work("reset")

    async def step(self, action: str) -> None:
        self._work("step")
        self.left -= 1
        self.reward = math.nan if action == "cheat" else 1.0

    async def close(self) -> None:
        self.closed += 1
        self._work("close")

    def _work(self, name: str) -> None:
        if name == self.breaks:
            raise OSError(f"{name} broke")


async def test_an_environment_is_reset_stepped_and_closed() -> None:
    countdown = Countdown()
    async with open_environment(countdown, "countdown") as environment:
        seen = [environment.observation]
        while not environment.is_done:
            await environment.step("go")
            seen.append(environment.observation)
        assert environment.reward == 1.0
    assert seen == ["2 left", "1 left", "0 left"]
    assert countdown.closed == 1


@pytest.mark.parametrize("method", ["reset", "step", "close"])
async def test_what_an_environment_raises_is_an_environment_fault_and_it_is_closed(method: str) -> None:
    countdown = Countdown(breaks=method)
    with pytest.raises(EnvironmentFault, match=rf"countdown\.{method} raised OSError: {method} broke"):
        async with open_environment(countdown, "countdown") as environment:
            await environment.step("go")
    assert countdown.closed == 1


async def test_using_an_environment_in_the_wrong_order_is_the_workflows_error() -> None:
    async with open_environment(Countdown(steps=1), "countdown") as environment:
        with pytest.raises(WorkflowError, match="make a new environment for each episode"):
            await environment.reset()
        await environment.step("go")
        with pytest.raises(WorkflowError, match="the episode is over"):
            await environment.step("go")


async def test_a_reward_that_is_no_number_is_a_fault() -> None:
    async with open_environment(Countdown(), "countdown") as environment:
        await environment.step("cheat")
        with pytest.raises(EnvironmentFault, match="must be a finite number"):
            _ = environment.reward


async def test_the_error_of_the_block_is_kept_when_closing_fails_too() -> None:
    with pytest.raises(ValueError, match="the block") as caught:
        async with open_environment(Countdown(breaks="close"), "countdown"):
            raise ValueError("the block")
    assert "close broke" in caught.value.__notes__[0]


async def test_an_environment_is_closed_when_its_episode_is_cancelled() -> None:
    countdown = Countdown()
    with anyio.CancelScope() as scope:
        async with open_environment(countdown, "countdown"):
            scope.cancel()
            await anyio.sleep_forever()
    assert countdown.closed == 1


async def test_an_environment_that_does_not_close_is_abandoned() -> None:
    class Stuck(Countdown):
        async def close(self) -> None:
            await anyio.sleep_forever()

    with pytest.raises(EnvironmentFault, match=r"close did not end within 0\.01 s"):
        async with open_environment(Stuck(), "stuck", close_timeout_s=0.01):
            pass
