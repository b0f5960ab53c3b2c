"""`agentrl envs`: the installed environments, and one of them played by a person in the terminal."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import anyio.to_thread
from cyclopts import App

from agentrl.commands.running import parse_json_object, parse_named_values, run_job
from agentrl.env import ChatStep, EnvironmentPool, load_environment
from agentrl.env.chat import ChatEpisode
from agentrl.env.registry import installed_environments
from agentrl.support.foreign import visible
from agentrl.types import Message, Task

_CALL = "/call "


envs_app = App(name="envs", help="List the installed environments, or play one.")


@envs_app.default
def list_environments() -> None:
    """List the installed environments, each with what it is and what it needs."""
    print(describe_environments())


@envs_app.command(name="play")
def play_command(name: str, /, *arguments: str, task: str = "{}", seed: int = 0) -> None:
    """Play one episode in the terminal: a line is an answer, `/call TOOL {...}` calls a tool, Ctrl-D leaves.

    Args:
        name: An installed environment, or module:Name.
        arguments: Arguments of the environment as name=value, such as id=FrozenLake-v1.
        task: Fields of the task, as JSON.
        seed: Seed of the environment.
    """
    run_job(
        partial(play_environment, name, parse_named_values(arguments), parse_json_object(task, "--task"), seed=seed),
        lambda: "A played episode leaves nothing behind.",
    )


def describe_environments() -> str:
    """Return a line for each installed environment: its name, what it is, and what has to be installed for it.

    `needs_packages` of the environment's class names the packages, and `extra` names what to install.
    """
    lines: list[str] = []
    installed = installed_environments()
    width = max((len(name) for name in installed), default=0)
    for name, entry in installed.items():
        try:
            target: object = entry.load()
        except (ImportError, AttributeError) as error:
            lines.append(f"{name:{width}}  cannot be loaded: {error}")
            continue
        needs = cast("Sequence[str]", getattr(target, "needs_packages", ()))
        missing = [package for package in needs if importlib.util.find_spec(package) is None]
        summary = (getattr(target, "__doc__", None) or "(no description)").strip().partition("\n")[0]
        extra = getattr(target, "extra", None)
        note = f" [pip install '{extra}']" if missing and extra else f" [needs {', '.join(missing)}]" if missing else ""
        lines.append(f"{name:{width}}  {summary}{note}")
    return "\n".join(lines) or "no environments are installed"


async def play_environment(
    spec: str,
    args: Mapping[str, Any],
    task: Mapping[str, Any],
    *,
    seed: int = 0,
    read: Callable[[], str] = sys.stdin.readline,
    write: Callable[[str], object] = print,
) -> float:
    """Play one episode and return the sum of its rewards: a line is a message, `/call NAME {...}` calls a tool.

    Raises:
        ConfigError: there is no such environment.
        EnvironmentFault: the environment broke.
    """
    pool = EnvironmentPool(load_environment(spec, args), name=spec, size=1)
    total = 0.0
    async with pool.episode(Task(id="played", data=task), seed=seed) as episode:
        _show_messages(episode.start.messages, episode.start.player, write)
        for tool in episode.start.tools:
            write(f"tool: {visible(json.dumps(tool['function']))}")
        number = 0
        while episode.end is None and (line := await anyio.to_thread.run_sync(read, abandon_on_cancel=True)):
            number += 1
            step = await _play_line(episode, line.strip(), number, write)
            total += step.reward or 0.0
        ending = episode.end or "left"
    write(f"{ending}; total reward {total:g}")
    return total


async def _play_line(episode: ChatEpisode, line: str, number: int, write: Callable[[str], object]) -> ChatStep:
    message: dict[str, Any] = {"role": "assistant", "content": line}
    if line.startswith(_CALL):
        name, _, arguments = line.removeprefix(_CALL).strip().partition(" ")
        function = {"name": name, "arguments": arguments.strip() or "{}"}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
    step = await episode.step(message)
    _show_messages(step.messages, step.player, write)
    if step.reward is not None:
        write(f"reward {step.reward:g}")
    for player, reward in step.player_rewards.items():
        write(f"reward of {visible(player)}: {reward:g}")
    return step


def _show_messages(messages: Sequence[Message], player: str, write: Callable[[str], object]) -> None:
    if player:
        write(f"{visible(player)} plays")
    for message in messages:
        content: object = message["content"]
        text = content if isinstance(content, str) else json.dumps(content)
        write(f"{message['role']}: {visible(text)}")
