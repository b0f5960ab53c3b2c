"""The real pandas and polars get one row for each episode, failed ones included."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from agentrl.observe.episode_record import EpisodeSummary
from agentrl.runs.table import EpisodeTable

pytestmark = pytest.mark.external


def summary(number: int, **changes: object) -> EpisodeSummary:
    first = EpisodeSummary(
        episode_id=str(number),
        task_id="t",
        purpose="training",
        group=number // 8,
        step=1,
        policy_version=1,
        started_s=0.0,
        ended_s=1.0,
        episode_return=float(number),
        final_reward=float(number),
        success=True,
        turns=1,
        output_tokens=5,
        context_tokens=5,
        branches=1,
        forks={"history_edited": 2},
        stop_reason="completed",
        failure=None,
        players=["left"],
        min_version=1,
        max_version=1,
        file="step-000001",
        line=number + 1,
    )
    return msgspec.structs.replace(first, **changes)


@pytest.fixture
def table() -> EpisodeTable:
    failed = summary(1, episode_return=None, final_reward=None, success=None, failure="WorkflowError", group=None)
    return EpisodeTable([summary(0), failed, summary(2)])


def test_pandas_computes_with_the_table(table: EpisodeTable) -> None:
    frame: Any = table.to_pandas()
    assert len(frame) == 3
    assert frame["episode_return"].mean() == 1.0  # of 0 and 2: the failed episode has none
    assert math.isnan(frame["episode_return"][1])
    assert frame["failure"].tolist()[1] == "WorkflowError"
    assert frame["forks"][0] == {"history_edited": 2}


def test_polars_computes_with_the_table(table: EpisodeTable) -> None:
    frame: Any = table.to_polars()
    assert frame.height == 3
    assert frame["episode_return"].mean() == 1.0
    assert frame["episode_return"].to_list() == [0.0, None, 2.0]
    assert frame["forks"][0] == '{"history_edited":2}'
    assert frame["players"].to_list()[0] == ["left"]


def test_an_empty_table_has_the_columns(table: EpisodeTable) -> None:
    empty = EpisodeTable([])
    assert list(empty.to_pandas().columns) == list(table.to_pandas().columns)
    assert list(empty.to_polars().columns) == list(table.to_polars().columns)
