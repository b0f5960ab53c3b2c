"""A judge orders the responses of a group, whatever place of presentation it prefers."""

from __future__ import annotations

import json
import re

import pytest

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_rewards.ranking import GroupJudge, PairwiseJudge
from tests.support.judging import always, judging

CRITERION = "The larger number is better."


@pytest.fixture
def anyio_backend() -> str:
    """The endpoint needs asyncio."""
    return "asyncio"


def shown(question: str) -> dict[str, str]:
    return {name: text for name, _, text in re.findall(r"\[response (\w) (\w+) begins\]\n(.*)\n\[response", question)}


def larger(question: str) -> str:
    numbers = {name: float(text) for name, text in shown(question).items()}
    better = "tie" if numbers["A"] == numbers["B"] else max(numbers, key=lambda name: numbers[name])
    return json.dumps({"better": better})


def by_size(question: str) -> str:
    numbers = {name: float(text) for name, text in shown(question).items()}
    return "So: " + json.dumps({"ranking": sorted(numbers, key=lambda name: -numbers[name])})


async def test_a_response_wins_ties_or_loses_a_comparison_in_both_orders() -> None:
    async with judging(larger) as (model, endpoint):
        judge = PairwiseJudge(model, CRITERION)
        assert await judge.compare("q", "2", "1") == 1.0
        assert await judge.compare("q", "1", "2") == 0.0
        assert await judge.compare("q", "1", "1.0") == 0.5
        both = [shown(question) for question in endpoint.questions[:2]]  # asked at once, in any order
        assert sorted(both, key=lambda texts: texts["A"]) == [{"A": "1", "B": "2"}, {"A": "2", "B": "1"}]
        assert len(endpoint.bodies) == 4  # the second comparison is the first one's, from the cache
        assert await judge.compare("q", "7", "7") == 0.5
        assert len(endpoint.bodies) == 4


async def test_a_judge_that_prefers_a_place_says_nothing() -> None:
    async with judging(always('{"better": "A"}')) as (model, _):
        assert await PairwiseJudge(model, CRITERION).rank("q", ["1", "2", "3"]) == [0.5, 0.5, 0.5]
    async with judging(always('{"ranking": ["A", "B", "C"]}')) as (model, _):
        assert await GroupJudge(model, CRITERION, num_orders=3).rank("q", ["1", "2", "3"]) == pytest.approx([0.5] * 3)


async def test_all_pairs_of_a_group_give_shares_won() -> None:
    async with judging(larger) as (model, endpoint):
        assert await PairwiseJudge(model, CRITERION).rank("q", ["3", "1", "2", "2.0"]) == pytest.approx([1, 0, 0.5, 0.5])
        assert len(endpoint.bodies) == 12


async def test_few_opponents_each_take_fewer_requests() -> None:
    async with judging(larger) as (model, endpoint):
        values = await PairwiseJudge(model, CRITERION).rank("q", [str(number) for number in range(8)], num_opponents=2)
        assert len(endpoint.bodies) == 16
        assert sum(values) / 8 == pytest.approx(0.5)
        assert (values[0], values[3], values[7]) == (0.0, 0.5, 1.0)


async def test_a_group_is_ranked_in_several_orders_and_equal_responses_are_worth_the_same() -> None:
    async with judging(by_size) as (model, endpoint):
        values = await GroupJudge(model, CRITERION, num_orders=2).rank("q", ["1", "5", "3", "3"])
        assert values == pytest.approx([0, 1, 0.5, 0.5])
        first, second = (list(shown(question).values()) for question in endpoint.questions)
        assert first != second
        assert sorted(first) == sorted(second)


@pytest.mark.parametrize("ranking", [["A"], ["A", "B", "B"], ["A", "B", "D"], "ABC", [1, 2, 3], ["A", "B", "C", 1], None])
async def test_a_ranking_that_leaves_out_or_repeats_a_response_is_a_fault(ranking: object) -> None:
    async with judging(always(json.dumps({"ranking": ranking}))) as (model, _):
        with pytest.raises(EnvironmentFault, match="after 2 attempts"):
            await GroupJudge(model, CRITERION).rank("q", ["1", "2", "3"])


async def test_groups_that_cannot_be_ranked_are_refused() -> None:
    async with judging(larger) as (model, _):
        with pytest.raises(ConfigError, match="at least two responses"):
            await PairwiseJudge(model, CRITERION).rank("q", ["1"])
        for opponents in (0, 1, 3, 4):
            with pytest.raises(ConfigError, match="num_opponents must be even"):
                await PairwiseJudge(model, CRITERION).rank("q", ["1", "2", "3", "4"], num_opponents=opponents)
        with pytest.raises(ConfigError, match="2 to 26 responses"):
            await GroupJudge(model, CRITERION).rank("q", ["1"] * 27)
        with pytest.raises(ConfigError, match="num_orders"):
            GroupJudge(model, CRITERION, num_orders=0)
