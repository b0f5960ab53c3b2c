"""`auto` in `trainer.parallel` becomes numbers before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config import parse_config
from agentrl.errors import ConfigError
from agentrl.jobs.plan.mesh import with_mesh
from agentrl.trainer.parallel.shape import MeshShape

GOOD: dict[str, Any] = {"workflow": "my:Agent", "tasks": {"path": "tasks.jsonl"}, "model": {"path": "/models/Qwen3-4B"}}


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
        (["--trainer.parallel.dp", "3", "--trainer.parallel.tp", "auto"], MeshShape(dp=3)),
    ],
)
def test_dp_auto_takes_the_gpus_that_servers_and_other_axes_leave(
    eight_gpus: Path, flags: list[str], expected: MeshShape
) -> None:
    run = parse_config(GOOD | {"trainer": {"parallel": {"dp": "auto"}}}, flags)
    assert with_mesh(run, eight_gpus).trainer.parallel.shape == expected


def test_a_machine_without_gpus_trains_in_one_process(tmp_path: Path) -> None:
    run = parse_config(GOOD | {"trainer": {"parallel": {"dp": "auto"}}})
    assert with_mesh(run, tmp_path).trainer.parallel.shape == MeshShape()


def test_a_number_of_gpus_that_the_other_axes_do_not_divide_is_an_error(eight_gpus: Path) -> None:
    run = parse_config(GOOD | {"trainer": {"parallel": {"dp": "auto", "tp": 3}}})
    with pytest.raises(ConfigError, match=r"trainer\.parallel\.dp: auto, and the trainer has 8 GPU\(s\), which .* of 3"):
        with_mesh(run, eight_gpus)


def test_an_axis_that_is_still_auto_has_no_shape() -> None:
    run = parse_config(GOOD | {"trainer": {"parallel": {"dp": "auto", "cp": "auto"}}})
    with pytest.raises(ConfigError, match=r"^trainer\.parallel\.dp, trainer\.parallel\.cp: auto is resolved by"):
        _ = run.trainer.parallel.shape


@pytest.mark.parametrize("given", ["0", "4097", "many", "1.5"])
def test_an_axis_is_a_number_or_auto(given: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.parallel\.tp"):
        parse_config(GOOD, ["--trainer.parallel.tp", given])
