"""`auto` in `trainer.parallel` becomes numbers before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import RunConfig, parse_config
from agentrl.errors import ConfigError
from agentrl.plan.mesh import mesh_problems
from agentrl.plan.model import model_of
from agentrl.plan.places import missing_gpus
from agentrl.plan.plan import plan_run
from agentrl.trainer.parallel.shape import MeshShape

GOOD: dict[str, Any] = {"workflow": "my:Agent", "tasks": {"path": "tasks.jsonl"}, "model": {"path": "/models/Qwen3-4B"}}


_LONG = ["--trainer.microbatch_tokens", "262144", "--trainer.dtype", "bfloat16", "--trainer.gradient_checkpointing", "true"]


def problems_of(run: RunConfig) -> list[str]:
    return mesh_problems(run.trainer, model_of(run.model))


@pytest.fixture
def eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    for number in range(8):
        (tmp_path / "dev" / f"nvidia{number}").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], MeshShape(dp=8)),
        (["--trainer.parallel.tp", "2"], MeshShape(dp=4, tp=2)),
        (["--trainer.parallel.cp", "2", "--trainer.parallel.replicate", "2"], MeshShape(dp=2, cp=2, replicate=2)),
        (["--trainer.device", "cuda:4"], MeshShape(dp=4)),
        (["--trainer.device", "cpu"], MeshShape(dp=1)),
        (["--inference.backend", "sglang", "--inference.device", "cuda:6"], MeshShape(dp=6)),
        (["--inference.backend", "sglang", "--inference.device", "cuda:0", "--inference.servers", "8"], MeshShape(dp=1)),
        (["--trainer.parallel.replicate", "auto"], MeshShape(dp=8)),
        (["--trainer.parallel.cp", "auto", "--trainer.parallel.tp", "auto", "--model.path", "unknown"], MeshShape(dp=8)),
        ([*_LONG, "--trainer.parallel.cp", "auto"], MeshShape(dp=4, cp=2)),
        ([*_LONG, "--trainer.parallel.cp", "auto", "--trainer.parallel.tp", "auto"], MeshShape(dp=4, cp=2)),
    ],
)
def test_dp_auto_takes_the_gpus_that_servers_and_other_axes_leave(
    eight_gpus: Path, flags: list[str], expected: MeshShape
) -> None:
    run = parse_config(GOOD | {"trainer": {"parallel": {"dp": "auto"}}}, flags)
    assert plan_run(run, eight_gpus).run.trainer.parallel.shape == expected


def test_a_machine_without_gpus_trains_in_one_process(tmp_path: Path) -> None:
    run = parse_config(GOOD | {"trainer": {"parallel": {"dp": "auto"}}})
    assert plan_run(run, tmp_path).run.trainer.parallel.shape == MeshShape()


def test_a_number_of_gpus_that_the_other_axes_do_not_divide_is_an_error(eight_gpus: Path) -> None:
    run = parse_config(GOOD | {"trainer": {"parallel": {"dp": "auto", "tp": 3}}})
    with pytest.raises(ConfigError, match=r"trainer\.parallel\.dp: auto, and the trainer has 8 place\(s\), which .* of 3"):
        plan_run(run, eight_gpus)


def test_an_axis_that_is_still_auto_has_no_shape() -> None:
    run = parse_config(GOOD | {"trainer": {"parallel": {"dp": "auto", "cp": "auto"}}})
    with pytest.raises(ConfigError, match=r"^trainer\.parallel\.dp, trainer\.parallel\.cp: auto is resolved by"):
        _ = run.trainer.parallel.shape


@pytest.mark.parametrize("given", ["0", "4097", "many", "1.5"])
def test_an_axis_is_a_number_or_auto(given: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.parallel\.tp"):
        parse_config(GOOD, ["--trainer.parallel.tp", given])


def test_auto_says_that_no_mesh_fits(eight_gpus: Path) -> None:
    flags = ["--model.path", "Qwen3-235B-A22B", "--trainer.parallel.cp", "auto", "--trainer.dtype", "bfloat16"]
    with pytest.raises(ConfigError, match=r"trainer\.parallel: auto finds no mesh .* use more GPUs"):
        plan_run(parse_config(GOOD | {"trainer": {"parallel": {"dp": "auto"}}}, flags), eight_gpus)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dp_auto_under_attach_takes_the_ranks_of_the_scheduler(
    eight_gpus: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    far = {"cluster": {"launcher": "attach"}, "trainer": {"device": device, "parallel": {"dp": "auto", "tp": 2}}}
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "LWS_GROUP_SIZE", "SKYPILOT_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"attach counts the ranks by WORLD_SIZE.*SLURM_NTASKS.*or give dp a number"):
        plan_run(parse_config(GOOD | far), eight_gpus)
    monkeypatch.setenv("SLURM_NTASKS", "16")
    assert plan_run(parse_config(GOOD | far), eight_gpus).run.trainer.parallel.shape == MeshShape(dp=8, tp=2)


def test_gpus_of_other_machines_are_not_counted(eight_gpus: Path) -> None:
    far = {"cluster": {"launcher": "attach"}, "trainer": {"device": "cuda", "parallel": {"dp": "auto"}}}
    assert missing_gpus(parse_config(GOOD | far, ["--trainer.parallel.dp", "512"]), eight_gpus) == []
    here = parse_config(GOOD, ["--trainer.device", "cuda", "--trainer.parallel.dp", "9"])
    assert missing_gpus(here, eight_gpus) == [
        "trainer.device: cuda for GPU 0 to 8, and this machine has 8 GPU(s), counted from 0; lower trainer.parallel.dp"
    ]


@pytest.mark.parametrize(
    ("model", "axes", "expected"),
    [
        ("Qwen3-8B", {"tp": 8, "cp": 4}, None),
        ("Qwen3-8B", {"tp": 3}, r"tp: 3 does not divide the model's 8 key-value heads; use 1, 2, 4 or 8"),
        ("Qwen3-8B", {"tp": 8, "cp": 8}, r"cp: 8 does not divide the 4 query heads of a rank; use 1, 2 or 4"),
        ("Qwen3-14B", {"cp": 16}, r"cp: 16 does not divide the 40 query heads of a rank; use 1, "),
        ("Qwen3-30B-A3B", {"tp": 2}, r"tp: 2, and the matrices of a qwen3_moe model cannot be split; .* raise dp"),
        ("Qwen3-30B-A3B", {"cp": 8, "dp": 4, "replicate": 2}, None),
    ],
)
def test_a_mesh_that_the_model_forbids_is_a_problem_of_the_plan(
    model: str, axes: dict[str, int], expected: str | None
) -> None:
    problems = problems_of(parse_config(GOOD | {"model": {"path": model}, "trainer": {"parallel": axes}}))
    if expected is None:
        assert problems == []
    else:
        assert re.match(rf"trainer\.parallel\.{expected}", "; ".join(problems))


@pytest.mark.parametrize(
    ("change", "axes", "expected"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, {"cp": 2}, ["trainer.parallel.cp: the model has layers"]),
        ({"sliding_window": 128}, {"cp": 2}, ["trainer.parallel.cp: the model has layers"]),
        ({"sliding_window": 128, "use_sliding_window": False}, {"cp": 2}, []),
        ({"model_type": "gemma"}, {"tp": 2}, ["trainer.parallel.tp: 2, and the matrices of a gemma model"]),
    ],
)
def test_config_json_shows_what_the_trainer_cannot_split(
    tmp_path: Path, change: dict[str, Any], axes: dict[str, int], expected: list[str]
) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    given = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, **shape, **change}
    (tmp_path / "config.json").write_text(json.dumps(given))
    problems = problems_of(parse_config(GOOD | {"model": {"path": str(tmp_path)}, "trainer": {"parallel": axes}}))
    assert [problem.startswith(start) for problem, start in zip(problems, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("dp", [1, 2])
def test_an_exchange_may_not_wait_as_long_as_the_call_that_it_is_part_of(dp: int) -> None:
    trainer = {"parallel": {"dp": dp}, "collective_timeout_s": 600}
    problems = problems_of(parse_config(GOOD | {"trainer": trainer}))
    assert len(problems) == dp - 1
    assert all(problem.startswith("trainer.collective_timeout_s: 600 s is not less than the 600 s") for problem in problems)


def test_deadlines_that_do_not_fit_leave_the_choice_of_the_mesh_as_it_is(eight_gpus: Path) -> None:
    flags = [*_LONG, "--trainer.parallel.cp", "auto", "--trainer.collective_timeout_s", "90000"]
    plan = plan_run(parse_config(GOOD | {"trainer": {"parallel": {"dp": "auto"}}}, flags), eight_gpus)
    assert plan.run.trainer.parallel.shape == MeshShape(dp=4, cp=2)
    assert any("collective_timeout_s" in problem for problem in plan.problems)
