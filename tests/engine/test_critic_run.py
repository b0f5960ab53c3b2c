"""A run with a critic, a reference or a scale: what reaches the advantages, the trainer and the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from agentrl.algo.batch_advantages import RunningSquare
from agentrl.algo.config import AlgorithmConfig
from agentrl.engine.engine import Engine
from agentrl.engine.parts import RunState
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.base import TrainBatch
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.weights.types import scripted_logprobs
from tests.engine.harness import episodes, lines, make_engine, run
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
        ({"terms": [{"kl": 0.1}]}, r"algorithm\.terms: kl needs a reference model; add algorithm\.reference: \{\}"),
        ({"reference": {}}, r"algorithm\.reference: nothing uses it; add the term kl"),
        (
            {"advantage": "reinforce_plus_plus", "normalize": "group"},
            r"algorithm\.normalize: reinforce_plus_plus normalizes over the batch itself",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_named(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig.model_validate(algorithm)


def test_a_critic_brings_its_loss_and_a_given_one_wins() -> None:
    brought = AlgorithmConfig.model_validate(turn_gae()).slots
    assert [term.slot.name for term in brought.terms] == ["value"]
    assert brought.dense
    given = AlgorithmConfig.model_validate({**turn_gae(), "terms": [{"value": {"weight": 2.0, "clip": None}}]}).slots
    assert [(term.slot.name, term.weight) for term in given.terms] == [("value", 2.0)]


async def test_turns_pay_for_their_distance_to_the_reference_and_records_keep_the_reward(
    tmp_path: Path, renderer: Renderer
) -> None:
    trainer = ScriptedTrainer()
    algorithm = {"advantage": "rloo", "reference": {"reward_weight": 0.25}}
    await run(make_engine(tmp_path, renderer, trainer=trainer, steps=1, algorithm=algorithm))

    [batch] = trainer.batches
    paid: dict[int, list[float]] = {}
    for item in batch.samples:
        mask = item.sample.loss_mask
        difference = item.sample.behavior_logprobs[mask] - scripted_logprobs(item.sample.token_ids, 0)[mask[1:]]
        assert item.episode_return in (0.0, 1.0), "losses and records see the reward of the workflow"
        paid.setdefault(item.group, []).append(item.episode_return - 0.25 * float(difference.sum(dtype=np.float64)))
    got: dict[int, list[float]] = {}
    for item in batch.samples:
        got.setdefault(item.group, []).append(float(item.advantages[item.sample.loss_mask][0]))
    for number, returns in paid.items():
        others = [(sum(returns) - own) / (len(returns) - 1) for own in returns]
        assert got[number] == pytest.approx([own - rest for own, rest in zip(returns, others, strict=True)], abs=1e-5)
    [line] = lines(tmp_path / "metrics.jsonl", "step")
    assert line["kl_reference"] > 0


async def test_a_resumed_run_scales_advantages_by_what_it_had_seen_bit_for_bit(tmp_path: Path, renderer: Renderer) -> None:
    algorithm = {"max_staleness": 0, "normalize": "running", "advantage": "max_rl"}

    def engine(trainer: ScriptedTrainer, name: str, **options: Any) -> Engine:  # noqa: ANN401 - options of `make_parts`
        return make_engine(tmp_path / name, renderer, trainer=trainer, algorithm=algorithm, **options)

    whole, first, second = ScriptedTrainer(), ScriptedTrainer(), ScriptedTrainer()
    await run(engine(whole, "whole"))
    await run(engine(first, "run", steps=2))
    state = RunState.from_note(first.notes[-1], where="here")
    assert state.advantages_seen.tokens > 0
    await run(engine(second, "run", resume=state))

    def trained(batches: list[TrainBatch]) -> list[list[bytes]]:
        return [sorted(item.advantages.tobytes() for item in batch.samples) for batch in batches]

    assert trained(first.batches + second.batches) == trained(whole.batches)
    other = ScriptedTrainer()
    seen = RunningSquare(state.advantages_seen.tokens, 4 * state.advantages_seen.squares)
    await run(engine(other, "other", resume=msgspec.structs.replace(state, advantages_seen=seen)))
    assert trained(other.batches) != trained(second.batches), "what was seen matters"
