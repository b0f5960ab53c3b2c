"""The real pandas and polars get one row for each episode, failed ones included."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import math
from typing import Any

import pytest

from agentrl.observe.runs.table import EpisodeTable, MetricLines
from tests.support.summaries import episode_summary

pytestmark = pytest.mark.external


@pytest.fixture
def table() -> EpisodeTable:
    failed = episode_summary(1, episode_return=None, final_reward=None, success=None, failure="WorkflowError", group=None)
    return EpisodeTable([episode_summary(0, forks={"history_edited": 2}, players=["left"]), failed, episode_summary(2)])


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


def test_metrics_have_a_column_for_each_nested_key() -> None:
    lines = MetricLines([{"step": 1, "trainer": {"lr": 0.5}}, {"step": 2, "evaluation": {"success": {"rate": 1.0}}}])
    frame: Any = lines.to_pandas()
    assert list(frame.columns) == ["step", "trainer.lr", "evaluation.success.rate"]
    assert frame["trainer.lr"].sum() == 0.5
    assert lines.to_polars()["evaluation.success.rate"].to_list() == [None, 1.0]
