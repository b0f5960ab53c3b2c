"""Environments that speak in chat messages, so that one workflow can play any of them.

Invariant: a step that reaches the workflow is well formed: messages of a bounded size, a finite reward or none, and either
something for the policy to answer or an end. Everything else that an environment does is an `EnvironmentFault`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeVar, cast, runtime_checkable

import anyio
from pydantic import Field

from agentrl.config.base import Config
from agentrl.env.faults import environment_boundary
from agentrl.episode.checks import check_reward
from agentrl.errors import ConfigError, EnvironmentFault, RewardError, WorkflowError
from agentrl.types import JsonValue, Message, Task

Checked = TypeVar("Checked")
ToolSchema = Mapping[str, JsonValue]
"""A tool as the OpenAI wire declares it, such as `Tool.schema`."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class EpisodeEnd(StrEnum):
    """The reason for which an environment ended its episode."""

    TERMINATED = "terminated"
    """By the task: solved, lost, or given up. Nothing follows that could have been worth something."""
    TRUNCATED = "truncated"
    """By a limit, such as a number of steps; the state might have been worth something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatStart:
    """The beginning of an episode, for the policy."""

    messages: Sequence[Message]
    """At least one."""
    tools: Sequence[ToolSchema] = ()
    """Offered in every turn of the episode."""
    player: str = ""
    """Name of the player who answers the messages; empty without several players."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatStep:
    """The environment's answer to an assistant message."""

    messages: Sequence[Message] = ()
    """For the policy to answer next: results of all its tool calls, or a user message. May be empty at the end."""
    player: str = ""
    """As in `ChatStart`; each player sees its own messages only."""
    reward: float | None = None
    """Of the assistant's turn; None: it has none of its own."""
    player_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Rewards of the players of a game, each for the latest turn."""
    end: EpisodeEnd | None = None
    """None: the episode continues."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers about the episode so far; a later one replaces an earlier one of the same name."""


class ChatEnvironment(Protocol):
    """A world that is played in chat messages, one episode after the other.

    Its methods are called one at a time. Whatever they raise is the environment's fault, so an action that the policy got
    wrong is answered with a message and not raised.
    """

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        """Begin an episode, also where the one before did not end; task and `seed` fix everything random in it."""
        ...

    async def step(self, message: Message) -> ChatStep:
        """Take an assistant message, with `content` and `tool_calls` as the OpenAI wire writes them."""
        ...

    async def close(self) -> None:
        """Release what the environment holds; called once, also after a fault or a cancellation."""
        ...


@runtime_checkable
class HealthChecked(Protocol):
    """An environment that a pool asks whether it still works before it is used again."""

    async def check_health(self) -> None: ...


class EnvironmentLimits(Config):
    """Deadlines and sizes of an environment; passing one is its fault."""

    start_s: float = Field(default=120.0, gt=0)
    """Seconds to make an instance."""
    reset_s: float = Field(default=60.0, gt=0)
    """Seconds to begin an episode."""
    step_s: float = Field(default=60.0, gt=0)
    """Seconds to answer a message; also for a health check."""
    close_s: float = Field(default=5.0, gt=0)
    """Seconds to close; then the instance is abandoned."""
    max_message_chars: int = Field(default=200_000, ge=1)
    """Characters of the messages of one step together; an environment shortens its observations itself."""
    max_tool_chars: int = Field(default=200_000, ge=1)
    """Characters of all tool schemas together."""


