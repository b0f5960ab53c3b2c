"""The script for one GPU: its pieces, and its smallest form on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl_workflows.pretrained_demo.recipe import HARDER
from benchmarks.gpu_pretrained import joined, main, recipe_for, split
from tests.workflows.pretrained_demo.conftest import BYTES


def test_a_file_comes_back_from_its_pieces(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    pieces = split(file, tmp_path / "pieces", piece_bytes=300)
    assert [piece.stat().st_size for piece in pieces] == [300, 300, 300, 124]
    whole = joined(tmp_path / "pieces", tmp_path / "out")
    assert (whole.name, whole.read_bytes()) == ("m.gguf", content)
    before = whole.stat().st_mtime_ns
    assert joined(tmp_path / "pieces", tmp_path / "out").stat().st_mtime_ns == before  # so its import is found again
    assert joined(file, tmp_path / "out") == file


def test_a_missing_piece_is_named(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"abcdef")
    split(file, tmp_path / "pieces", piece_bytes=2)[1].unlink()
    with pytest.raises(ConfigError, match=r"got m\.gguf\.000, m\.gguf\.002"):
        joined(tmp_path / "pieces", tmp_path / "out")
    with pytest.raises(ConfigError, match="got none"):
        joined(tmp_path / "nowhere", tmp_path / "out")


def test_a_gpu_gets_larger_groups_and_more_steps_of_the_harder_task(tmp_path: Path) -> None:
    for smoke in (False, True):
        recipe = recipe_for("cuda", smoke=smoke, model=tmp_path)
        flags = [part for key, value in recipe.overrides.items() for part in (f"--{key}", str(value))]
        run = load_config(recipe.run_file, [*flags, "--model.path", "m"])
        assert (run.inference.device, run.trainer.device, run.trainer.dtype) == ("cuda", "cuda", "bfloat16")
        assert run.sync.method == "disk"
        if not smoke:
            assert run.algorithm.group_size * run.algorithm.groups_per_step == 256
            assert run.engine.steps > load_config(HARDER.run_file, []).engine.steps
            assert run.tasks.factory_args["operations"] == [1, 2]


@pytest.mark.starts
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
def test_the_script_runs_on_a_cpu_and_prints_success_and_speed(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "cpu", "--smoke", "--model", str(llama), "--runs-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["gpu_pretrained", *words, *BYTES, "--trainer.dtype", "float32"])
    main()
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["steps"] == 1
    assert row["sampled_tokens_per_s"] > 0
    assert {"sampled_before", "sampled_after", "trained_tokens_per_s", "wall_seconds"} <= row.keys()
