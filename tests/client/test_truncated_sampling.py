"""Calls that sample from a part of the distribution say so in their turn, in metrics and in the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from agentrl.client import Client, SamplingConfig
from agentrl.config.run import RunConfig
from agentrl.engine.diagnostics import speaker_metrics
from agentrl.episode.codec import encode_line, pack_turn, stored_trajectory, trajectory_record, unpack_turn
from agentrl.episode.show import view_of
from agentrl.episode.summary import EndedEpisode
from agentrl.types import StopReason, Trajectory

HI = [{"role": "user", "content": "Hi"}]
Make = Callable[..., Client]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "recorded"),
    [
        ({}, None),
        ({"top_p": 0.9}, {"top_p": 0.9}),
        ({"top_p": 1.0, "extra_body": {"top_k": -1, "min_p": 0.0}}, None),
        ({"extra_body": {"top_k": 40, "min_p": 0.05}}, {"top_k": 40, "min_p": 0.05}),
        ({"top_p": 0.5, "temperature": 0.0}, None),
    ],
)
async def test_a_turn_names_what_truncated_its_distribution(
    make_client: Make, asked: dict[str, Any], recorded: dict[str, float] | None, stream: bool
) -> None:
    client = make_client()
    answer = await client.chat.completions.create(messages=HI, stream=stream, **asked)
    if stream:
        async for _ in answer:  # pyright: ignore[reportGeneralTypeIssues] - a stream
            pass
    assert client.episode.turns[0].truncated_by == recorded


async def test_the_default_of_the_run_and_calls_by_ids_are_recorded_too(make_client: Make) -> None:
    client = make_client(sampling=SamplingConfig(max_tokens=200, top_p=0.8))
    await client.chat.completions.create(messages=HI)
    await client.generate([1, 2], top_k=5)
    assert [turn.truncated_by for turn in client.episode.turns] == [{"top_p": 0.8}, {"top_p": 0.8, "top_k": 5}]


async def test_records_keep_it_metrics_count_it_and_older_records_lack_it(make_client: Make) -> None:
    client = make_client()
    await client.chat.completions.create(messages=HI, top_p=0.7)
    await client.chat.completions.create(messages=HI)
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    one, other = trajectory.turns
    assert speaker_metrics([trajectory])["truncated_sampling_tokens"] == len(one.output_ids)
    line = encode_line(trajectory_record(EndedEpisode(trajectory, "training", 0, 1, 1, 0.0)))
    assert [("truncated_by" in turn) for turn in msgspec.json.decode(line)["turns"]] == [True, False]
    stored: Trajectory = stored_trajectory(line)
    assert [turn.truncated_by for turn in stored.turns] == [{"top_p": 0.7}, None]
    assert [unpack_turn(pack_turn(turn)).truncated_by for turn in (one, other)] == [{"top_p": 0.7}, None]
    assert "truncated by top_p 0.7" in str(view_of(trajectory))


@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_the_plan_says_so_where_the_run_file_sets_it(top_p: float) -> None:
    from agentrl.plan.text import sampling_line

    config = RunConfig.model_construct(sampling=SamplingConfig(top_p=top_p), workflow="agent:Agent")
    assert ("truncated" in sampling_line(config)) == (top_p < 1)
