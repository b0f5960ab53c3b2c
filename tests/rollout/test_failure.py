"""A failed episode's traceback begins with the place in the user's code, and leaves the frames of agentrl out."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from agentrl import Task, run_episode
from agentrl.errors import InvariantError, WorkflowError
from agentrl.rollout.failure import user_trace

SOURCE = """\
import json


async def helper(task):
    return task["no_such_field"]


async def fails_in_a_helper(task, client):
    await client.chat.completions.create(messages=[{"role": "user", "content": "hello"}])
    return await helper(task)


async def fails_in_a_library(task, client):
    return json.loads("{")


async def fails_in_the_client(task, client):
    await client.chat.completions.create(messages=[], nonsense=1)


async def fails_and_says_why(task, client):
    try:
        return await helper(task)
    except KeyError as error:
        raise ValueError("no field") from error
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The agents above as a file of the user's."""
    path = tmp_path_factory.mktemp("agents") / "agent.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("agent", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("fails_in_a_helper", "agent.py:5 in helper: KeyError: "),
        ("fails_in_a_library", "agent.py:14 in fails_in_a_library: json.decoder.JSONDecodeError: Expecting"),
        ("fails_in_the_client", "agent.py:18 in fails_in_the_client: TypeError: "),
        ("fails_and_says_why", "agent.py:25 in fails_and_says_why: ValueError: no field"),
    ],
)
async def test_the_user_s_line_comes_first_and_agentrl_s_frames_are_left_out(
    agent: ModuleType, name: str, first: str
) -> None:
    task = Task(id="1", data={})
    failure = (await run_episode(getattr(agent, name), task, replies=["hello"])).failure
    assert failure is not None
    assert failure.traceback.startswith(first)
    assert "agentrl/rollout" not in failure.traceback
    assert "agentrl/client" not in failure.traceback
    assert ("direct cause" in failure.traceback) == (name == "fails_and_says_why")


def test_an_error_of_agentrl_alone_keeps_its_frames() -> None:
    error = InvariantError("digest mismatch")
    assert user_trace(error) == "agentrl.errors.InvariantError: digest mismatch\n"


def test_a_chain_of_causes_longer_than_python_s_stack_is_described() -> None:
    error: Exception = ValueError("the first")
    for number in range(sys.getrecursionlimit() * 2):
        error, cause = WorkflowError(f"number {number}"), error
        error.__cause__ = cause
    assert user_trace(error).endswith(f"number {sys.getrecursionlimit() * 2 - 1}\n")
