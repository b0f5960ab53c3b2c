"""`agentrl replay`: recorded episodes again, offline, with the workflow as it is now.

Invariant: no model is asked, and neither an environment nor a tool that carries no state runs, if the tape has it. A replay
is equal to its record byte by byte, or each difference is named.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.client.tools.functions import read_question
from agentrl.commands.running import parse_json_object, run_job
from agentrl.episode.tape import TapedAnswer, read_cassette
from agentrl.errors import ConfigError
from agentrl.support.foreign import one_line
from agentrl.types import Trajectory
from agentrl.workflow import load_workflow
from agentrl_testing.replays import compare_with_cassette


def replay_command(
    *cassettes: Path, workflow: str | None = None, workflow_args: str | None = None, live_tools: bool = False
) -> None:
    """Run recorded episodes again without a model, and compare them with their records, byte by byte.

    The exit status is 1 if an episode is different.

    Args:
        cassettes: Files that `agentrl record` wrote, or directories of them.
        workflow: Workflow to run, as module:Name; the default is the one of each cassette.
        workflow_args: Its arguments, as JSON; the default is those of the cassette.
        live_tools: Run the tools again instead of using their recorded replies.
    """
    args = None if workflow_args is None else parse_json_object(workflow_args, "--workflow-args")

    async def replay() -> None:
        if not await replay_cassettes(cassettes, workflow=workflow, workflow_args=args, live_tools=live_tools):
            sys.exit(1)

    run_job(replay, lambda: "A replay leaves nothing behind.")


async def replay_cassettes(
    paths: Sequence[Path],
    *,
    workflow: str | None = None,
    workflow_args: Mapping[str, Any] | None = None,
    live_tools: bool = False,
) -> bool:
    """Replay cassettes, print a line for each, and return whether all are equal to their records.

    Raises:
        ConfigError: there is no cassette, one cannot be read, or the workflow cannot be used.

    Cancellation: ends the episode that runs.
    """
    all_equal = True
    for path in _files(paths):
        cassette = read_cassette(path)
        own = workflow is None or workflow == cassette.workflow
        args = cassette.workflow_args if own and workflow_args is None else workflow_args
        flow = load_workflow(workflow or cassette.workflow, args)
        async with flow.opened():
            differences = await compare_with_cassette(flow, cassette, live_tools=live_tools)
        print(f"{one_line(str(path))}: {'equal' if not differences else 'different'}")
        for line in differences:
            print(f"  {one_line(line)}")
        all_equal = all_equal and not differences
    return all_equal


def stored_tool_answers(trajectory: Trajectory) -> list[TapedAnswer]:
    """Return what tools answered in an episode, as far as a later call of the model holds it."""
    asked: dict[str, Mapping[str, Any]] = {}
    answers: list[TapedAnswer] = []
    for turn in trajectory.turns:
        for message in turn.messages:
            call = asked.pop(str(message.get("tool_call_id")), None) if message.get("role") == "tool" else None
            if call is not None:
                question = read_question(call.get("arguments"))
                answers.append(
                    TapedAnswer(kind="tool", name=str(call.get("name")), request=question, result=message.get("content"))
                )
        for call in turn.message.get("tool_calls") or ():
            asked[str(call["id"])] = call["function"]
    return answers


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        cassettes = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not cassettes:
            raise ConfigError(f"{path} holds no cassettes, which are files that end in .json; `agentrl record` writes them")
        files += cassettes
    if not files:
        raise ConfigError("replay: name at least one cassette or a directory of cassettes")
    return files
