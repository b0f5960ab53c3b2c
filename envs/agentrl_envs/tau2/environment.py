"""Tasks of tau2 as an environment: the policy serves a customer whose whole case it reads, with the tools of both.

tau2 has a model play the customer. Here there is none: the first message says what the customer wants and knows, and the
policy has the customer's tools, too, as in tau2's own solo mode for telecom. So figures of a leaderboard do not compare.

Invariant: the reward comes with the last message and is 0 or 1. The tools are played in worker processes; what the calls of
the policy spend there beyond the limits of a job ends the episode with 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentrl.env import ChatStart, ChatStep
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.types import JsonValue, Message, Task
from agentrl_envs.data_packages import INSPECT_EVALS
from agentrl_envs.shared_workers import shared_workers
from agentrl_envs.tau2.tasks import DATA, DOMAINS
from agentrl_envs.tool_calls import graded_end, tool_calls_of, tool_reply
from agentrl_rewards.workers import GraderLimits

_SOLO: Final = (
    "You work alone. The next message holds the wishes and the knowledge of the customer, and nobody answers you. "
    "You may use the tools of the customer, too. When everything is done that the policy allows, or "
    "nothing can be done, answer with what the customer must be told, without a tool call."
)
_LOADER: Final = "agentrl_envs.tau2.worker:load_tau2_player"
_LIMITS: Final = GraderLimits(cpu_s=60.0)
"""The first job of a worker reads a database, which takes a second."""


class Tau2Environment:
    """Plays the tasks of `tau2_tasks`; a message without tool calls ends the episode.

    Right is what the task's criteria ask for: the database after the reference actions, what must be said, assertions about
    the customer's phone, or certain actions. A last message without a text is never right.

    Args:
        num_workers: processes that play tools, which all instances share.

    Raises:
        ConfigError: inspect-evals is not installed in its version, or `num_workers` is below 1.
    """

    needs_packages = ("inspect_evals",)

    def __init__(self, *, num_workers: int = 2) -> None:
        if num_workers < 1:
            raise ConfigError(f"num_workers must be at least 1, got {num_workers}")
        INSPECT_EVALS.distribution()
        self._workers = shared_workers(_LOADER, num_workers, _LIMITS)
        self._task = Task(id="", data={})
        self._calls: list[JsonValue] = []
        self._said: list[str] = []

    @classmethod
    def check_arguments(cls, **options: Any) -> None:  # noqa: ANN401 - those of the class
        """Refuse what the class refuses, before anything else starts."""
        cls(**options)

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        """Begin with the policy of the domain and the customer's case; nothing depends on `seed`.

        Raises:
            ConfigError: the task is not one of `tau2_tasks`.
            EnvironmentFault: the tools cannot be played.
        """
        if task.data.get("domain") not in DOMAINS:
            raise ConfigError(f"task {task.id}: expected a task of agentrl_envs.tau2.tasks:tau2_tasks")
        self._task, self._calls, self._said = task, [], []
        domain = DOMAINS[task["domain"]]
        texts = [INSPECT_EVALS.read(f"{DATA}/{domain.folder}/{name}").decode() for name in domain.policy]
        reply = await self._workers.call(task["domain"], None, [], "", False)
        if reply.limit is not None:
            raise EnvironmentFault(f"tau2: importing the tools of {task['domain']} spends the {reply.limit} of a job")
        return ChatStart(
            messages=[
                {"role": "system", "content": "\n\n".join([*texts, _SOLO])},
                {"role": "user", "content": str(task["question"])},
            ],
            tools=cast("Sequence[Mapping[str, JsonValue]]", reply.value),
        )

    async def step(self, message: Message) -> ChatStep:
        """Make the calls of a message, or end the episode.

        Cancellation: the worker is ended.
        """
        calls = tool_calls_of(message)
        text = str(message.get("content") or "")
        self._said.append(text)
        self._calls += [[call.name, dict(call.arguments)] for call in calls if not call.problem]
        played = await self._played(is_over=not calls)
        if played is None or not calls:
            return graded_end(played is not None and played["is_right"] is True and bool(text.strip()))
        made = sum(not call.problem for call in calls)
        results = iter(cast("Sequence[str]", played["results"])[len(self._calls) - made :])
        return ChatStep(messages=[tool_reply(call, call.problem or next(results)) for call in calls])

    async def close(self) -> None:
        """Do nothing: the workers end with the last instance."""

    async def _played(self, *, is_over: bool) -> Mapping[str, JsonValue] | None:
        """Return what the worker says of the calls so far; None if they spend its limits."""
        told = {name: self._task[name] for name in ("criteria", "initial_state")}
        reply = await self._workers.call(self._task["domain"], told, self._calls, "\n".join(self._said), is_over)
        return cast("Mapping[str, JsonValue] | None", reply.value if reply.limit is None else None)
