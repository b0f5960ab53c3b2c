"""What a person reads when a run goes wrong while it trains."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from agentrl.engine.alarms import Alarms
from agentrl.types import Group, StopReason, Task, Trajectory, Turn, VersionSpan

ENDED, CUT = StopReason.STOP, StopReason.LENGTH


def group(*stop_reasons: StopReason, tokens: int = 2) -> Group:
    """Return a group whose one episode has a turn for each stop reason."""
    ids = np.ones(tokens, np.int32)
    turns = tuple(
        Turn(
            context_ids=ids,
            output_ids=ids,
            output_logprobs=-ids.astype(np.float32),
            spans=(VersionSpan(start=0, end=tokens, version=1),),
            stop_reason=reason,
            sent_after=number,
            sent_at=number,
        )
        for number, reason in enumerate(stop_reasons)
    )
    episode = Trajectory(episode_id="e", task_id="t", turns=turns, stop_reason=StopReason.COMPLETED, final_reward=1.0)
    return Group(index=0, task=Task(id="t", data={}), episodes=(episode,), admitted_version=1)


def warnings(
    caplog: pytest.LogCaptureFixture,
    *,
    entropy: Sequence[float] = (),
    kl: Sequence[float] = (),
    success: Sequence[float] = (),
    praised: Sequence[float] = (),
    signal: float = 0.0,
    ends: Sequence[StopReason] = (ENDED,),
) -> list[str]:
    """Return what a run warns of whose steps, of 8 episodes each, have these figures."""
    alarms = Alarms()
    steps = max(map(len, (entropy, kl, success, praised, (0,))))
    with caplog.at_level(logging.WARNING):
        for at in range(steps):
            batch = {"episodes": 8.0, "success_rate": success[at] if success else 1.0, "signal_share": signal}
            trained = ({"entropy": entropy[at]} if entropy else {}) | ({"kl_behavior_proximal_k3": kl[at]} if kl else {})
            trained |= {"log_ratio_positive": praised[at]} if praised else {}
            alarms.step(at + 1, [group(*ends)], batch, trained)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("curve", [(0.19, 0.1, 0.02), (0.19, 0.02), (0.5, 0.6, 0.09, 0.01)])
def test_entropy_that_falls_by_four_fifths_within_two_steps_is_one_warning(
    caplog: pytest.LogCaptureFixture, curve: tuple[float, ...]
) -> None:
    (text,) = warnings(caplog, entropy=curve)
    assert "the entropy of the policy fell from" in text
    assert "lower trainer.lr" in text


def test_praised_tokens_that_lose_probability_are_one_warning_that_names_the_loss(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warnings(caplog, praised=(0.01, -0.05, -0.07, -0.2))
    assert text.startswith("step 3: tokens with positive advantage lost probability")
    assert "algorithm.policy_loss: anchored" in text


@pytest.mark.parametrize("curve", [(0.8, 0.5, 0.3, 0.2, 0.1, 0.06), (0.01, 0.001, 0.0001), (0.1, 0.9, 0.2)])
def test_entropy_that_falls_slowly_or_was_nothing_is_no_warning(
    caplog: pytest.LogCaptureFixture, curve: tuple[float, ...]
) -> None:
    assert not warnings(caplog, entropy=curve)


def test_a_policy_whose_groups_still_differ_has_not_collapsed(caplog: pytest.LogCaptureFixture) -> None:
    learning = (0.13, 0.08, 0.17, 0.08, 0.033)  # a pretrained model of 135M weights, on its way from 0.53 to 0.84
    assert not warnings(caplog, entropy=learning, signal=0.5)
    assert warnings(caplog, entropy=learning, signal=0.49)


def test_a_jump_of_the_kl_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warnings(caplog, kl=(0.0, 0.004, 0.01, 0.3, 0.9))
    assert text.startswith("step 4: KL(behavior, proximal) jumped to 0.3 nats per token, from 0.004")
    assert "algorithm.max_staleness" in text


@pytest.mark.parametrize("curve", [(0.5, 0.9), (0.001, 0.002, 0.04), (0.1, 0.2, 0.15, 0.8)])
def test_a_kl_without_a_past_or_a_small_one_is_no_warning(
    caplog: pytest.LogCaptureFixture, curve: tuple[float, ...]
) -> None:
    assert not warnings(caplog, kl=curve)


def test_answers_that_are_all_cut_name_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warnings(caplog, success=(1.0, 1.0), ends=(CUT, CUT))
    assert text.startswith("step 1: 2 of 2 answers were cut by their limit of tokens")
    assert "sampling.max_tokens" in text


def test_some_answers_that_are_cut_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings(caplog, ends=(CUT, CUT, ENDED))


def test_a_choice_of_one_token_is_not_cut(caplog: pytest.LogCaptureFixture) -> None:
    Alarms().step(1, [group(CUT, CUT, tokens=1)], {"episodes": 1.0, "success_rate": 1.0}, {})
    assert not caplog.records


def test_no_success_in_the_first_batches_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warnings(caplog, success=(0.0,) * 6)
    assert text.startswith("step 4: none of the first 32 episodes succeeded")


def test_a_run_that_once_succeeded_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings(caplog, success=(0.0, 0.1, 0.0, 0.0, 0.0, 0.0))
