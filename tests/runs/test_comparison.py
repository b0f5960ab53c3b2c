"""Two runs are compared by the fields of their files, their final figures, and the tasks that both played."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
import yaml

from agentrl.commands.open_run import Run, open_run
from agentrl.episode.summary import INDEX_HEADER, EpisodeSummary
from agentrl.errors import ConfigError
from agentrl_viewer.runs.comparison import common_figures, common_tasks, differing_fields
from tests.support.summaries import episode_summary


def run_of(
    path: Path,
    *,
    fields: dict[str, Any] | None = None,
    events: list[dict[str, Any]] | None = None,
    episodes: Sequence[EpisodeSummary] = (),
) -> Run:
    (path / "episodes").mkdir(parents=True)
    if fields is not None:
        (path / "config.yaml").write_text(yaml.safe_dump(fields))
    (path / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(event) + b"\n" for event in events or []))
    lines = [orjson.dumps(INDEX_HEADER), *map(msgspec.json.encode, episodes)]
    (path / "episodes" / "index.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return open_run(path)


def test_fields_that_differ_are_listed_and_a_missing_one_has_its_default(tmp_path: Path) -> None:
    left = run_of(tmp_path / "a", fields={"name": "a", "trainer": {"lr": 1e-4}, "seed": 3, "workflow_args": {"turns": 2}})
    right = run_of(tmp_path / "b", fields={"name": "b", "trainer": {"lr": 1e-4}, "workflow_args": {"turns": 4}, "own": 1})
    found = {field.path: (field.left, field.right) for field in differing_fields(left, right)}
    assert found == {"seed": ("3", "0"), "workflow_args.turns": ("2", "4"), "own": (None, "1")}


def test_runs_without_a_file_have_no_field_that_differs(tmp_path: Path) -> None:
    assert differing_fields(run_of(tmp_path / "a"), run_of(tmp_path / "b")) == []


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    left, right = run_of(tmp_path / "a", fields={}), run_of(tmp_path / "b", fields={})
    (right.path / "config.yaml").write_text("trainer: {")
    with pytest.raises(ConfigError, match=r"b/config\.yaml"):
        differing_fields(left, right)


def test_figures_are_the_last_evaluation_and_the_mean_of_the_last_steps(tmp_path: Path) -> None:
    def events(scale: float) -> list[dict[str, Any]]:
        steps = [{"event": "step", "step": at, "success_rate": scale * at, "skipped": "no_tokens"} for at in range(1, 8)]
        return [
            {"event": "evaluation", "step": 1, "success_rate": 0.0},
            *steps,
            {"event": "evaluation", "step": 7, "success_rate": scale, "greedy": True},
            {"event": "end", "train_steps": 7, "error": None},
        ]

    only_left = {"event": "step", "step": 8, "success_rate": 0.8, "trainer.loss": 1.0}
    left = run_of(tmp_path / "a", events=[*events(0.1), only_left])
    figures = common_figures(left, run_of(tmp_path / "b", events=events(0.2)))
    assert [(one.event, one.key) for one in figures] == [
        ("evaluation", "success_rate"),
        ("step", "success_rate"),
        ("end", "train_steps"),
    ]
    assert [(round(one.left, 6), round(one.right, 6)) for one in figures] == [(0.1, 0.2), (0.6, 1.0), (7, 7)]


def test_a_task_is_compared_by_the_evaluation_that_played_it_last(tmp_path: Path) -> None:
    def evaluated(step: int, number: int, task: str, success: bool, **changes: object) -> EpisodeSummary:
        changes = {"purpose": "evaluation", "group": None, "step": step + 1, **changes}
        return episode_summary(number, episode_id=f"eval.{step}.{number}", task_id=task, success=success, **changes)

    left = [evaluated(1, 0, "x", True), evaluated(2, 0, "x", False, prompt="Add."), evaluated(2, 1, "y", True)]
    right = [
        evaluated(2, 0, "x", True),
        evaluated(2, 1, "x", False, failure="ToolError", episode_return=None),
        evaluated(1, 2, "y", False),  # ended late: the newer evaluation is not its
        evaluated(2, 3, "y", True),
        evaluated(2, 4, "z", True),
    ]
    pairs = common_tasks(run_of(tmp_path / "a", episodes=left), run_of(tmp_path / "b", episodes=right))
    assert [(pair.task_id, pair.change, pair.prompt) for pair in pairs] == [("x", 1.0, "Add."), ("y", 0.0, "")]
    assert [(pair.left.succeeded, pair.left.finished, pair.right.succeeded, pair.right.finished) for pair in pairs] == [
        (0, 1, 1, 1),
        (1, 1, 1, 1),
    ]
    assert pairs[0].right.episode_ids == ["eval.2.0", "eval.2.1"]
    assert pairs[1].right.episode_ids == ["eval.2.3"]


def test_training_tasks_are_compared_by_their_newest_group_and_come_last(tmp_path: Path) -> None:
    def trained(number: int, task: str, success: bool) -> EpisodeSummary:
        return episode_summary(number, task_id=task, success=success)

    left = [trained(number, "x", False) for number in range(8)] + [trained(number, "x", True) for number in range(8, 16)]
    right = [trained(number, "x", number < 4) for number in range(8)]
    held_out = episode_summary(90, episode_id="eval.1.0", task_id="h", purpose="evaluation", group=None)
    pairs = common_tasks(
        run_of(tmp_path / "a", episodes=[*left, held_out]), run_of(tmp_path / "b", episodes=[*right, held_out])
    )
    assert [(pair.purpose, pair.task_id, pair.change) for pair in pairs] == [
        ("evaluation", "h", 0.0),
        ("training", "x", -0.5),
    ]
