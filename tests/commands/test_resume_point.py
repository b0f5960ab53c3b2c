"""Whether a run that is resumed has anything left to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.commands.run_directory import ResumePoint
from agentrl.config import parse_config
from agentrl.engine.parts import RunState


@pytest.mark.parametrize(
    ("step", "due", "complete"), [(9, (), False), (10, (), True), (10, (10,), False), (12, (), True), (12, (5,), False)]
)
def test_a_run_is_complete_when_no_step_and_no_evaluation_is_left(step: int, due: tuple[int, ...], complete: bool) -> None:
    run = parse_config(
        {"workflow": "my:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": "model"}, "engine": {"steps": 10}}
    )
    state = RunState(step=step, policy_version=step + 1, groups_admitted=0, groups_open=(), evaluations_due=due)
    assert ResumePoint(Path("step-000010"), state).is_complete(run) == complete
