"""Seeds of the model calls: the same for the same place in a run, whatever came before."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from agentrl.client import Client
from agentrl.client.arguments import MessageLike
from agentrl.servers.scripted.server import ScriptedCall
from agentrl.tokens.renderer import Renderer
from agentrl.types import Task
from tests.engine.harness import coin, make_engine, run
from tests.rollout.harness import ask, make_server, workflow_of


async def seeds_of(folder: Path, renderer: Renderer, concurrent: int) -> dict[tuple[str, int], int | None]:
    """Run three steps of episodes with two calls each; return the seed of each call."""
    seen: dict[tuple[str, int], int | None] = {}

    def script(call: ScriptedCall) -> str:
        seen[call.episode_id, call.turn] = call.sampling.seed
        return coin(call)

    async def twice(task: Task, client: Client) -> float:
        await ask(client, task["question"])
        return float(await ask(client, "again") == "good")

    server = make_server(renderer, script)
    rollout = {"max_concurrent_episodes": concurrent}
    engine = make_engine(
        folder,
        renderer,
        workflow=workflow_of(twice),
        inference=server,
        steps=3,
        rollout=rollout,
        algorithm={"max_staleness": 0},
    )
    await run(engine)
    return seen


async def test_every_call_has_its_own_seed_whatever_runs_beside_it(tmp_path: Path, renderer: Renderer) -> None:
    alone = await seeds_of(tmp_path / "alone", renderer, 1)
    together = await seeds_of(tmp_path / "together", renderer, 8)
    assert alone == together
    assert None not in alone.values()
    assert len(set(alone.values())) == len(alone) == 3 * 2 * 3 * 2


@pytest.mark.parametrize(("fixed", "warnings"), [(True, 1), (False, 0)])
async def test_a_seed_that_all_members_of_a_group_share_is_warned_about_once(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture, fixed: bool, warnings: int
) -> None:
    async def solve(task: Task, client: Client) -> float:
        messages: list[MessageLike] = [{"role": "user", "content": task["question"]}]
        completion = await client.chat.completions.create(messages=messages, seed=7 if fixed else None)
        return float(completion.choices[0].message.content == "good")

    with caplog.at_level(logging.WARNING):
        await run(make_engine(tmp_path, renderer, workflow=workflow_of(solve), steps=2))
    assert sum("sample with the same seed 7" in message for message in caplog.messages) == warnings
