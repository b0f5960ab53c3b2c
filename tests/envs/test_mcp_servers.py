"""MCP servers in real processes: over HTTP, as an environment, and what goes wrong in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.env import EnvironmentPool, EpisodeEnd
from agentrl.errors import EnvironmentFault
from agentrl.types import Task
from agentrl_envs.mcp import McpEnvironment, McpServer
from agentrl_workflows.environment import PlayEnvironment
from tests.rollout.harness import episode, make_renderer, says
from tests.support.mcp_calls import COMMAND, SCRIPT, call, content, web_server

pytestmark = pytest.mark.external
TASK = Task(id="t0", data={"question": "What does a pear cost?", "answer": "3"})


@pytest.fixture
def anyio_backend() -> str:
    """A server takes a second to start; tests/envs/test_mcp.py runs under trio as well."""
    return "asyncio"


@pytest.fixture
def web_url() -> Iterator[str]:
    with web_server() as url:
        yield url


def test_a_server_starts_where_standard_error_is_no_file_as_in_a_notebook() -> None:
    notebook = f"""
import io, sys
sys.stderr = io.StringIO()
import anyio
from agentrl_envs.mcp import McpServer
async def main():
    async with McpServer({COMMAND!r}) as server:
        print(sorted(server.tools)[0])
anyio.run(main)
"""
    done = subprocess.run([sys.executable, "-c", notebook], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip() != "") == (0, True)


async def test_a_server_over_http_is_used_in_the_same_way(web_url: str) -> None:
    async with McpServer(web_url, headers={"authorization": "Bearer x"}, call_s=120.0) as server:
        assert await content(server, "price", item="pear") == "3"
        assert await server.read_resource("shop://rules") == "One pear each."
        assert (await content(server, "shout", size=10_000_000)).endswith("[cut; the result has 10000000 characters]")
    # Its end comes before its answer begins, or cuts it off.
    with pytest.raises(EnvironmentFault, match=r"Server disconnected|peer closed connection|ReadError"):
        async with McpServer(web_url) as server:
            await content(server, "die")
    with pytest.raises(EnvironmentFault, match="start raised ConnectError"):
        async with McpServer(web_url):
            pass


async def test_a_server_over_http_that_dies_in_a_step_is_a_fault(web_url: str) -> None:
    pool = EnvironmentPool(lambda: McpEnvironment(web_url, call_s=120.0), name="mcp")
    with pytest.raises(EnvironmentFault):
        async with pool.episode(TASK, seed=1) as running:
            await running.step(assistant(call("die")))


async def test_a_server_that_dies_in_a_call_is_a_fault_and_so_is_every_call_after_it() -> None:
    async with McpServer(COMMAND) as server:
        with pytest.raises(EnvironmentFault, match=r"tool die raised MCPError: Connection closed"):
            await content(server, "die")
        with pytest.raises(EnvironmentFault, match=r"tool price raised MCPError: Connection closed"):
            await content(server, "price", item="pear")


@pytest.mark.parametrize("name", ["hang", "block"])
async def test_a_call_that_is_late_is_a_fault_and_the_server_is_ended(name: str) -> None:
    async with McpServer(COMMAND, call_s=0.2) as server:
        with pytest.raises(EnvironmentFault, match=f"tool {name}: no answer within 0.2 s"):
            await content(server, name)


async def test_an_error_in_the_block_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with McpServer(COMMAND):
            raise KeyError("mine")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([sys.executable, "-c", "import sys; sys.exit('no license')"], "start"),
        ([sys.executable, "-c", "print('hello', flush=True)"], "start"),
        ([sys.executable, "-c", "import time; time.sleep(3600)"], "no answer within 0.5 s"),
    ],
)
async def test_a_server_that_does_not_start_is_a_fault(command: list[str], says: str) -> None:
    with pytest.raises(EnvironmentFault, match=says):
        async with McpServer(command, connect_s=0.5 if "sleep" in command[-1] else 120.0):
            pass


async def test_other_text_on_the_output_of_a_server_does_no_harm() -> None:
    async with McpServer(COMMAND) as server:
        assert await content(server, "scribble") == "ok"


async def test_a_server_that_lists_5000_tools_is_a_fault_unless_some_are_chosen() -> None:
    command = [*COMMAND, "grown", "5000"]
    with pytest.raises(EnvironmentFault, match="more than max_tools=128; name those to offer in `only`"):
        async with McpServer(command, connect_s=300):  # they take a while to list
            pass
    async with McpServer(command, only=["tool_4321"], connect_s=300) as server:
        assert await content(server, "tool_4321", item="pear") == "3"
    with pytest.raises(EnvironmentFault, match="has no tool tool_5000, which `only` names"):
        async with McpServer(command, only=["tool_5000"], connect_s=300):
            pass


async def test_a_tool_that_the_server_removed_is_an_error_for_the_model_and_gone_after_a_refresh() -> None:
    async with McpServer(COMMAND) as server:
        assert await content(server, "drop", name="buy") == "dropped"
        assert "buy" in server.tools
        assert (await content(server, "buy", item="pear")).startswith("Error: ")
        await server.refresh()
        assert "buy" not in server.tools
        assert (await content(server, "buy", item="pear")).startswith("Error: there is no tool 'buy'")
        assert await content(server, "grow", count=200) == "grown"
        with pytest.raises(EnvironmentFault, match="more than max_tools=128"):
            await server.refresh()


async def test_a_resource_that_is_missing_or_no_text_is_a_fault() -> None:
    async with McpServer(COMMAND) as server:
        for uri in ("shop://nothing", "shop://logo"):
            with pytest.raises(EnvironmentFault, match=uri):
                await server.read_resource(uri)


def assistant(*calls: dict[str, Any], text: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


@asynccontextmanager
async def make_pool(**arguments: Any) -> AsyncGenerator[EnvironmentPool]:  # noqa: ANN401 - those of McpEnvironment
    async with EnvironmentPool(lambda: McpEnvironment(COMMAND, **arguments), name="mcp", size=2) as pool:
        yield pool


async def test_the_tools_of_a_server_are_an_environment() -> None:
    arguments: dict[str, Any] = {"instructions": "You shop.", "resources": ["shop://rules"], "reset_tool": "restock"}
    async with make_pool(max_calls=3, **arguments) as pool:
        for _ in range(2):
            async with pool.episode(TASK, seed=1) as running:
                assert running.start.messages == [
                    {"role": "system", "content": "You shop."},
                    {"role": "user", "content": "One pear each.\n\nWhat does a pear cost?"},
                ]
                names = [function["name"] for each in running.start.tools if isinstance(function := each["function"], dict)]
                assert names[:2] == ["price", "buy"]
                assert "restock" not in names
                step = await running.step(
                    assistant(call("buy", item="pear"), call("restock", seed=1), call("price", item="pear"), call("hang"))
                )
                texts = [message["content"] for message in step.messages]
                assert texts == [
                    "bought",
                    "Error: there is no tool 'restock'",
                    "3",
                    "Error: not run; a message may have 3 calls",
                ]
                step = await running.step(assistant(text="It costs 3."))
                assert (step.reward, running.end) == (1.0, EpisodeEnd.TERMINATED)
        assert (pool.num_started, pool.num_faults) == (1, 0)


async def test_a_pool_replaces_a_server_that_died_and_ends_those_it_started() -> None:
    async with make_pool() as pool:
        with pytest.raises(EnvironmentFault, match="Connection closed"):
            async with pool.episode(TASK, seed=1) as running:
                await running.step(assistant(call("die")))
        async with pool.episode(TASK, seed=1) as running:
            step = await running.step(assistant(call("price", item="pear")))
            assert step.messages[0]["content"] == "3"
        assert (pool.num_started, pool.num_faults) == (2, 1)


async def never_graded(answer: str, task: Task) -> float:
    raise OSError("the grader is gone")


async def test_a_grade_that_fails_is_a_fault_and_no_reward() -> None:
    async with make_pool(grade=f"{__name__}:never_graded") as pool:
        with pytest.raises(EnvironmentFault, match="the grader is gone"):
            async with pool.episode(TASK, seed=1) as running:
                await running.step(assistant(text="3"))


async def test_an_episode_with_a_server_ends_its_process_when_it_is_cancelled(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    noted = f"import os, pathlib, runpy; pathlib.Path({str(note)!r}).write_text(str(os.getpid()))"
    program = f"{noted}; runpy.run_path({SCRIPT!r}, run_name='__main__')"
    with anyio.CancelScope() as scope:
        async with McpServer([sys.executable, "-c", program]) as server, anyio.create_task_group() as tasks:
            tasks.start_soon(server.reply, call("hang"))
            await anyio.lowlevel.checkpoint()
            scope.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), signal.SIGCONT)


async def test_a_workflow_plays_it(tmp_path: Path) -> None:
    workflow = PlayEnvironment("agentrl_envs.mcp:McpEnvironment", {"server": COMMAND, "only": ["price"]})
    trajectory = await episode(workflow, make_renderer(tmp_path), script=says("3"), task=TASK)
    assert trajectory.failure is None
    assert [turn.reward for turn in trajectory.turns] == [1.0]
