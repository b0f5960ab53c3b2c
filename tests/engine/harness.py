"""A whole run without a model: scripted server, scripted trainer, the real everything else."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from agentrl.algo.config import AlgorithmConfig
from agentrl.data.load import TrainingTasks
from agentrl.engine.config import EngineConfig
from agentrl.engine.engine import Engine
from agentrl.engine.parts import NEW_RUN, EngineParts, GroupSource, RunState
from agentrl.engine.report import RunReport
from agentrl.inference.backend import Inference
from agentrl.observe.progress import NoProgress, Progress
from agentrl.observe.runs.reading import read_record_lines
from agentrl.observe.trackers.feed import TrackerFeed
from agentrl.rollout.config import RolloutConfig
from agentrl.servers.scripted.server import ScriptedCall
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.types import Task
from agentrl.workflow import RolloutWorkflow
from tests.rollout.harness import PATIENCE_S, SAMPLING, Judge, make_server

TASKS = [Task(id=f"t{i}", data={"question": f"Say good, {i}.", "answer": "good"}) for i in range(8)]
ANY_PROBE = 1e6
"""The scripted trainer has no model, so its probe fits no server."""


def coin(call: ScriptedCall) -> str:
    """Answer right or wrong, by the episode's id: half of a group each, roughly."""
    return "good" if zlib.crc32(call.episode_id.encode()) % 2 else "bad"


def make_engine(run_dir: Path, renderer: Renderer, **options: Any) -> Engine:  # noqa: ANN401 - options of `make_parts`
    """Return an engine of `make_parts`."""
    return Engine(make_parts(run_dir, renderer, **options))


def make_parts(
    run_dir: Path,
    renderer: Renderer,
    *,
    workflow: RolloutWorkflow | None = None,
    inference: Inference | None = None,
    trainer: ScriptedTrainer | None = None,
    tasks: Sequence[Task] | TrainingTasks = TASKS,
    shuffle_tasks: bool = True,
    eval_tasks: Sequence[Task] = (),
    steps: int = 4,
    algorithm: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    progress: Progress | None = None,
    resume: RunState | None = None,
    send_dtype: str | None = None,
    interrupt_s: float = 0,
    trackers: TrackerFeed | None = None,
    source: GroupSource | None = None,
) -> EngineParts:
    """Return the parts of a run with small groups and batches; it does not wait for a trainer that a test holds."""
    return EngineParts(
        workflow=workflow or Judge(),
        tasks=TrainingTasks.of(tasks),
        inference=inference or make_server(renderer, coin),
        renderer=renderer,
        trainer=trainer or ScriptedTrainer(),
        run_dir=run_dir,
        algorithm=AlgorithmConfig.model_validate({"group_size": 3, "groups_per_step": 2, **(algorithm or {})}),
        rollout=RolloutConfig.model_validate(
            {"max_concurrent_episodes": 8, "episode_timeout_s": PATIENCE_S, **(rollout or {})}
        ),
        sampling=SAMPLING,
        engine=EngineConfig.model_validate(
            {
                "steps": steps,
                "probe_tolerance": ANY_PROBE,
                "stall_timeout_s": PATIENCE_S,
                **(engine or {}),
            }
        ),
        shuffle_tasks=shuffle_tasks,
        eval_tasks=eval_tasks,
        progress=progress or NoProgress(),
        resume=resume or NEW_RUN,
        send_dtype=send_dtype,
        interrupt_s=interrupt_s,
        trackers=trackers,
        source=source,
    )


async def run(engine: Engine) -> RunReport:
    """Run an engine; a hang fails the test."""
    with anyio.fail_after(PATIENCE_S):
        return await engine.run()


def lines(path: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Return the records of a JSONL file, those of one event if given."""
    records: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if event is None or record["event"] == event]


def episodes(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of the episodes of a run, those of lost work left out."""
    return [json.loads(found.record) for found in read_record_lines(run_dir)]


def balance(report: RunReport) -> int:
    """Return how many sampled tokens the report does not account for: 0."""
    known = report.trained_tokens + sum(report.wasted_tokens.values()) + report.evaluation_tokens
    return report.sampled_tokens - known
