"""The last words of a run, for each way in which it may end."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.commands.ending import describe_end, describe_interrupted_run
from agentrl.config import RunConfig, parse_config
from agentrl.errors import TrainError
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.scripted import ScriptedTrainer
from tests.engine.harness import TASKS, make_engine, run
from tests.rollout.harness import make_renderer


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return make_renderer(tmp_path_factory.mktemp("renderer"))


def make_run(folder: Path, **fields: Any) -> RunConfig:  # noqa: ANN401 - fields of a run file
    tasks = {"path": "t.jsonl", "eval": {"path": "e.jsonl"}}
    values = {"workflow": "my:Agent", "tasks": tasks, "model": {"path": "m"}, "runs_dir": str(folder), "name": "r"}
    return parse_config({**values, "engine": {"steps": 3}, **fields})


def test_a_run_that_finished_names_its_figures_and_the_next_commands(tmp_path: Path, renderer: Renderer) -> None:
    config = make_run(tmp_path)
    engine = {"eval_every": 3, "eval_episodes": 2}
    anyio.run(run, make_engine(config.run_dir, renderer, steps=3, eval_tasks=TASKS[:2], engine=engine))
    text = describe_end(config, None)
    saved = config.run_dir / "checkpoints" / "step-000003"
    assert re.search(rf"run         r: finished, 3 of 3 steps in \d+ s; files in {config.run_dir}/", text)
    assert " in step 1, " in text
    assert " sampled, " in text
    assert "lost        nothing: no episode failed" in text
    [row] = [line for line in text.splitlines() if line.startswith("           3  ")]
    assert row.split()[3:5] == ["2", "0"]
    assert text.endswith(
        f"next\n  agentrl view {config.run_dir}\n  agentrl eval {config.run_dir}/config.yaml --checkpoint {saved}\n"
        f"  agentrl chat {saved}\n  agentrl train {config.run_dir}/config.yaml --resume --engine.steps 6"
    )


def test_a_run_that_failed_says_how_to_continue(tmp_path: Path, renderer: Renderer) -> None:
    config = make_run(tmp_path)
    engine = make_engine(
        config.run_dir, renderer, steps=3, trainer=ScriptedTrainer(fail_steps={2}), engine={"checkpoint_every": 1}
    )
    with pytest.raises(TrainError) as failed:
        anyio.run(run, engine)
    text = describe_end(config, failed.value)
    assert "r: ended by TrainError, 2 of 3 steps in " in text
    assert text.endswith(f"agentrl train {config.run_dir}/config.yaml --resume")
    assert "agentrl chat" in text


def test_a_run_that_saved_nothing_starts_over(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    config.run_dir.mkdir()
    text = describe_end(config, TrainError("no"))
    assert "checkpoint  none: nothing was saved" in text
    assert text.endswith(f"agentrl train {config.run_dir}/config.yaml --replace")


def test_the_counts_of_a_resumed_run_name_the_step_from_which_they_count(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    config.run_dir.mkdir()
    lines = [
        {"event": "step", "wall_s": 60.0, "step": 1, "success_rate": 0.25, "return_mean": 0.25},
        {"event": "resumed", "wall_s": 70.0, "step": 1, "groups_admitted": 2, "groups_open": [], "evaluations_due": []},
        {"event": "step", "wall_s": 130.0, "step": 2, "success_rate": 0.75, "return_mean": 0.5},
        {
            "event": "end", "wall_s": 131.0, "resumed_from_step": 1, "sampled_tokens": 80, "trained_tokens": 60,
            "evaluation_tokens": 0, "wasted_tokens": {"in_flight": 20}, "mean_staleness": 0.5, "max_trained_staleness": 1,
            "max_staleness": 2, "failed_episodes": {"timeout": 3, "workflow_error": 4}, "dropped_groups": {"over_age": 1},
            "skipped_steps": {},
        },
    ]  # fmt: skip
    (config.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = describe_interrupted_run(config)
    assert "interrupted, 2 of 3 steps in 2 min 11 s" in text
    assert "success     0.250 in step 1, 0.750 in step 2; best 0.750 in step 2" in text
    assert "80 sampled since step 1, 60 trained, 20 wasted (in_flight)" in text
    assert "episodes failed: 4 workflow_error, 3 timeout; groups dropped: 1 over_age" in text


def test_the_commands_fit_a_shell_and_evaluate_where_tasks_are_held_out(tmp_path: Path) -> None:
    config = make_run(tmp_path / "my runs", tasks={"path": "t.jsonl", "eval": {"path": "e.jsonl"}})
    config.run_dir.mkdir(parents=True)
    saved = f"{config.run_dir}/checkpoints/step-000001"
    line = {"event": "checkpoint", "wall_s": 1.0, "step": 1, "path": saved, "seconds": 0.1}
    (config.run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    commands = [shlex.split(line) for line in describe_end(config, TrainError("no")).splitlines()[-4:]]
    file = f"{config.run_dir}/config.yaml"
    assert commands == [
        ["agentrl", "view", str(config.run_dir)],
        ["agentrl", "eval", file, "--checkpoint", saved],
        ["agentrl", "chat", saved],
        ["agentrl", "train", file, "--resume"],
    ]


def test_an_interrupt_before_the_first_record_has_no_summary(tmp_path: Path) -> None:
    config = make_run(tmp_path)
    assert describe_interrupted_run(config) == f"Nothing was written to {config.run_dir}."
