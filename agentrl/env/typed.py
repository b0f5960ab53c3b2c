"""The typed environment of one episode, and the wrapper that workflows use it through.

Invariant: an environment is reset once, stepped while it is not done, closed once. Its errors are `EnvironmentFault`s.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import anyio

from agentrl.env.faults import environment_boundary
from agentrl.episode.checks import check_reward
from agentrl.errors import EnvironmentFault, WorkflowError

ActionT_contra = TypeVar("ActionT_contra", contravariant=True)
ObservationT_co = TypeVar("ObservationT_co", covariant=True)
ActionT = TypeVar("ActionT")
ObservationT = TypeVar("ObservationT")

CLOSE_TIMEOUT_S = 5.0
"""Default seconds that an environment has to close."""


class Environment(Protocol[ActionT_contra, ObservationT_co]):
    """The world of one episode: `reset`, `step` and `close` change it, the properties describe its state."""

    @property
    def observation(self) -> ObservationT_co:
        """The current input of the policy."""
        ...

    @property
    def reward(self) -> float:
        """Reward of the last step; 0 before the first."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the episode is over."""
        ...

    async def reset(self) -> None:
        """Start the episode; called once."""
        ...

    async def step(self, action: ActionT_contra) -> None:
        """Do `action`; called while the episode is not over."""
        ...

    async def close(self) -> None:
        """Release the environment's resources; called once, also after a fault or a cancellation."""
        ...


class OpenEnvironment(Environment[ActionT, ObservationT]):
    """An environment in use: checks the order of calls and turns its errors into `EnvironmentFault`."""

    def __init__(
        self, environment: Environment[ActionT, ObservationT], where: str, *, close_timeout_s: float = CLOSE_TIMEOUT_S
    ) -> None:
        self._close_timeout_s = close_timeout_s
        self._environment = environment
        self._where = where
        self._is_reset = False

    @property
    def observation(self) -> ObservationT:
        with environment_boundary(f"{self._where}.observation"):
            return self._environment.observation

    @property
    def reward(self) -> float:
        """Reward of the last step; one that is not a finite number is a fault."""
        with environment_boundary(f"{self._where}.reward"):
            try:
                return check_reward(self._environment.reward, f"{self._where}.reward")
            except WorkflowError as error:
                raise EnvironmentFault(str(error)) from None

    @property
    def is_done(self) -> bool:
        with environment_boundary(f"{self._where}.is_done"):
            return self._environment.is_done

    async def reset(self) -> None:
        """Start the episode; a second call is a WorkflowError. After a cancellation the environment can only be closed."""
        if self._is_reset:
            raise WorkflowError(f"{self._where}: reset a second time; make a new environment for each episode")
        self._is_reset = True
        with environment_boundary(f"{self._where}.reset"):
            await self._environment.reset()

    async def step(self, action: ActionT) -> None:
        if not self._is_reset or self.is_done:
            state = "the episode is over" if self._is_reset else "it was not reset"
            raise WorkflowError(f"{self._where}: stepped while {state}; check is_done before each step")
        with environment_boundary(f"{self._where}.step"):
            await self._environment.step(action)

    async def close(self) -> None:
        """Close the environment within `close_timeout_s`; closing is shielded and goes to its end or to this limit."""
        patience = self._close_timeout_s
        with environment_boundary(f"{self._where}.close"):
            with anyio.move_on_after(patience, shield=True) as scope:
                await self._environment.close()
            if scope.cancelled_caught:
                raise EnvironmentFault(f"{self._where}.close did not end within {patience:g} s; it was abandoned")


@asynccontextmanager
async def open_environment(
    environment: Environment[ActionT, ObservationT], where: str, *, close_timeout_s: float = CLOSE_TIMEOUT_S
) -> AsyncGenerator[OpenEnvironment[ActionT, ObservationT]]:
    """Reset an `environment`, yield it for one episode, and close it within `close_timeout_s`; `where` is its name."""
    guarded = OpenEnvironment(environment, where, close_timeout_s=close_timeout_s)
    try:
        await guarded.reset()
        yield guarded
    except BaseException as error:
        try:
            await guarded.close()
        except EnvironmentFault as fault:
            error.add_note(str(fault))  # the error that ended the episode is the one to raise
        raise
    await guarded.close()
