"""An episode of a chat environment on a tape: what is recorded of it, and the environment that plays it.

Invariant: a played episode gives the start and the steps that were recorded, to the same answers of the policy; no
environment is made for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from pydantic import BaseModel

from agentrl.cassette.tape import Player, Recorder, recording
from agentrl.env.chat import ChatEnvironment, ChatStart, ChatStep, EpisodeEnd
from agentrl.types import Message, Task


def recorded_environment(environment: ChatEnvironment, name: str) -> ChatEnvironment:
    """Return the environment, or one that records it as `name` where the episode has a tape that records."""
    tape = recording()
    return environment if tape is None else _RecordedEnvironment(environment, name, tape)


class _RecordedEnvironment:
    def __init__(self, environment: ChatEnvironment, name: str, tape: Recorder) -> None:
        self._environment, self._name, self._tape = environment, name, tape

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        start = await self._environment.reset(task, seed=seed)
        self._tape.add("environment", f"{self._name}.reset", _beginning(task, seed), _recorded_fields(start))
        return start

    async def step(self, message: Message) -> ChatStep:
        where, question = f"{self._name}.step", _answered(message)
        try:
            step = await self._environment.step(message)
        except Exception as error:
            self._tape.add("environment", where, question, fault=f"{where} raised {type(error).__name__}: {error}")
            raise
        self._tape.add("environment", where, question, _recorded_fields(step))
        return step

    async def close(self) -> None:
        await self._environment.close()


class TapedEnvironment:
    """A chat environment that gives what was recorded."""

    def __init__(self, tape: Player, name: str) -> None:
        """Play the environment `name` of `tape`."""
        self._tape = tape
        self._name = name

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        """Return the recorded start."""
        return ChatStart(**self._take("reset", _beginning(task, seed)))

    async def step(self, message: Message) -> ChatStep:
        """Return the recorded step."""
        recorded = self._take("step", _answered(message))
        end = recorded.pop("end")
        return ChatStep(**recorded, end=None if end is None else EpisodeEnd(end))

    async def close(self) -> None:
        """Do nothing."""

    def _take(self, what: str, question: object) -> dict[str, Any]:
        return dict(cast("Mapping[str, Any]", self._tape.take("environment", f"{self._name}.{what}", question)))


def _beginning(task: Task, seed: int) -> object:
    return {"task": task.id, "seed": seed}


def _recorded_fields(answer: ChatStart | ChatStep) -> dict[str, Any]:
    return {field.name: getattr(answer, field.name) for field in fields(answer)}


def _answered(message: object) -> object:
    """Return the parts of an assistant message that an environment can act on."""
    plain = message.model_dump() if isinstance(message, BaseModel) else cast("Message", message)
    calls: list[dict[str, Any]] = []
    for call in plain.get("tool_calls") or ():
        function = (call.model_dump() if isinstance(call, BaseModel) else call)["function"]
        calls.append({"name": function["name"], "arguments": function["arguments"]})
    return {"content": plain.get("content") or "", "tool_calls": calls}
