"""Every bundled function of a slot trains the smallest demo: real model, server, workflow, client, engine and trainer.

All but the last test run in this process, so that no start is paid for; the last one has a trainer of two ranks.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from agentrl.algo.advantages import ADVANTAGES
from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.corrections import CORRECTIONS, PROXIMALS
from agentrl.algo.group_slots import KEEPS
from agentrl.algo.guard import GUARDS
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.presets import PRESETS
from agentrl.algo.slots import Bundled
from agentrl.algo.terms import TERMS
from agentrl.commands.train import train_run
from agentrl.config import RunConfig
from agentrl.observe.progress import NoProgress
from agentrl.trainer.base import StepReport
from agentrl_workflows.calculator.recipe import SMOKE
from agentrl_workflows.demo.warm_start import make_student
from benchmarks.one_process import smoke_run, train_here

pytestmark = pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the server needs it

PATIENCE_S = 600.0
STEPS = 3
ELSEWHERE = {"values", "reference"}
"""Needs of functions that other tests train."""


def names(table: dict[str, Bundled]) -> list[str]:
    return [name for name, each in table.items() if not each.needs & ELSEWHERE]


def combinations() -> list[dict[str, Any]]:
    """Return one algorithm for each loss, which together use every function of every slot."""
    advantages, corrections = names(ADVANTAGES), [name for name in names(CORRECTIONS) if name != "none"]
    aggregates, terms = ["token", "turn", "sequence", {"fixed": 40}], [[], *([{name: 0.001}] for name in names(TERMS))]
    found: list[dict[str, Any]] = []
    for number, loss in enumerate(names(POLICY_LOSSES)):
        corrects = POLICY_LOSSES[loss].corrects
        place = sum(not POLICY_LOSSES[str(each["policy_loss"])].corrects for each in found)
        token, sequence = (corrections[(place + by) % len(corrections)] for by in (0, 3))
        found.append(
            {
                "policy_loss": loss,
                "advantage": advantages[number % len(advantages)],
                "correction": {
                    "proximal": list(PROXIMALS)[number % len(PROXIMALS)],
                    **({} if corrects else {"token": token, "sequence": sequence}),
                },
                "aggregate": aggregates[number % len(aggregates)],
                "terms": terms[number % len(terms)],
                "keep": list(KEEPS)[number % len(KEEPS)],
                "guard": list(GUARDS)[number % len(GUARDS)],
            }
        )
    return found


@pytest.mark.usefixtures("anyio_backend")
def test_the_combinations_use_every_function() -> None:
    found = [AlgorithmConfig.model_validate(each).slots for each in combinations()]
    assert {each.advantage.name for each in found} == {*names(ADVANTAGES)}
    assert {name for each in found for name in (each.token.name, each.sequence.name)} == {*names(CORRECTIONS)}
    assert {each.proximal.name for each in found} == {*PROXIMALS}
    assert {term.slot.name for each in found for term in each.terms} == {*names(TERMS)}
    assert {each.keep.name for each in found} == {*KEEPS}
    assert {each.guard.name for each in found} == {*GUARDS}


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Warm up a student that solves some of the tasks and not all."""
    return make_student(SMOKE, 0, tmp_path_factory.mktemp("smoke"), Console(file=io.StringIO()))


def few(student: Path, runs: Path, algorithm: dict[str, Any], **flags: object) -> RunConfig:
    """Return the run of the smallest demo with few episodes a step."""
    small = {"group_size": 4, "groups_per_step": 6, "max_staleness": 2, **algorithm}
    settings = {"engine.steps": STEPS, "rollout.max_concurrent_episodes": 24, "trainer.minibatches": 2, **flags}
    return smoke_run(student, runs, small, settings)


async def reports_of(run: RunConfig) -> list[StepReport]:
    with anyio.fail_after(PATIENCE_S):
        trainer, _ = await train_here(run)
    assert len(trainer.reports) == STEPS
    return trainer.reports


def check(reports: Sequence[dict[str, float]]) -> None:
    for metrics in reports:
        assert metrics["optimizer_steps"] >= 1
        assert metrics["bad_minibatches"] == 0
        assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
        assert metrics["update_to_weight_ratio"] > 0


@pytest.mark.starts
@pytest.mark.parametrize("algorithm", combinations(), ids=lambda each: str(each["policy_loss"]))
async def test_it_trains_the_smallest_demo(student: Path, tmp_path: Path, algorithm: dict[str, Any]) -> None:
    reports = await reports_of(few(student, tmp_path, algorithm))
    check([dict(report.metrics) for report in reports])
    assert all(report.skipped is None for report in reports)


@pytest.mark.starts
@pytest.mark.parametrize("preset", PRESETS)
async def test_a_preset_trains_the_smallest_demo(student: Path, tmp_path: Path, preset: str) -> None:
    reports = await reports_of(few(student, tmp_path, {"preset": preset}))
    check([dict(report.metrics) for report in reports])


@pytest.mark.starts
async def test_two_ranks_train_the_smallest_demo_with_the_baseline_and_the_guard_of_vcpo(
    student: Path, tmp_path: Path
) -> None:
    run = few(student, tmp_path, {"preset": "vcpo"}, **{"trainer.parallel.dp": 2})
    await train_run(run, progress=NoProgress())
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert len(steps) == STEPS
    check(
        [
            {key.removeprefix("trainer."): value for key, value in line.items() if key.startswith("trainer.")}
            for line in steps
        ]
    )
    assert all(0 < line["trainer.guard_factor"] <= 1 for line in steps)
