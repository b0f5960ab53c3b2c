"""An online run from request to training step: conversations, feedback, and what is left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agentrl.servers.scripted.script import ScriptedCall
from agentrl.tokens.renderer import Renderer
from tests.engine.harness import balance, episodes, lines
from tests.online.harness import online_run
from tests.support.doors import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Doors and their clients need asyncio."""
    return "asyncio"


async def test_two_conversations_with_feedback_become_a_training_step(tmp_path: Path, renderer: Renderer) -> None:
    def script(call: ScriptedCall) -> str:
        return "good" if call.index % 2 else "bad"

    run_dir = tmp_path / "run"
    async with online_run(run_dir, renderer, script=script) as run:
        first, first_id = await run.chat("Hello.")
        again, same_id = await run.chat("Hello.", "bad", "And now?")
        assert same_id == first_id, "the history says which conversation it is"
        other, other_id = await run.chat("Hi.", key="app")
        assert other_id != first_id
        assert await run.feedback(0.25, response_id=first["id"]) == (
            200,
            {"object": "feedback", "accepted": True, "conversation_id": first_id},
        )
        assert (await run.feedback(1.0, conversation_id=first_id))[0] == 200
        assert (await run.feedback(0.0, conversation_id=other_id, key="app"))[0] == 200
        await until(lambda: run.trainer.batches)
        assert again["id"] != other["id"]
    [batch] = run.trainer.batches
    advantages = sorted({float(value) for each in batch.samples for value in each.advantages[each.sample.loss_mask]})
    # Returns 1.25 and 0 are compared with each other: half of their difference each way.
    assert np.allclose(advantages, [-0.625, 0.625])
    found = {each["episode_id"]: each for each in episodes(run_dir)}
    assert found[first_id]["final_reward"] == 1.0
    assert [turn["reward"] for turn in found[first_id]["turns"]] == [0.25, None]
    assert found[first_id]["turns"][1]["parent"] == 0, "the second turn continues the sampled ids of the first"
    assert len(lines(run_dir / "metrics.jsonl", "step")) == 1
    assert run.report is not None
    assert balance(run.report) == 0
    assert list((run_dir / "online").glob("*.jsonl")) != []
