"""Episodes whose model answers from a list, as `agentrl_testing` offers them to tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias
from uuid import uuid4

import anyio

from agentrl.client import Client, EpisodeSettings, MessageLike, PolicyBackend
from agentrl.client.client import Answered
from agentrl.episode.tape import Recorder, read_cassette, using_tape, write_cassette
from agentrl.errors import ConfigError, RequestRejected
from agentrl.rollout.episode import run_client_episode
from agentrl.rollout.scripted_policy import UNLIMITED, ScriptedPolicy
from agentrl.servers.scripted.script import ScriptedCall
from agentrl.tokens.messages import plain_fields
from agentrl.types import Message, Task, Trajectory
from agentrl.workflow import as_workflow, load_workflow
from agentrl_testing.replays import compare_with_cassette, make_cassette

TIMEOUT_S: Final = 60.0
"""Seconds that a played episode has."""


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool call in a reply; `call` makes one."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        written = json.dumps({"name": self.name, "arguments": self.arguments})
        return f"<tool_call>\n{written}\n</tool_call>"


Reply: TypeAlias = "str | CalledTool | Sequence[str | CalledTool] | Callable[[Sequence[Message]], Reply]"
"""A reply of the model: a text, a tool call, several of them in one message, or a function of the messages it was sent."""


def call(name: str, /, **arguments: object) -> CalledTool:
    """Return a tool call as a reply of the model: `call("calc", a=6, op="*", b=7)`."""
    return CalledTool(name, arguments)


def play(
    workflow: object,
    task: Task | Mapping[str, Any],
    replies: Sequence[Reply] | Callable[[Sequence[Message]], Reply],
    *,
    workflow_args: dict[str, Any] | None = None,
    timeout: float = TIMEOUT_S,
    cassette: str | Path | None = None,
) -> Trajectory:
    """Return the trajectory of one episode whose model answers `replies`; a failed one has `failure` set.

    For tests that are not async; `play_async` is for those that are.

    Args:
        workflow: a RolloutWorkflow class or instance, or an `async def solve(task, client) -> float`.
        task: the task, or its fields.
        replies: one for each call of the model, in the order of the calls, or a function that answers every call. A call
            beyond the last reply is a failed episode.
        workflow_args: as in a run file.
        timeout: seconds that the episode has.
        cassette: a file to record the episode to, for `check_replay`; nothing is written if it failed.

    Raises:
        ConfigError: the workflow cannot be used, or not by its name, which a cassette needs.
        AssertionError: the episode did not fail, and replies are left over.

    Example:
        >>> async def solve(task, client):
        ...     completion = await client.chat.completions.create(messages=[{"role": "user", "content": task["question"]}])
        ...     return float(completion.choices[0].message.content == task["answer"])
        >>> play(solve, {"question": "6 * 7 = ?", "answer": "42"}, ["42"]).final_reward
        1.0
    """
    options = {"workflow_args": workflow_args, "timeout": timeout, "cassette": cassette}
    return anyio.run(partial(play_async, workflow, task, replies, **options))


async def play_async(
    workflow: object,
    task: Task | Mapping[str, Any],
    replies: Sequence[Reply] | Callable[[Sequence[Message]], Reply],
    *,
    workflow_args: dict[str, Any] | None = None,
    timeout: float = TIMEOUT_S,
    cassette: str | Path | None = None,
) -> Trajectory:
    """Do the same as `play`, in a running event loop."""
    if isinstance(replies, (str, CalledTool)):
        raise ConfigError(f"replies must be a list with one reply for each call of the model, got {replies!r:.80}; wrap it")
    flow = as_workflow(workflow, workflow_args)
    played_task = task if isinstance(task, Task) else Task(id=str(task.get("id", "test")), data=task)
    name = "" if cassette is None else _importable_name(workflow)
    policy = ScriptedPolicy(partial(_scripted_text, replies))
    settings = EpisodeSettings(episode_id=uuid4().hex, task_id=played_task.id)
    client = _PlayedClient(PolicyBackend(policy, policy.renderer, UNLIMITED, settings))
    tape = Recorder()
    async with flow.opened():
        with nullcontext() if cassette is None else using_tape(tape):
            trajectory = await run_client_episode(flow, played_task, client, timeout_s=timeout)
    if trajectory.failure is None and not callable(replies) and len(policy.calls) < len(replies):
        raise AssertionError(
            f"the workflow asked the model {len(policy.calls)} times, and there are {len(replies)} replies; remove those "
            "that are left over, or check why the episode ended early"
        )
    if cassette is not None and trajectory.failure is None:
        made = make_cassette(trajectory, tape, workflow=name, workflow_args=dict(workflow_args or {}))
        write_cassette(Path(cassette), made)
    return trajectory


def check_replay(
    cassette: str | Path, workflow: object = None, *, workflow_args: dict[str, Any] | None = None, live_tools: bool = False
) -> None:
    """Replay a cassette of `agentrl record`, as a test that is not async.

    `workflow` is as for `play`; without one, the workflow and the arguments are those of the cassette. `live_tools` runs the
    tools again instead of using their recorded replies.

    Raises:
        AssertionError: the episode is another one; the message names what differs.
        ConfigError: the file is no cassette, or the workflow cannot be used.
    """
    recorded = read_cassette(Path(cassette))
    if workflow is None:
        flow = load_workflow(recorded.workflow, recorded.workflow_args if workflow_args is None else workflow_args)
    else:
        flow = as_workflow(workflow, workflow_args)

    async def compare() -> list[str]:
        async with flow.opened():
            return await compare_with_cassette(flow, recorded, live_tools=live_tools)

    differences = anyio.run(compare)
    if differences:
        raise AssertionError(f"{cassette}: the episode is another one:\n" + "\n".join(differences))


def _importable_name(workflow: object) -> str:
    """Return `module:Name` of a workflow class or function, by which a cassette names it."""
    name: str | None = getattr(workflow, "__qualname__", None)
    if name is None:
        raise ConfigError(
            f"cassette: a cassette names its workflow, and {type(workflow).__qualname__} is given as an object; pass the "
            "class, and what it is made with as workflow_args"
        )
    if "<locals>" in name:
        raise ConfigError(f"cassette: {name} is made inside a function, so no replay can import it; move it to its module")
    return f"{getattr(workflow, '__module__', '')}:{name}"


_sent: ContextVar[Sequence[Message]] = ContextVar("agentrl_testing_messages", default=())


class _PlayedClient(Client):
    """A client that shows the script the messages of the call."""

    async def answer(self, messages: Iterable[MessageLike], stream: bool, arguments: Mapping[str, object]) -> Answered:
        given = list(messages)
        _sent.set(plain_fields(given))
        return await super().answer(given, stream, arguments)


def _scripted_text(replies: Sequence[Reply] | Callable[[Sequence[Message]], Reply], asked: ScriptedCall) -> str:
    if callable(replies):
        return _reply_text(replies)
    if asked.index >= len(replies):
        raise RequestRejected(f"there are {len(replies)} replies; the workflow asked for one more", status=400)
    return _reply_text(replies[asked.index])


def _reply_text(reply: Reply) -> str:
    if callable(reply):
        return _reply_text(reply(_sent.get()))
    if isinstance(reply, (str, CalledTool)):
        return str(reply)
    return "\n".join(str(part) for part in reply)
