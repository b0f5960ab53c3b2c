"""Presets are what their sources say, or name the difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentrl.algo.batch_advantages import batch_advantages
from agentrl.algo.config import AlgorithmConfig, preset_differences
from agentrl.algo.presets import FORKS, OVERLONG, PRESETS, STALE
from tests.algo.build import group, linear


def of(preset: str, **fields: Any) -> AlgorithmConfig:  # noqa: ANN401 - fields of a run file
    return AlgorithmConfig(preset=preset, group_size=2, **fields)


@pytest.mark.parametrize("preset", ["grpo", "drgrpo", "dapo", "gspo"])
def test_the_ratio_of_a_paper_is_to_the_policy_that_sampled_with_no_weight_beside_it(preset: str) -> None:
    slots = of(preset).slots
    assert (slots.proximal.name, slots.token.name, slots.sequence.name) == ("behavior", "none", "none")


def test_boba2_normalizes_over_the_batch_without_a_group_baseline() -> None:
    groups = [group([linear([None], 1.0), linear([None], 0.0)]), group([linear([None], 1.0), linear([None], 1.0)])]
    found = batch_advantages(groups, of("areal_boba2"))
    flat = np.concatenate([values for one in found for values in one.per_turn])
    returns = np.array([1.0, 0.0, 1.0, 1.0])
    np.testing.assert_allclose(flat, (returns - returns.mean()) / returns.std())
    times_5 = [group([linear([None], 5.0), linear([None], 0.0)]), group([linear([None], 5.0), linear([None], 5.0)])]
    scaled = batch_advantages(times_5, of("areal_boba2"))
    np.testing.assert_allclose(np.concatenate([values for one in scaled for values in one.per_turn]), flat)


def test_dr_grpo_divides_by_a_constant_and_gspo_has_one_ratio_for_a_response() -> None:
    slots = of("drgrpo").slots
    assert (slots.aggregate, slots.fixed_length) == ("fixed", 3000)
    assert of("gspo").slots.policy_loss.given["segment"] == "sample"


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_lists_its_differences_and_those_of_the_fields_beside_it(preset: str) -> None:
    lines = preset_differences(of(preset), minibatches=PRESETS[preset].minibatches or 1)
    assert lines == list(PRESETS[preset].differences)
    assert all(len(line) <= 160 and "\n" not in line for line in lines)
    changed = preset_differences(of(preset, guard={"effective_samples": {"base": 0.25}}), minibatches=1)
    assert any(line.startswith("algorithm.guard is {'effective_samples': {'base': 0.25}}") for line in changed)


def test_a_difference_goes_where_the_run_file_takes_it_away() -> None:
    assert OVERLONG in preset_differences(of("dapo"), 1)
    shaped = preset_differences(of("dapo", shaping={"soft_overlong": {"limit": 100}}), 1)
    assert OVERLONG not in shaped
    assert not any("keep" in line and "in the preset" in line for line in shaped)
    assert STALE not in preset_differences(of("grpo", max_staleness=0), 1)
    assert STALE not in preset_differences(of("grpo", correction={"proximal": "forward", "token": "mask"}), 1)
    assert FORKS not in preset_differences(of("grpo", aggregate="token"), 1)
    assert "trainer.minibatches is 2; in the source it is 1" in preset_differences(of("areal_boba2"), 2)


def test_without_a_preset_there_is_nothing_to_say() -> None:
    assert preset_differences(AlgorithmConfig(), 2) == []
    assert AlgorithmConfig().preset_name is None
