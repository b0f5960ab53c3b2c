"""The prefill that a step takes."""

from __future__ import annotations

import pytest

from agentrl.servers.embedded.batching import Pace


def at_rate(tokens_per_second: float) -> Pace:
    """Return a pace that has measured a machine of this rate for long."""
    pace = Pace()
    for _ in range(100):
        pace.measured(100, 100 / tokens_per_second)
    return pace


@pytest.mark.parametrize(("decoding", "running", "budget"), [(0, 1, 512), (1, 2, 64), (20, 32, 256), (64, 64, 512)])
def test_a_model_that_misses_the_target_gets_slices_by_the_sequences_that_run(
    decoding: int, running: int, budget: int
) -> None:
    assert at_rate(250).budget(decoding, running) == budget


@pytest.mark.parametrize("running", [1, 64])
def test_a_fast_model_gets_the_slices_that_meet_the_target(running: int) -> None:
    assert at_rate(20_000).budget(running, running) == pytest.approx(1000, abs=2)


def test_a_slice_has_a_bound_on_any_machine() -> None:
    assert at_rate(1e9).budget(64, 64) == at_rate(250).budget(1000, 1000) == 2048