class ChatEpisode:
    """One episode of a chat environment: checks what it returns and the order of calls, and keeps its deadlines."""

    def __init__(self, environment: ChatEnvironment, where: str, limits: EnvironmentLimits) -> None:
        self.start = ChatStart(messages=())
        self.end: EpisodeEnd | None = None
        self.is_sound = True
        """Whether every call so far came back, so that the environment can play again."""
        self._environment = environment
        self._where = where
        self._limits = limits

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        """Begin the episode; an error, a late or a malformed answer is an EnvironmentFault.

        Cancellation: the environment must not be used again.
        """
        limits = self._limits
        start = await self._call(
            "reset", limits.reset_s, lambda: self._environment.reset(task, seed=seed), self._check_start
        )
        self.start = start
        return start

    async def step(self, message: Message) -> ChatStep:
        """Take an assistant message; raises as `reset`, and a WorkflowError unless the episode has begun and is not over."""
        if not self.start.messages or self.end is not None:
            state = f"the episode is over ({self.end})" if self.end is not None else "it was not reset"
            raise WorkflowError(f"{self._where}: stepped while {state}; look at `end` of each step")
        step = await self._call("step", self._limits.step_s, lambda: self._environment.step(message), self._check_step)
        self.end = step.end
        return step

    async def check_health(self) -> None:
        """Check that an environment still works, if it has a check; raises as `reset`."""
        environment = self._environment
        if isinstance(environment, HealthChecked):
            await self._call("check_health", self._limits.step_s, environment.check_health, lambda result: result)

    async def _call(
        self, name: str, seconds: float, call: Callable[[], Awaitable[object]], check: Callable[[object], Checked]
    ) -> Checked:
        self.is_sound = False
        with environment_boundary(f"{self._where}.{name}"):
            with anyio.move_on_after(seconds) as scope:
                try:
                    result = check(await call())
                except (ConfigError, WorkflowError) as error:  # of the environment's own making, not the workflow's
                    raise EnvironmentFault(f"{self._where}.{name} raised {type(error).__name__}: {error}") from error
                self.is_sound = True
                return result
            assert scope.cancelled_caught
            raise EnvironmentFault(f"{self._where}.{name}: no answer within {seconds:g} s")

    def _check_start(self, value: object) -> ChatStart:
        if not isinstance(value, ChatStart):
            raise EnvironmentFault(f"{self._where}.reset: expected a ChatStart, got {type(value).__name__}")
        if not value.messages:
            raise EnvironmentFault(f"{self._where}.reset: expected at least one message for the policy, got none")
        self._check_messages(value.messages, "reset")
        for tool in value.tools:
            function = (
                cast("Mapping[str, object]", tool).get("function") if isinstance(cast("object", tool), Mapping) else None
            )
            if not isinstance(function, Mapping) or not cast("Mapping[str, object]", function).get("name"):
                raise EnvironmentFault(f"{self._where}.reset: a tool must have a function with a name, got {tool!r:.200}")
        if (size := _num_chars(value.tools)) > (limit := self._limits.max_tool_chars):
            raise EnvironmentFault(
                f"{self._where}.reset: {len(value.tools)} tools of {size} characters are over the limit of {limit}; "
                "offer fewer, or raise max_tool_chars"
            )
        return value

    def _check_step(self, value: object) -> ChatStep:
        where = f"{self._where}.step"
        if not isinstance(value, ChatStep):
            raise EnvironmentFault(f"{where}: expected a ChatStep, got {type(value).__name__}")
        self._check_messages(value.messages, "step")
        if value.end is not None and not isinstance(cast("object", value.end), EpisodeEnd):
            raise EnvironmentFault(f"{where}: `end` must be an EpisodeEnd or None, got {value.end!r:.80}")
        if value.end is None and not value.messages:
            raise EnvironmentFault(f"{where}: the episode continues, but there is no message for the policy to answer")
        if value.end is None and bool(value.player) != bool(self.start.player):
            raise EnvironmentFault(
                f"{where}: every message in a game of several players is for one of them; reset named "
                f"{self.start.player!r}, this step {value.player!r}"
            )
        try:
            if value.reward is not None:
                check_reward(value.reward, where)
            for player, reward in value.player_rewards.items():
                check_reward(reward, f"{where}, player {player}")
        except RewardError as error:
            raise EnvironmentFault(str(error)) from None
        for name, number in value.metrics.items():
            if not isinstance(cast("object", number), (bool, int, float)) or not math.isfinite(number):
                raise EnvironmentFault(f"{where}: the metric {name} must be a finite number, got {number!r:.80}")
        return value

    def _check_messages(self, messages: Sequence[Message], name: str) -> None:
        where = f"{self._where}.{name}"
        for message in messages:
            fields = cast("object", message)
            if not isinstance(fields, Mapping) or message.get("role") not in _ROLES:
                raise EnvironmentFault(f"{where}: a message must have a role of {sorted(_ROLES)}, got {message!r:.200}")
            if not isinstance(message.get("content"), (str, list, tuple)):
                raise EnvironmentFault(f"{where}: the content of a message must be text or parts, got {message!r:.200}")
        if (size := _num_chars(messages)) > (limit := self._limits.max_message_chars):
            raise EnvironmentFault(
                f"{where}: messages of {size} characters are over the limit of {limit}; shorten observations in the "
                "environment, or raise max_message_chars"
            )


def environment_seed(task: Task, *, run_seed: int = 0, episode_id: str = "") -> int:
    """Return the seed, from 0 to 2**31 - 1, of an episode's environment.

    Without `episode_id` the episodes of a group meet the same world, as their common baseline needs; with it, each meets
    another one.

    Example:
        >>> task = Task(id="7", data={})
        >>> environment_seed(task) == environment_seed(task)
        True
        >>> environment_seed(task, episode_id="3.0.0") == environment_seed(task, episode_id="3.1.0")
        False
    """
    digest = hashlib.sha256(f"{run_seed}\n{task.id}\n{episode_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 2**31


def _num_chars(value: object) -> int:
    """Return the characters in all texts of a nested value; each other value counts as one."""
    total, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            left.extend(part for pair in cast("Mapping[object, object]", item).items() for part in pair)
        elif isinstance(item, (list, tuple)):
            left.extend(cast("Sequence[object]", item))
        else:
            total += 1
    return total
