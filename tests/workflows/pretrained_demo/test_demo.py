"""The demo with a pretrained model, in its smallest form: a random model of the same family, and the real one."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.commands.open_run import open_run
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl_workflows.demo.run import run_demo
from agentrl_workflows.pretrained_demo.demo import main
from agentrl_workflows.pretrained_demo.recipe import HARDER, REAL, REAL_SMOKE, PretrainedRecipe, controlled, with_adapter
from tests.workflows.pretrained_demo.conftest import BYTES


def play(recipe: PretrainedRecipe, runs: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    out = io.StringIO()
    run_demo(recipe, seed=0, runs_dir=runs, name="r", overrides=overrides, console=Console(file=out, width=120))
    return json.loads((runs / "r" / "summary.json").read_text()), out.getvalue()


@pytest.mark.starts
@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
def test_every_part_of_the_demo_runs_on_a_random_model(
    tmp_path: Path, llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(REAL_SMOKE, model=llama, eval_episodes=4, eval_servers=1)
    summary, text = play(recipe, tmp_path, *BYTES)
    assert (summary["train_steps"], summary["train_episodes"]) == (1, 8)
    assert summary["episodes_evaluated"] == 4
    assert summary["failed_evaluation_episodes"] == {"before": {}, "after": {}}
    assert summary["failed_episodes"] == {}
    assert summary["unclear_before"] > 0  # it writes noise
    assert "success on 4 held-out tasks" in text
    assert "pretrained model" in text
    assert "sampled, at most 4 turns: 4 of 4 episodes" in capfd.readouterr().err
    run = open_run(tmp_path / "r")
    assert len(run.episodes()) == 8
    assert (tmp_path / "r" / "curve.png").stat().st_size > 10_000


@pytest.mark.starts
@pytest.mark.long
@pytest.mark.parametrize("sync", ["distributed", "disk"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
def test_the_control_and_an_adapter_run_on_a_random_model_in_bfloat16(tmp_path: Path, llama: Path, sync: str) -> None:
    recipe = replace(REAL_SMOKE, model=llama, eval_episodes=2, eval_servers=1)
    summary, _ = play(with_adapter(controlled(recipe)), tmp_path, *BYTES, "--trainer.dtype", "bfloat16", "--sync", sync)
    config = load_config(tmp_path / "r" / "config.yaml")
    assert config.workflow.endswith(":ShuffledRewards")
    assert config.trainer.lora is not None
    assert config.trainer.lora.rank == 8
    assert (config.trainer.dtype, config.trainer.lr) == ("bfloat16", 2e-4)
    assert summary["train_steps"] == 1


@pytest.mark.starts
@pytest.mark.nightly
@pytest.mark.external
@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
def test_the_smallest_demo_runs_on_the_pretrained_model(tmp_path: Path) -> None:
    summary, _ = play(REAL_SMOKE, tmp_path)
    assert summary["train_steps"] == 2
    assert summary["sampled_before"] > 0.2  # a pretrained model knows what to do, and not yet well
    assert summary["failed_episodes"] == {}
    assert summary["max_logprob_difference"] is not None


def test_a_model_that_cannot_be_fetched_costs_no_earlier_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(console: Console) -> Path:
        raise ConfigError("no network")

    monkeypatch.setattr("agentrl_workflows.pretrained_demo.recipe.fetch_model_file", fail)
    earlier = tmp_path / "r" / "summary.json"
    earlier.parent.mkdir()
    earlier.touch()
    with pytest.raises(ConfigError, match="no network"):
        play(REAL_SMOKE, tmp_path)
    assert earlier.exists()


@pytest.mark.parametrize("recipe", [REAL, HARDER, with_adapter(HARDER), controlled(REAL)])
def test_the_variants_are_whole_run_files(recipe: PretrainedRecipe) -> None:
    flags = [part for key, value in recipe.overrides.items() for part in (f"--{key}", str(value))]
    run = load_config(recipe.run_file, [*flags, "--model.path", "m"])
    operations = [1, 2] if "one and two" in recipe.title else [1]
    assert run.tasks.factory_args["operations"] == operations
    assert run.algorithm.groups_per_step == run.algorithm.group_size == 8


def test_the_smallest_and_the_harder_variant_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of them"):
        main(smoke=True, harder=True, runs_dir=tmp_path)
