"""A run with a critic: its values reach the advantages, and the targets the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.algo.config import AlgorithmConfig
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.weights.types import scripted_logprobs
from tests.engine.harness import episodes, make_engine, run
from tests.rollout.harness import make_server, says


def turn_gae(**options: object) -> dict[str, Any]:
    return {"advantage": {"turn_gae": {"trace": 1.0, **options}}, "critic": {}}


@pytest.mark.parametrize("name", ["turn_gae", "token_gae"])
async def test_a_run_credits_tokens_with_what_the_critic_did_not_expect(
    tmp_path: Path, renderer: Renderer, name: str
) -> None:
    trainer = ScriptedTrainer()
    algorithm = {"advantage": {name: {"trace": 1.0}}, "critic": {}}
    await run(make_engine(tmp_path, renderer, trainer=trainer, steps=2, algorithm=algorithm))

    returns = {record["episode_id"]: record["final_reward"] for record in episodes(tmp_path)}
    assert len(trainer.batches) == 2
    assert set(returns.values()) == {0.0, 1.0}
    for number, batch in enumerate(trainer.batches):
        for item in batch.samples:
            mask = item.sample.loss_mask
            expected = np.exp(scripted_logprobs(item.sample.token_ids, number))[mask[1:]]
            assert item.values is not None
            assert item.value_targets is not None
            np.testing.assert_allclose(item.values[mask], expected, rtol=1e-6)
            before = expected[:1] if name == "turn_gae" else expected  # the turn's first token stands for it
            np.testing.assert_allclose(item.advantages[mask], np.broadcast_to(item.episode_return - before, expected.shape))
            assert not item.advantages[~mask].any()
            assert item.value_targets[mask] == pytest.approx(item.episode_return)


async def test_equal_returns_train_a_run_with_a_critic(tmp_path: Path, renderer: Renderer) -> None:
    trainer = ScriptedTrainer()
    server = make_server(renderer, says("good"))
    report = await run(make_engine(tmp_path, renderer, trainer=trainer, steps=2, algorithm=turn_gae(), inference=server))
    assert report.skipped_steps == {}


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"advantage": "turn_gae"}, r"algorithm\.advantage: turn_gae needs a critic; add algorithm\.critic: \{\}"),
        ({"critic": {}}, r"algorithm\.critic: the advantage episode uses no values; set algorithm\.advantage to turn_gae"),
        ({"terms": [{"value": 1.0}]}, r"algorithm\.terms: value needs a critic"),
        ({"advantage": "turn_gae", "critic": {"model": "tiny"}}, r"critic\.model"),
    ],
)
def test_slots_that_contradict_the_critic_are_named(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig.model_validate(algorithm)


def test_a_critic_brings_its_loss_and_a_given_one_wins() -> None:
    brought = AlgorithmConfig.model_validate(turn_gae()).slots
    assert [term.slot.name for term in brought.terms] == ["value"]
    assert brought.dense
    given = AlgorithmConfig.model_validate({**turn_gae(), "terms": [{"value": {"weight": 2.0, "clip": None}}]}).slots
    assert [(term.slot.name, term.weight) for term in given.terms] == [("value", 2.0)]
