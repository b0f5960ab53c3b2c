"""Real coding CLIs start a sub-agent: its turns have a role and a branch of their own, by marks that the CLIs send."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import anyio
import pytest

from agentrl.client import Client, DoorSettings, EpisodeSettings, PolicyBackend, SideCalls
from agentrl.rollout.scripted_policy import UNLIMITED, plain_tokenizer
from agentrl.servers.scripted.script import ScriptedCall
from agentrl.servers.scripted.server import ScriptedServer
from agentrl.tokens.verify import verify
from agentrl.types import StopReason
from tests.clients.catalog import CLIENTS, TASK, tool_call
from tests.clients.harness import DEADLINE_S, run_program
from tests.support.scripted import pool_of

SUBTASK: Final = "Say what one and one are."
STARTS: Final[Mapping[str, str]] = {
    "Claude Code": tool_call(
        "Agent", json.dumps({"description": "add", "prompt": SUBTASK, "subagent_type": "general-purpose"})
    ),
    "opencode": tool_call("task", json.dumps({"description": "add", "prompt": SUBTASK, "subagent_type": "general"})),
    "Codex": tool_call("multi_agent_v1__spawn_agent", json.dumps({"message": SUBTASK})),
}
"""The call that starts a sub-agent."""
TITLES: Final[Mapping[str, Sequence[str]]] = {"Claude Code": ["title"], "opencode": ["title"], "Codex": []}
_AGENT_ID: Final = re.compile(r"agent_id\W+([0-9a-f-]{36})")
pytestmark = [pytest.mark.clients]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def reply(client: str, prompt: str) -> str:
    """Return what the model says: the main agent starts another one, and waits for it where it has to."""
    if "title generator" in prompt or "sentence-case title" in prompt:
        return '{"title": "Greetings"}'
    if TASK not in prompt:
        return "Two."
    results = prompt.count("<tool_response>")
    if not results:
        return STARTS[client]
    if client == "Codex" and results == 1 and (found := _AGENT_ID.search(prompt)):
        return tool_call("multi_agent_v1__wait_agent", json.dumps({"targets": [found[1]], "timeout_ms": 60000}))
    return "It says two."


@pytest.mark.parametrize("name", STARTS)
async def test_the_turns_of_a_sub_agent_and_of_a_title_are_told_from_the_main_agents(name: str, tmp_path: Path) -> None:
    program = next(each for each in CLIENTS if each.client == name)
    program.check_installed()
    wanted = {key: value for key, value in program.environment.items() if "NONESSENTIAL" not in key}
    command = tuple(word for word in program.command if word not in ("--title", "fixed"))
    program = replace(program, environment=wanted, command=command)
    plain = plain_tokenizer()

    def script(call: ScriptedCall) -> str:
        return reply(name, plain.renderer.decode(call.input_ids.tolist(), skip_special=False))

    server = ScriptedServer(
        script, vocab_size=plain.renderer.vocab_size, encode=plain.encode_output, eos_id=min(plain.renderer.eos_ids)
    )
    rules = DoorSettings(branches=("subagent",), side_calls=SideCalls(roles=("title",)))
    with anyio.fail_after(DEADLINE_S):
        async with pool_of(server, request_timeout_s=DEADLINE_S) as pool:
            sampling = UNLIMITED.model_copy(update={"unsupported": "prompt"})
            settings = EpisodeSettings(episode_id="e", task_id="t")
            client = Client(PolicyBackend(pool, plain.renderer, sampling, settings))
            async with client.served(rules) as door:
                status, output = await run_program(program, door, tmp_path)
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    shown = "\n".join([*(f"{turn.role} {turn.branch} {turn.parent} {turn.message}" for turn in trajectory.turns), output])
    verify(trajectory)
    assert status == 0, shown
    assert "It says two." in output, shown
    titles = [turn for turn in trajectory.turns if turn.role == "title"]
    [sub] = [turn for turn in trajectory.turns if turn.role == "subagent"]
    assert ["title" for turn in titles if turn.left_out] == TITLES[name], shown
    assert (sub.branch, sub.message["content"]) == ((0,), "Two."), shown
    own = [at for at, turn in enumerate(trajectory.turns) if not turn.role]
    assert [trajectory.turns[at].parent for at in own] == [None, *own[:-1]], shown
    assert {turn.branch for turn in trajectory.turns if not turn.role} == {()}, shown
    assert len({turn.client for turn in trajectory.turns}) == 1, shown
    assert program.package.split()[-1].split("/")[-1].split("-")[0] in sub.client, shown
