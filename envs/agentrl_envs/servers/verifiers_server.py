"""Serves an environment of the package verifiers, 0.1, by the protocol of `agentrl_envs.http`; needs nothing of agentrl.

    python verifiers_server.py my-environment --args '{"level": 2}' --port 8100

The environment runs its own rollout against a client that hands each model call to the next `/step`. A task names a row of
the dataset in `row`, and `split: eval` the other dataset. Prints its port.

Invariant: a reward is what the rubric returned. A rubric or an environment that raises is an HTTP 500, not a reward of 0.
"""

# ruff: noqa: ANN401 - types of verifiers, which is not installed here

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import sys
import traceback
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import anyio
import verifiers as vf
from aiohttp import web
from anyio.abc import TaskGroup
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ToolCall

_grading_errors: ContextVar[list[str]] = ContextVar("grading_errors")


class _GradingErrors(logging.Handler):
    """Remembers what verifiers only logs: a reward function that raised, whose reward it takes as 0."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            _grading_errors.get([]).append(record.getMessage())


class PolicyClient(Client):
    """The model of one rollout: every call waits for the policy's next message."""

    def __init__(self, rollout: RunningRollout) -> None:
        super().__init__(rollout)

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **others: Any) -> Response:
        """Return the policy's next message."""
        declared = [_wire_tool(tool) for tool in tools or ()]
        message = await self.client.ask([_wire_message(each) for each in prompt], declared)
        calls = [
            ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ]
        answered = ResponseMessage(
            content=message.get("content"),
            reasoning_content=message.get("reasoning_content"),
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return Response(id=uuid.uuid4().hex, created=0, model=model, message=answered)

    # The abstract methods of the base, which its own `get_response` calls; the one above replaces it, so none is reached.

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError

    async def to_native_tool(self, tool: Any) -> Any:
        raise NotImplementedError

    async def to_native_prompt(self, messages: Any) -> Any:
        raise NotImplementedError

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def raise_from_native_response(self, response: Any) -> None:
        raise NotImplementedError

    async def from_native_response(self, response: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        """Do nothing."""


class RunningRollout:
    """One rollout of the environment, which runs between the requests."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self._events, self._next_event = anyio.create_memory_object_stream[dict[str, Any]](1)
        self._answers, self._next_answer = anyio.create_memory_object_stream[Mapping[str, Any]](1)
        self._history: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] | None = None

    async def run(self, environment: Any, row: Any) -> None:
        """Run it and report how it ended."""
        errors: list[str] = []
        _grading_errors.set(errors)
        with self.scope:
            try:
                output = await environment.run_rollout(
                    row, PolicyClient(self), "policy", {}, state_columns=["stop_condition"]
                )
            except Exception as error:  # noqa: BLE001 - other people's code; the server continues with other episodes
                await self._events.send({"failure": f"{type(error).__name__}: {error}"})
                return
            failure = output.get("error") or "; ".join(errors)
            limited = output.get("is_truncated") or output.get("stop_condition") in ("max_turns_reached", "timeout_reached")
            result = {
                "messages": [],
                "reward": output["reward"],
                "metrics": {name: float(value) for name, value in (output.get("metrics") or {}).items()},
                "truncated": bool(limited),
                "terminated": not limited,
            }
            await self._events.send({"failure": str(failure)} if failure else result)

    async def ask(self, prompt: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Mapping[str, Any]:
        """Offer what is new in the prompt, and return the policy's message."""
        known = len(self._history)
        if prompt[:known] != self._history:
            raise vf.Error("the environment rewrote earlier messages, which this protocol cannot express")
        if self._tools not in (None, tools):
            raise vf.Error("the environment changed its tools in the middle of an episode")
        self._history, self._tools = prompt, tools
        await self._events.send({"messages": prompt[known:], "tools": tools})
        message = await self._next_answer.receive()
        self._history = [*prompt, _wire_answer(message)]
        return message

    async def answer(self, message: Mapping[str, Any]) -> None:
        """Give the policy's message to the environment."""
        await self._answers.send(message)

    async def next_event(self) -> dict[str, Any]:
        """Return the next messages for the policy, or how the rollout ended."""
        return await self._next_event.receive()


class RolloutServer:
    """The three routes, over one environment."""

    def __init__(self, environment: Any, tasks: TaskGroup) -> None:
        self._environment, self._tasks = environment, tasks
        self._rollouts: dict[str, RunningRollout] = {}

    async def reset(self, request: web.Request) -> web.Response:
        """Begin a rollout of a row."""
        body = await request.json()
        task, environment = body.get("task") or {}, self._environment
        rows = environment.get_eval_dataset() if task.get("split") == "eval" else environment.get_dataset()
        row = task.get("row", body.get("seed", 0) % len(rows))
        if not isinstance(row, int) or not 0 <= row < len(rows):
            return web.Response(status=400, text=f"row must be from 0 to {len(rows) - 1}, got {row!r}")
        rollout = RunningRollout()
        self._tasks.start_soon(rollout.run, environment, rows[row])
        event = await rollout.next_event()
        if "failure" in event or "reward" in event:
            return web.Response(status=500, text=str(event.get("failure", "the rollout ended before the first model call")))
        name = uuid.uuid4().hex
        self._rollouts[name] = rollout
        return web.json_response({"episode": name, **event})

    async def step(self, request: web.Request) -> web.Response:
        """Give an assistant message to a rollout."""
        body = await request.json()
        rollout = self._rollouts.get(body.get("episode"))
        if rollout is None:
            return web.Response(status=404, text=f"there is no episode {body.get('episode')!r}")
        await rollout.answer(body["message"])
        event = await rollout.next_event()
        if "failure" in event:
            return web.Response(status=500, text=event["failure"])
        event.pop("tools", None)
        return web.json_response(event)

    async def close(self, request: web.Request) -> web.Response:
        """End a rollout."""
        rollout = self._rollouts.pop((await request.json()).get("episode"), None)
        if rollout is not None:
            rollout.scope.cancel()
        return web.json_response({})


def _content(content: Any) -> Any:
    if isinstance(content, list):
        return [part if isinstance(part, dict) else part.model_dump(exclude_none=True) for part in content]
    return content or ""


def _wire_message(message: Any) -> dict[str, Any]:
    """Return a message of verifiers as the OpenAI wire writes it."""
    found: dict[str, Any] = {
        "role": "user" if message.role == "text" else message.role,
        "content": _content(message.content),
    }
    if message.role == "tool":
        found["tool_call_id"] = message.tool_call_id
    if message.role == "assistant" and message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return found


def _wire_answer(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy's message with the fields that `_wire_message` keeps."""
    found: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {name: call["function"][name] for name in ("name", "arguments")},
            }
            for call in message["tool_calls"]
        ]
    return found


def _wire_tool(tool: Any) -> dict[str, Any]:
    declared = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": declared}


async def serve_environment(environment: Any, port: int, *, with_parent: bool) -> None:
    """Serve on 127.0.0.1 until the process is ended, or its standard input if `with_parent`."""
    async with anyio.create_task_group() as tasks:
        server = RolloutServer(environment, tasks)
        app = web.Application(client_max_size=64 * 2**20)
        for route in (server.reset, server.step, server.close):
            app.router.add_post(f"/{route.__name__}", route)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        print(runner.addresses[0][1], flush=True)  # noqa: T201 - who started it reads the port
        if with_parent:
            await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
            await runner.cleanup()
            tasks.cancel_scope.cancel()
        await anyio.sleep_forever()


def main() -> None:
    """Load the environment that the command line names, and serve it."""
    parser = argparse.ArgumentParser(description="Serve a verifiers environment to agentrl.")
    parser.add_argument("environment", help="as for verifiers.load_environment")
    parser.add_argument("--args", default="{}", help="its arguments, a JSON object")
    parser.add_argument("--path", default=".", help="a folder to import it from")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--with-parent", action="store_true", help="end when the standard input is closed")
    options = parser.parse_args()
    sys.path.insert(0, options.path)
    try:
        environment = vf.load_environment(options.environment, **json.loads(options.args))
    except BaseException:  # noqa: BLE001 - other people's code
        traceback.print_exc()
        os._exit(1)  # threads that verifiers starts would keep the process alive
    if environment.requires_group_rollouts:
        sys.exit(f"{options.environment} grades groups of rollouts together, which cannot be served one by one")
    logging.getLogger("verifiers.rubrics").addHandler(_GradingErrors())
    anyio.run(functools.partial(serve_environment, environment, options.port, with_parent=options.with_parent))


if __name__ == "__main__":
    main()
