"""Runs that are killed with SIGKILL and resumed, in the short form; `benchmarks/kill_and_resume.py` kills 40 times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kills import Accounts, Equality, account, compare, prepare


@pytest.mark.starts
@pytest.mark.long
def test_a_killed_synchronous_run_ends_with_the_weights_of_one_that_was_left_alone(tmp_path: Path, checkpoint: Path) -> None:
    prepare(tmp_path, checkpoint, steps=24, asynchronous=False)
    found = compare(tmp_path, kills=2, seed=1)
    assert found == Equality(kills=2, equal=2, final_equal=True, repeated_steps=found.repeated_steps)


@pytest.mark.starts
@pytest.mark.long
def test_a_killed_asynchronous_run_trains_and_records_every_group_once(tmp_path: Path, checkpoint: Path) -> None:
    prepare(tmp_path, checkpoint, steps=30, asynchronous=True)
    found = account(tmp_path, kills=2, seed=1, steps=30)
    assert found == Accounts(
        kills=2,
        groups=60,
        lost=0,
        trained_twice=0,
        duplicate_episodes=0,
        incomplete_groups=0,
        evaluations_wrong=0,
        repeated_steps=found.repeated_steps,
    )
