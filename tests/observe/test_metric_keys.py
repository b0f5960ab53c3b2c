"""Every key that a run writes is documented, and the reference page is current."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from agentrl.algo.config import AlgorithmConfig
from agentrl.engine.parts import RunState
from agentrl.engine.report import RunReport
from agentrl.errors import AgentRLError
from agentrl.observe.metric_keys import EVENTS, METRIC_KEYS, find_metric, metrics_page, undocumented
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.policy import PolicyTrainer
from tests.engine.harness import TASKS, lines, make_engine, run
from tests.rollout.harness import Judge, make_renderer
from tests.trainer.helpers import random_batch

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return make_renderer(tmp_path_factory.mktemp("renderer"))


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text() == metrics_page(), "run: python -m agentrl.observe.metric_keys > docs/reference/metrics.md"


def test_every_entry_belongs_to_an_event_and_is_there_once() -> None:
    assert {entry.event for entry in METRIC_KEYS} == set(EVENTS)
    assert len({(entry.event, entry.key) for entry in METRIC_KEYS}) == len(METRIC_KEYS)


def test_the_end_has_the_fields_of_the_report() -> None:
    documented = {entry.key for entry in METRIC_KEYS if entry.event == "end"}
    assert documented == {"error", *(field.name for field in fields(RunReport))} - {"policy_version"}


def test_the_trainer_reports_every_documented_name_and_no_other(checkpoint: Path) -> None:
    model = PolicyModel(checkpoint, device=torch.device("cpu"))
    report = PolicyTrainer(model, TrainerConfig(), AlgorithmConfig(), total_steps=2).step(random_batch())
    named = [entry for entry in METRIC_KEYS if entry.key.startswith("trainer.") and entry.key != "trainer.NAME"]
    own = [entry for entry in named if "spot" not in entry.key and entry.key != "trainer.unchecked_servers"]
    reported = {f"trainer.{name}" for name in report.metrics}
    assert [entry.key for entry in own if not any(map(entry.covers, reported))] == []
    assert {key for key in reported if not any(entry.covers(key) for entry in own)} == set()


async def test_a_run_writes_only_documented_keys(tmp_path: Path, renderer: Renderer) -> None:
    engine = {"eval_every": 1, "eval_episodes": 2, "checkpoint_every": 2}
    state = RunState(step=1, policy_version=2, groups_admitted=3, groups_open=(2,))
    await run(make_engine(tmp_path, renderer, steps=4, eval_tasks=TASKS[:2], engine=engine, resume=state))
    with pytest.raises(AgentRLError):  # the judge knows no answer to these tasks
        await run(make_engine(tmp_path, renderer, workflow=Judge(), tasks=[TASKS[0]], rollout={"episode_timeout_s": 1e-6}))
    written = lines(tmp_path / "metrics.jsonl")
    assert {line["event"] for line in written} >= {"step", "evaluation", "checkpoint", "resumed", "episode_failed", "end"}
    for line in written:
        assert undocumented(line["event"], line) == []


@pytest.mark.parametrize(
    ("key", "events"),
    [("forks.edited", ["step"]), ("trainer.grad_norm", ["step"]), ("seconds", ["evaluation", "checkpoint"]), ("colour", [])],
)
def test_an_entry_is_found_by_the_key_of_a_line(key: str, events: list[str]) -> None:
    assert [entry.event for entry in find_metric(key)] == events
