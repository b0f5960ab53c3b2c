"""What a training step gets: masks, advantages, verification, counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from agentrl.algo.config import AlgorithmConfig
from agentrl.client import Client
from agentrl.engine.batch import VerifiedGroups, prepare_batch, trained_records
from agentrl.episode.codec import encode_line
from agentrl.episode.summary import TrainedEpisode, TrainedTurn
from agentrl.errors import InvariantError, StaleDataError
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_policy_episode
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.verify import trained_digests
from agentrl.trainer.base import StepReport
from agentrl.types import EpisodeFailure, Group, Task, Trajectory
from agentrl.workflow import RolloutWorkflow
from tests.engine.harness import coin, episodes, lines, make_engine, run
from tests.rollout.harness import SAMPLING, TASK, Judge, make_server, says
from tests.tokens.families import FAMILIES, write_family

GROUPWISE = AlgorithmConfig(group_size=2, groups_per_step=1, max_staleness=1)
MASKING = GROUPWISE.model_copy(update={"staleness_policy": "mask"})


async def sampled(renderer: Renderer, text: str, version: int, temperature: float = 1.0) -> Trajectory:
    return await run_policy_episode(
        Judge(),
        TASK,
        backend=make_server(renderer, says(text), version=version),
        renderer=renderer,
        rollout=RolloutConfig(),
        sampling=SAMPLING.model_copy(update={"temperature": temperature}),
    )


def group_of(*episodes: Trajectory) -> Group:
    return Group(index=4, task=TASK, episodes=episodes, admitted_version=0)


async def test_a_batch_has_advantages_on_the_sampled_tokens_alone(renderer: Renderer) -> None:
    group = group_of(await sampled(renderer, "good", 3), await sampled(renderer, "bad", 3))
    prepared = prepare_batch(VerifiedGroups.of([group]), version=3, algorithm=GROUPWISE)
    assert prepared.skip is None
    assert prepared.batch.policy_version == 3
    for item, sign in zip(prepared.batch.samples, (1, -1), strict=True):
        assert set(np.sign(item.advantages[item.sample.loss_mask])) == {sign}
        assert not item.advantages[~item.sample.loss_mask].any()
    assert prepared.metrics["loss_tokens"] == sum(e.num_output_tokens for e in group.episodes)
    assert prepared.metrics["success_rate"] == 0.5
    assert set(prepared.staleness.tolist()) == {0}


async def test_groups_without_variance_are_told_apart_by_their_outcome(renderer: Renderer) -> None:
    good, bad = await sampled(renderer, "good", 3), await sampled(renderer, "bad", 3)
    groups = [group_of(good, good), group_of(bad, bad), group_of(bad, bad), group_of(bad, good)]
    prepared = prepare_batch(VerifiedGroups.of(groups), version=3, algorithm=GROUPWISE)
    metrics = prepared.metrics
    assert prepared.advantages == ((0.0,),) * 6 + ((-0.5,), (0.5,))
    assert (metrics["zero_variance_groups"], metrics["groups"]) == (3, 4)
    assert metrics["zero_variance_groups_by_outcome.right"] == 1
    assert metrics["zero_variance_groups_by_outcome.wrong"] == 2


async def test_what_a_step_trained_is_recorded_by_turn(renderer: Renderer) -> None:
    good, greedy = await sampled(renderer, "good", 3), await sampled(renderer, "bad", 3, temperature=0)
    good, greedy = replace(good, episode_id="0.0.0"), replace(greedy, episode_id="0.1.0")
    prepared = prepare_batch(VerifiedGroups.of([group_of(good, greedy)]), version=3, algorithm=GROUPWISE)
    computed = np.arange(good.num_output_tokens, dtype=np.float32)
    report = StepReport(proximal_logprobs={0: computed})
    first, second = trained_records([group_of(good, greedy)], prepared, report, step=7)
    read = [msgspec.json.decode(encode_line(record), type=TrainedEpisode) for record in (first, second)]
    assert [(each.episode_id, each.step, each.policy_version) for each in read] == [("0.0.0", 7, 3), ("0.1.0", 7, 3)]
    sent = [each.turns[0].prompt_digest.hex() for each in (good, greedy)]
    trained = trained_digests(prepared.batch.samples[0].sample)[0]
    proximal: list[float | None] = [*computed.tolist()]
    assert read[0].turns == [TrainedTurn(advantage=0.5, proximal_logprobs=proximal, sent=sent[0], trained=trained)]
    assert read[1].turns == [TrainedTurn(advantage=None, proximal_logprobs=None, sent=sent[1])]


async def test_over_age_tokens_leave_the_loss_under_mask_and_stop_the_run_otherwise(renderer: Renderer) -> None:
    old, young = await sampled(renderer, "good", 1), await sampled(renderer, "bad", 4)
    prepared = prepare_batch(VerifiedGroups.of([group_of(old, young)]), version=4, algorithm=MASKING)
    assert prepared.masked_tokens == prepared.metrics["masked_tokens"] == old.num_output_tokens
    [item] = prepared.batch.samples
    assert item.sample.token_versions.max() == 4
    assert prepared.metrics["staleness_max"] == 0
    with pytest.raises(StaleDataError, match="would be trained at version 4, over max_staleness 1"):
        prepare_batch(VerifiedGroups.of([group_of(old, young)]), version=4, algorithm=GROUPWISE)


async def test_a_batch_without_variance_or_without_tokens_is_to_be_skipped(renderer: Renderer) -> None:
    same = group_of(await sampled(renderer, "good", 0), await sampled(renderer, "good", 0))
    assert prepare_batch(VerifiedGroups.of([same]), version=0, algorithm=GROUPWISE).skip == "zero_variance"
    too_old = group_of(await sampled(renderer, "good", 0), await sampled(renderer, "bad", 0))
    prepared = prepare_batch(VerifiedGroups.of([too_old]), version=9, algorithm=MASKING)
    assert (prepared.skip, prepared.batch.samples, "staleness_max" in prepared.metrics) == ("no_tokens", (), False)
    greedy = group_of(await sampled(renderer, "good", 0, 0.0), await sampled(renderer, "bad", 0, 0.0))
    assert prepare_batch(VerifiedGroups.of([greedy]), version=0, algorithm=GROUPWISE).skip == "no_tokens"


@pytest.mark.parametrize(
    "algorithm",
    [{"terms": [{"entropy": 0.1}]}, {"terms": [{"kl": 0.1}], "reference": {}}, {"terms": [{"log_ratio": 0.1}]}],
    ids=["entropy", "kl", "log_ratio"],
)
async def test_a_dense_term_trains_a_batch_without_variance(renderer: Renderer, algorithm: dict[str, Any]) -> None:
    same = group_of(await sampled(renderer, "good", 0), await sampled(renderer, "good", 0))
    dense = AlgorithmConfig.model_validate({"group_size": 2, **algorithm})
    prepared = prepare_batch(VerifiedGroups.of([same]), version=0, algorithm=dense)
    assert (prepared.skip, prepared.metrics["zero_variance_groups"], len(prepared.batch.samples)) == (None, 1, 2)


async def test_a_batch_is_trained_while_one_of_its_groups_has_variance(renderer: Renderer) -> None:
    same = group_of(await sampled(renderer, "good", 0), await sampled(renderer, "good", 0))
    mixed = replace(group_of(await sampled(renderer, "good", 0), await sampled(renderer, "bad", 0)), index=5)
    for groups in ([same, mixed], [mixed, same]):
        prepared = prepare_batch(VerifiedGroups.of(groups), version=0, algorithm=GROUPWISE)
        assert (prepared.skip, prepared.metrics["zero_variance_groups"]) == (None, 1)
        assert sum(item.advantages.any() for item in prepared.batch.samples) == 2
        assert len(prepared.batch.samples) == 4, "its tokens count in N"


async def test_a_trajectory_that_is_not_what_was_sent_stops_the_run(renderer: Renderer) -> None:
    good, bad = await sampled(renderer, "good", 0), await sampled(renderer, "bad", 0)
    [turn] = bad.turns
    forged = replace(bad, turns=(replace(turn, context_ids=turn.context_ids[1:]),))
    with pytest.raises(InvariantError, match="are not the request that was sent"):
        prepare_batch(VerifiedGroups.of([group_of(good, forged)]), version=0, algorithm=GROUPWISE)


async def test_a_failed_episode_never_reaches_the_trainer(renderer: Renderer) -> None:
    good = await sampled(renderer, "good", 0)
    failed = replace(good, final_reward=None, failure=EpisodeFailure(kind="E", message="m", traceback=""))
    with pytest.raises(InvariantError, match="failed episode"):
        prepare_batch(VerifiedGroups.of([group_of(good, failed)]), version=0, algorithm=GROUPWISE)


class Forgetful(RolloutWorkflow):
    """Asks a second question, and a third after changing what was said."""

    async def run(self, task: Task, client: Client) -> float:
        messages: list[Any] = [{"role": "user", "content": "first"}]
        for text in ("second", "third"):
            completion = await client.chat.completions.create(messages=messages, max_tokens=200)
            messages += [completion.choices[0].message, {"role": "user", "content": text}]
        messages[1] = {"role": "assistant", "content": "never said"}
        completion = await client.chat.completions.create(messages=messages, max_tokens=200)
        return float("good" in (completion.choices[0].message.content or ""))


async def test_forks_and_kept_reasoning_are_counted_in_the_runs_files(tmp_path: Path) -> None:
    renderer = Renderer.load(write_family(tmp_path / "model", FAMILIES["qwen3"]))
    server = make_server(renderer, lambda call: f"<think>\n{call.episode_id}?\n</think>\n\n{coin(call)}")
    await run(make_engine(tmp_path, renderer, inference=server, workflow=Forgetful(), steps=2))
    steps, records = lines(tmp_path / "metrics.jsonl", "step"), episodes(tmp_path)
    assert [(step["forks.history_edited"], step["kept_thinking_turns"]) for step in steps] == [(6, 6), (6, 6)]
    assert len(records) == 12
    for record in records:
        assert [turn["fork"] for turn in record["turns"]] == [None, None, "history_edited"]
        assert [turn["kept_thinking"] for turn in record["turns"]] == [False, True, False]
