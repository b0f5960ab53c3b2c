"""The plan says whose sampling holds where a program plays."""

from __future__ import annotations

import pytest

from agentrl.config import load_config
from agentrl.plan.plan import plan_run
from agentrl.plan.text import describe_plan


@pytest.mark.parametrize(
    ("path", "overrides", "said"),
    [
        ("examples/command/run.yaml", [], "the same for the program, whatever it sends"),
        ("examples/command/run.yaml", ["--sampling.of_programs", "program"], "calls at temperature 0 are not trained"),
        ("examples/terminal/run.yaml", [], "the same for the program, whatever it sends"),
    ],
)
def test_the_plan_of_a_program_says_whose_sampling_holds(path: str, overrides: list[str], said: str) -> None:
    assert said in describe_plan(plan_run(load_config(path, overrides)))
