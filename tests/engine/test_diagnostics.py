"""pass@k, majority and advantages of groups: goldens by hand and by enumeration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.diagnostics import MOST_NAMES, advantage_metrics, majority, pass_at, speaker_metrics, task_outcomes
from agentrl.engine.evaluate import EvalReport
from agentrl.types import EpisodeFailure, ForkReason, Trajectory, Turn
from tests.algo.build import episode, turn

FAILED = EpisodeFailure(kind="E", message="m", traceback="")


def ended(reward: float, answer: str | None = None, *, task: str = "t") -> Trajectory:
    return replace(episode([turn()], reward), answer=answer, task_id=task)


def failed(answer: str | None = None) -> Trajectory:
    return replace(ended(0.0, answer), final_reward=None, failure=FAILED)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n), st.integers(0, n))))
def test_pass_at_k_is_the_share_of_choices_of_k_episodes_with_a_success(case: tuple[int, int, int]) -> None:
    k, n, right = case
    choices = list(combinations([True] * right + [False] * (n - right), k))
    assert pass_at(k, n, right) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_pass_at_k_is_unbiased_for_any_chance_of_a_success(p: float) -> None:
    n = 5
    for k in (1, 2, 4):
        chances = [math.comb(n, right) * p**right * (1 - p) ** (n - right) for right in range(n + 1)]
        assert sum(c * pass_at(k, n, right) for right, c in enumerate(chances)) == pytest.approx(1 - (1 - p) ** k)


def test_outcomes_of_tasks_leave_out_failed_episodes_and_tasks_with_too_few() -> None:
    mixed = [ended(1.0), ended(0.0), ended(0.0), ended(0.0), failed()]
    never = [ended(0.0), ended(0.0), failed()]
    assert task_outcomes([mixed, never]) == pytest.approx({"pass_at.1": 0.125, "pass_at.2": 0.25, "pass_at.4": 1.0})


@pytest.mark.parametrize("groups", [[], [[ended(1.0)], [ended(0.0), failed()]], [[failed(), failed()]]])
def test_tasks_that_were_played_once_have_no_outcomes(groups: list[list[Trajectory]]) -> None:
    assert task_outcomes(groups) == {}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([("4", 1.0), ("4.0", 1.0), ("5", 0.0)], 1.0),
        ([("5", 0.0), ("The  Nile.", 1.0), ("the nile", 1.0), (None, 0.0), (None, 0.0), (None, 0.0)], 1.0),
        ([("4", 1.0), ("5", 0.0)], 0.5),
        ([("5", 0.0), ("5", 0.0), ("4", 1.0)], 0.0),
        ([(None, 1.0)], None),
    ],
)
def test_a_majority_is_right_where_its_answer_is(
    answers: Sequence[tuple[str | None, float]], expected: float | None
) -> None:
    assert majority([ended(reward, answer) for answer, reward in answers]) == expected
    assert majority([*(ended(reward, answer) for answer, reward in answers), *[failed("5")] * 9]) == expected


def test_the_majority_rate_is_over_the_tasks_with_answers() -> None:
    right, wrong = [ended(1.0, "4"), ended(1.0, "4")], [ended(1.0, "4"), ended(0.0, "5"), ended(0.0, "5")]
    assert task_outcomes([right, wrong, [ended(0.0), ended(0.0)]])["majority_rate"] == 0.5
    assert "majority_rate" not in task_outcomes([[ended(0.0), ended(0.0)]])


def test_an_evaluation_knows_which_episodes_are_samples_of_one_task() -> None:
    played = [ended(1.0, "4", task="a"), ended(0.0, "5", task="b"), ended(0.0, "5", task="a"), failed()]
    report = EvalReport(episodes=tuple(played), seconds=1.0, greedy=False)
    assert [(task, len(episodes)) for task, episodes in report.samples.items()] == [("a", 2), ("b", 1), ("t", 1)]
    metrics = report.metrics()
    assert {name: metrics[name] for name in ("pass_at.1", "pass_at.2", "majority_rate")} == {
        "pass_at.1": 0.25,
        "pass_at.2": 1.0,
        "majority_rate": 0.25,
    }


def spoken(role: str = "", player: str = "", temperature: float = 1.0) -> Turn:
    return replace(turn(), role=role, player=player, temperature=temperature)


def test_advantages_are_described_by_role_and_player() -> None:
    first = episode([spoken("plan", "x"), spoken("act #1", "y"), spoken("act #1", "y", temperature=0.0)])
    second = episode([spoken("plan", "x"), spoken("", "y")])
    found = advantage_metrics([first, second], [[3.0, -1.0, 100.0], [1.0, -3.0]])
    assert found == pytest.approx(
        {
            "advantage_mean": 0.0,
            "advantage_std": math.sqrt(5),
            "advantage_positive_share": 0.5,
            "advantage_mean_by_role.plan": 2.0,
            "advantage_std_by_role.plan": 1.0,
            "advantage_positive_share_by_role.plan": 1.0,
            "advantage_mean_by_role.act _1": -1.0,
            "advantage_std_by_role.act _1": 0.0,
            "advantage_positive_share_by_role.act _1": 0.0,
            "advantage_mean_by_role.unnamed": -3.0,
            "advantage_std_by_role.unnamed": 0.0,
            "advantage_positive_share_by_role.unnamed": 0.0,
            "advantage_mean_by_player.x": 2.0,
            "advantage_std_by_player.x": 1.0,
            "advantage_positive_share_by_player.x": 1.0,
            "advantage_mean_by_player.y": -2.0,
            "advantage_std_by_player.y": 1.0,
            "advantage_positive_share_by_player.y": 0.0,
        }
    )


def test_many_roles_have_bounded_figures_and_one_speaker_has_none() -> None:
    crowd = episode([spoken(f"role {number}") for number in range(MOST_NAMES + 8)] + [spoken("role 3")])
    found = advantage_metrics([crowd], [[1.0] * len(crowd.turns)])
    assert sum(name.startswith("advantage_mean_by_role.") for name in found) == MOST_NAMES + 1
    assert found["advantage_mean_by_role.others"] == 1.0
    assert "advantage_mean_by_role.role 3" in found
    assert set(advantage_metrics([episode([turn()])], [[1.0]])) == {
        "advantage_mean",
        "advantage_std",
        "advantage_positive_share",
    }
    assert advantage_metrics([], []) == {}


def test_turns_count_by_role_forks_by_client_and_what_is_left_out_of_training() -> None:
    claude: Any = {"client": "claude-cli/2.1", "dialect": "messages"}
    first = episode(
        [
            replace(turn(), **claude),
            replace(turn(), **claude, role="subagent", fork=ForkReason.NEW_CONVERSATION),
            replace(turn(), **claude, role="side_call", fork=ForkReason.NEW_CONVERSATION, left_out=True),
        ],
        1.0,
    )
    second = episode([turn(), replace(turn(), role="subagent", fork=ForkReason.HISTORY_EDITED)], 0.0)
    tokens = float(len(first.turns[0].output_ids))
    assert speaker_metrics([first, second]) == {
        "turns_mean_by_role.side_call": 0.5,
        "turns_mean_by_role.subagent": 1.0,
        "turns_mean_by_role.unnamed": 1.0,
        "output_tokens_mean_by_role.side_call": 0.5 * tokens,
        "output_tokens_mean_by_role.subagent": tokens,
        "output_tokens_mean_by_role.unnamed": tokens,
        "forks_by_client.claude-cli_2_1": 2.0,
        "forks_by_client.unnamed": 1.0,
        "left_out_turns": 1.0,
    }
    assert speaker_metrics([ended(1.0)]) == {}


def test_a_turn_that_is_left_out_has_no_advantage_metrics_and_no_trained_token() -> None:
    played = episode([turn(), replace(turn(), left_out=True)], 1.0)
    assert [int(branch.loss_mask.sum()) for branch in played.branches()] == [len(played.turns[0].output_ids), 0]
    assert advantage_metrics([played], [(1.0, 5.0)])["advantage_mean"] == 1.0


def test_the_share_of_prompts_from_caches_counts_whole_prompts_and_known_turns_only() -> None:
    def sized(context: int, output: int, cached: int | None, parent: int | None) -> Turn:
        arrays = {"context_ids": np.zeros(context, np.int32), "output_ids": np.zeros(output, np.int32)}
        return replace(turn(), **arrays, cached_tokens=cached, parent=parent)

    played = episode(
        [sized(10, 2, 0, None), sized(3, 5, 12, 0), sized(4, 1, None, 1), sized(7, 1, 20, 1), sized(20, 1, 5, None)], 1.0
    )
    shares = {name: value for name, value in speaker_metrics([played]).items() if name.startswith("cached_share")}
    assert shares == {
        "cached_share": pytest.approx((0 + 12 + 20 + 5) / (10 + 15 + 27 + 20)),
        "cached_share_by_turn.0": 0.0,
        "cached_share_by_turn.1": pytest.approx(12 / 15),
        "cached_share_by_turn.2_to_3": pytest.approx(20 / 27),
        "cached_share_by_turn.4_to_7": pytest.approx(5 / 20),
    }
