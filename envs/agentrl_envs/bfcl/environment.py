"""Tasks of BFCL as an environment: tools, the user's turns, and a reward of 1 for what the leaderboard counts as right.

Invariant: the reward comes with the last turn and is 0 or 1. Backends are played in worker processes; what the calls of the
policy spend there beyond the limits of a job ends the episode with 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentrl.env import ChatStart, ChatStep, EpisodeEnd
from agentrl.errors import ConfigError
from agentrl.types import JsonValue, Message, Task
from agentrl_envs.bfcl.matching import calls_match
from agentrl_envs.bfcl.tasks import ANY_CALL, MULTI_TURN, NO_CALL
from agentrl_envs.data_packages import BFCL_EVAL
from agentrl_envs.shared_workers import shared_workers
from agentrl_envs.tool_calls import ToolCall, graded_end, has_text, tool_calls_of, tool_reply
from agentrl_rewards.workers import GraderLimits, GraderPool

_TYPES: Final[Mapping[str, str]] = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
_LOADER: Final = "agentrl_envs.bfcl.worker:load_bfcl_player"
_LIMITS: Final = GraderLimits(cpu_s=10.0)


class BfclEnvironment:
    """Plays the tasks of `bfcl_tasks`.

    A message with calls makes them; one without calls ends the user's turn. A multi-turn episode ends at its first wrong
    turn. A reply without a call and without a text is never right.

    Args:
        max_steps_per_turn: messages with calls in one turn of the user; one more ends the episode with 0.
        num_workers: processes that play backends, which all instances share.

    Raises:
        ConfigError: an argument is below 1.
    """

    needs_packages = ("bfcl_eval",)

    def __init__(self, *, max_steps_per_turn: int = 20, num_workers: int = 2) -> None:
        if max_steps_per_turn < 1 or num_workers < 1:
            raise ConfigError(f"expected arguments of at least 1, got {max_steps_per_turn} and {num_workers}")
        self._max_steps = max_steps_per_turn
        self._num_workers = num_workers
        self._workers: GraderPool | None = None
        self._task = Task(id="", data={})
        self._turns: list[list[JsonValue]] = []
        self._steps = 0

    @classmethod
    def check_arguments(cls, **options: Any) -> None:  # noqa: ANN401 - those of the class
        """Refuse what the class refuses, before anything else starts."""
        cls(**options)

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        """Begin with the messages of the first turn; nothing depends on `seed`.

        Raises:
            ConfigError: the task is not one of `bfcl_tasks`, or bfcl-eval is not installed and the task needs it.
        """
        if "category" not in task.data or "functions" not in task.data:
            raise ConfigError(f"task {task.id}: expected a task of agentrl_envs.bfcl.tasks:bfcl_tasks")
        if task["category"] in MULTI_TURN and self._workers is None:
            BFCL_EVAL.distribution()
            self._workers = shared_workers(_LOADER, self._num_workers, _LIMITS)
        self._task, self._turns, self._steps = task, [[]], 0
        return ChatStart(messages=self._asked(), tools=[_offered(each) for each in task["functions"]])

    async def step(self, message: Message) -> ChatStep:
        """Make the calls of a message, or end the user's turn.

        Cancellation: the worker is ended.
        """
        calls = tool_calls_of(message)
        if self._task["category"] in MULTI_TURN:
            return await (self._calls(calls) if calls else self._end_of_turn(message))
        return graded_end(self._is_right(calls, message))

    async def close(self) -> None:
        """Do nothing: the workers end with the last instance."""

    def _is_right(self, calls: Sequence[ToolCall], message: Message) -> bool:
        if self._task["category"] in NO_CALL:
            return not calls and has_text(message)
        if self._task["category"] in ANY_CALL:
            return any(not call.problem for call in calls)
        made = [(call.name, call.arguments) for call in calls]
        return not any(call.problem for call in calls) and calls_match(made, self._task["answers"], self._task["functions"])

    async def _calls(self, calls: Sequence[ToolCall]) -> ChatStep:
        if self._steps == self._max_steps:
            return graded_end(False, end=EpisodeEnd.TRUNCATED)
        self._steps += 1
        sound = [call for call in calls if not call.problem]
        self._turns[-1] += [[call.name, dict(call.arguments)] for call in sound]
        played = await self._played()
        if played is None:
            return graded_end(False)
        results = iter(cast("Sequence[str]", played["results"])[len(self._turns[-1]) - len(sound) :])
        return ChatStep(messages=[tool_reply(call, call.problem or next(results)) for call in calls])

    async def _end_of_turn(self, message: Message) -> ChatStep:
        played = await self._played()
        if played is None or not played["is_right"] or not has_text(message):
            return graded_end(False)
        if len(self._turns) == len(self._task["messages"]):
            return graded_end(True)
        self._turns.append([])
        self._steps = 0
        return ChatStep(messages=self._asked(), metrics={"bfcl.turns": float(len(self._turns) - 1)})

    async def _played(self) -> Mapping[str, JsonValue] | None:
        """Return what the worker says of the calls so far; None if they spend its limits."""
        task = self._task
        late = cast("Mapping[str, Sequence[Mapping[str, Any]]]", task["withheld"])
        shown = [each for turn, some in late.items() if int(turn) < len(self._turns) for each in some]
        methods: list[JsonValue] = [each["name"] for each in (*task["functions"], *shown)]
        # The ground truth may use what is withheld from the policy only in later turns, which are not played yet.
        told = {name: task[name] for name in ("classes", "initial_config", "long_context", "answers")}
        assert self._workers is not None
        reply = await self._workers.call({**told, "methods": methods}, cast("JsonValue", self._turns))
        return cast("Mapping[str, JsonValue] | None", reply.value if reply.limit is None else None)

    def _asked(self) -> list[Message]:
        """Return the user's messages of the current turn, with the functions that it adds."""
        number = len(self._turns) - 1
        messages = cast("list[Message]", [dict(each) for each in self._task["messages"][number]])
        if added := self._task.data.get("withheld", {}).get(str(number)):
            described = json.dumps([_offered(each)["function"] for each in added])
            messages[-1] = {"role": "user", "content": f"{described}\n{messages[-1]['content']}"}
        return messages


def _offered(function: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Return a function as the OpenAI wire declares it."""
    parameters = cast("JsonValue", _json_schema(function["parameters"]))
    described = {"name": function["name"], "description": function["description"], "parameters": parameters}
    return {"type": "function", "function": cast("JsonValue", described)}


def _json_schema(described: object) -> object:
    """Return a description of parameters with the names of types that JSON Schema has."""
    if isinstance(described, list):
        return [_json_schema(each) for each in cast("list[object]", described)]
    if not isinstance(described, Mapping):
        return described
    fields = cast("Mapping[str, object]", described)
    kind = fields.get("type")
    changed = {name: _json_schema(value) for name, value in fields.items() if name != "optional"}
    return changed | ({"type": _TYPES.get(kind, kind)} if isinstance(kind, str) else {})
