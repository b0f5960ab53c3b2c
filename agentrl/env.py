"""What an environment is, and the wrapper that makes its faults its own.

Invariant: an environment serves one episode: reset once, stepped while it is not done, closed once. Whatever it raises is an
`EnvironmentFault`, so it is never mistaken for the policy's or the workflow's doing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import anyio

from agentrl.errors import EnvironmentFault, WorkflowError, boundary
from agentrl.validation import check_reward

ActionT_contra = TypeVar("ActionT_contra", contravariant=True)
ObservationT_co = TypeVar("ObservationT_co", covariant=True)
ActionT = TypeVar("ActionT")
ObservationT = TypeVar("ObservationT")

CLOSE_TIMEOUT_S = 5.0
"""Seconds an environment has to close where nothing else is said, whatever ended the episode."""


class Environment(Protocol[ActionT_contra, ObservationT_co]):
    """The world of one episode. `reset`, `step` and `close` do the work; the properties say where it stands."""

    @property
    def observation(self) -> ObservationT_co:
        """What the policy sees now."""
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
        """Give back what the environment holds; called once, also after a fault or a cancellation."""
        ...


class OpenEnvironment(Environment[ActionT, ObservationT]):
    """An environment in use: the one given, with the order of calls checked and its errors attributed."""

    def __init__(
        self, environment: Environment[ActionT, ObservationT], where: str, *, close_timeout_s: float = CLOSE_TIMEOUT_S
    ) -> None:
        """Guard `environment`; `where` names it in messages, `close_timeout_s` is what it has to close, seconds."""
        self._close_timeout_s = close_timeout_s
        self._environment = environment
        self._where = where
        self._is_reset = False

    @property
    def observation(self) -> ObservationT:
        """What the policy sees now.

        Raises:
            EnvironmentFault: when the environment cannot say.
        """
        with boundary(EnvironmentFault, f"{self._where}.observation"):
            return self._environment.observation

    @property
    def reward(self) -> float:
        """Reward of the last step.

        Raises:
            EnvironmentFault: when it is not a finite number.
        """
        with boundary(EnvironmentFault, f"{self._where}.reward"):
            value = self._environment.reward
        try:
            return check_reward(value, f"{self._where}.reward")
        except WorkflowError as error:
            raise EnvironmentFault(str(error)) from None

    @property
    def is_done(self) -> bool:
        """Whether the episode is over."""
        with boundary(EnvironmentFault, f"{self._where}.is_done"):
            return self._environment.is_done

    async def reset(self) -> None:
        """Start the episode.

        Raises:
            WorkflowError: when it was started before; an environment serves one episode.
            EnvironmentFault: when the environment raised.

        Cancellation: the environment is only good for closing.
        """
        if self._is_reset:
            raise WorkflowError(f"{self._where}: reset a second time; make a new environment for each episode")
        self._is_reset = True
        with boundary(EnvironmentFault, f"{self._where}.reset"):
            await self._environment.reset()

    async def step(self, action: ActionT) -> None:
        """Do `action`.

        Raises:
            WorkflowError: before `reset`, or when the episode is over.
            EnvironmentFault: when the environment raised.

        Cancellation: the environment is only good for closing.
        """
        if not self._is_reset or self.is_done:
            state = "the episode is over" if self._is_reset else "it was not reset"
            raise WorkflowError(f"{self._where}: stepped while {state}; check is_done before each step")
        with boundary(EnvironmentFault, f"{self._where}.step"):
            await self._environment.step(action)

    async def close(self) -> None:
        """Close the environment, within its `close_timeout_s`; 3 seconds where a whole command is being ended.

        Raises:
            EnvironmentFault: when it raised, or did not close in time.

        Cancellation: closing goes on, shielded, until it is done or its time is up.
        """
        patience = self._close_timeout_s
        with anyio.move_on_after(patience, shield=True) as scope, boundary(EnvironmentFault, f"{self._where}.close"):
            await self._environment.close()
        if scope.cancelled_caught:
            raise EnvironmentFault(f"{self._where}.close did not end within {patience:g} s; it was abandoned")


@asynccontextmanager
async def open_environment(
    environment: Environment[ActionT, ObservationT], where: str, *, close_timeout_s: float = CLOSE_TIMEOUT_S
) -> AsyncGenerator[OpenEnvironment[ActionT, ObservationT]]:
    """Yield `environment`, reset, for one episode; it is closed however the block ends.

    Args:
        environment: a new one.
        where: names it in messages.
        close_timeout_s: seconds it has to close.

    Raises:
        EnvironmentFault: when the environment raised in reset, step or close.

    Cancellation: the environment is closed first.
    """
    guarded = OpenEnvironment(environment, where, close_timeout_s=close_timeout_s)
    try:
        await guarded.reset()
        yield guarded
    except BaseException as error:
        try:
            await guarded.close()
        except EnvironmentFault as fault:
            error.add_note(str(fault))  # what ended the episode comes first
        raise
    await guarded.close()
