"""Compares the plans of ten runs with stored ones, byte by byte; `python -m tests.plan.test_goldens` stores them again."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.plan import plan as plan_module
from agentrl.plan.memory import GIB
from agentrl.plan.plan import plan_run
from agentrl.plan.text import describe_plan

ROOT = Path(__file__).parents[2]
GOLDENS = Path(__file__).parent / "goldens"
_AUTO = ["--cluster.split=auto", "--inference.servers=1", "--trainer.parallel={dp: auto, tp: auto, cp: auto}"]
RUNS: dict[str, tuple[str, list[str]]] = {
    "no-shape": ("examples/calculator_agent.yaml", ["--model.path=/nowhere/warm-start"]),
    "one-gpu": ("examples/gpu/qwen3-1.7b-one-gpu.yaml", []),
    "eight-gpus": ("examples/gpu/qwen3-8b-eight-gpus.yaml", []),
    "64-gpus": ("examples/gpu/qwen3-32b-64-gpus.yaml", []),
    "mixture-of-experts": ("examples/gpu/qwen3-235b-a22b-512-gpus.yaml", []),
    "python-tool": ("examples/gpu/qwen3-8b-math-python-eight-gpus.yaml", []),
    "ray": ("examples/gpu/qwen3-1.7b-one-gpu.yaml", ["--cluster.launcher=ray"]),
    "auto-split": ("examples/gpu/qwen3-32b-64-gpus.yaml", [*_AUTO, "--cluster.gpus=64"]),
    "no-room-for-a-snapshot": (
        "examples/gpu/qwen3-32b-64-gpus.yaml",
        ["--trainer.snapshot=host", "--cluster.launcher=local"],
    ),
    "mesh-that-does-not-fit": ("examples/gpu/qwen3-8b-eight-gpus.yaml", ["--trainer.parallel.tp=3"]),
}


def plan_text(name: str) -> str:
    """Return the plan of a run on a machine without GPUs of which 64 GiB are free, and what no machine can do."""
    file, flags = RUNS[name]
    plan = plan_run(load_config(file, flags), Path("/nowhere"))
    snapshot = plan.memory.snapshot.problems(plan.run.trainer) if plan.memory else []
    return "\n".join([describe_plan(plan), *plan.problems, *plan.missing_gpus, *snapshot, ""])


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix what the plan takes from the machine."""
    monkeypatch.chdir(ROOT)
    for variable in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(plan_module, "free_memory", lambda: 64 * GIB)


@pytest.mark.parametrize("name", RUNS)
def test_the_plan_of_a_run_is_the_stored_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    assert plan_text(name) == (GOLDENS / f"{name}.txt").read_text()


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        settle(patch)
        for each in RUNS:
            (GOLDENS / f"{each}.txt").write_text(plan_text(each))
