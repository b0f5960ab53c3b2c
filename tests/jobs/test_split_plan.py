"""`cluster.split` becomes numbers before anything starts, and a run's idle time corrects it when it is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import RunConfig, parse_config
from agentrl.errors import ConfigError
from agentrl.jobs.plan.plan import describe_plan, resolved_yaml
from agentrl.jobs.plan.split import WINDOW_STEPS, advise_move, busy_windows, resolve_run, split_rows

GOOD: dict[str, Any] = {
    "workflow": "my:Agent",
    "tasks": {"path": "tasks.jsonl"},
    "model": {"path": "/models/Qwen3-1.7B"},
    "inference": {"backend": "sglang"},
    "trainer": {"dtype": "bfloat16", "gradient_checkpointing": True},
    "cluster": {"split": "auto"},
}


@pytest.fixture
def eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    for number in range(8):
        (tmp_path / "dev" / f"nvidia{number}").touch()
    return tmp_path


def gpus_of(run: RunConfig) -> tuple[int, int]:
    return run.trainer.parallel.shape.world, run.inference.servers


def test_an_automatic_split_uses_the_gpus_of_the_machine(eight_gpus: Path) -> None:
    run = resolve_run(parse_config(GOOD), eight_gpus)
    train, servers = gpus_of(run)
    assert train + servers == 8
    assert run.inference.device == f"cuda:{train}"
    assert resolve_run(parse_config(GOOD), eight_gpus) == run


def test_a_resolved_run_file_gives_the_same_split(eight_gpus: Path) -> None:
    run = resolve_run(parse_config(GOOD), eight_gpus)
    file = eight_gpus / "run.yaml"
    file.write_text(resolved_yaml(run))
    from agentrl.config import load_config

    assert gpus_of(resolve_run(load_config(file), eight_gpus)) == gpus_of(run)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--cluster.split={train: 2, rollout: 6}"], (2, 6)),
        (["--cluster.split={train: 2}"], (2, 6)),
        (["--cluster.split={rollout: 1}"], (7, 1)),
        (["--cluster.split={train: 4, rollout: 4}", "--inference.sglang_args=--tp-size 2"], (4, 2)),
        (["--cluster.split={train: 4, rollout: 12}", "--cluster.gpus=16", "--trainer.parallel.tp=2"], (4, 12)),
        (["--model.path=/models/unknown", "--cluster.split={train: 5, rollout: 3}"], (5, 3)),
    ],
)
def test_numbers_of_the_run_file_are_kept(eight_gpus: Path, flags: list[str], expected: tuple[int, int]) -> None:
    assert gpus_of(resolve_run(parse_config(GOOD, flags), eight_gpus)) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cluster.split={train: 2, rollout: 8}", "--cluster.gpus=8"], "of 8 GPUs: their sum must not exceed"),
        (["--cluster.split={train: 3, rollout: 4}", "--trainer.parallel.tp=2"], "train must be a multiple of 2"),
        (["--cluster.split={train: 8}"], "does not fit"),
        (["--inference.servers=3"], r"inference\.servers: cluster\.split sets"),
        (["--trainer.parallel.dp=3"], r"trainer\.parallel\.dp: cluster\.split sets it"),
        (["--inference.backend=embedded"], "divides GPUs between the trainer and SGLang servers"),
        (["--model.path=/models/unknown"], "the shape of /models/unknown is unknown"),
        (["--model.path=/models/Qwen3-8B", "--trainer.parallel.tp=1", "--cluster.gpus=2"], "2 GPUs cannot be split"),
        (["--cluster.launcher=ray"], r"cluster\.gpus: auto"),
    ],
)
def test_a_split_that_cannot_be_is_an_error_before_anything_starts(eight_gpus: Path, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_run(parse_config(GOOD, flags), eight_gpus)


@pytest.mark.parametrize("flags", [["--cluster.split={train: 0}"], ["--cluster.gpus=1"]])
def test_too_few_gpus_are_refused_when_the_file_is_read(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="expected auto or at least"):
        parse_config(GOOD, flags)


def test_the_plan_gives_the_split_and_the_reason() -> None:
    run = resolve_run(parse_config(GOOD, ["--cluster.gpus=16"]))
    [(name, text), (_, reason), *_] = split_rows(run)
    assert name == "split"
    assert "of 16" in text
    assert "s of rollouts" in reason
    assert "\nsplit " in describe_plan(run)


def test_a_run_without_a_split_has_no_row() -> None:
    assert split_rows(parse_config({**GOOD, "cluster": {}})) == []


def write_steps(run: RunConfig, shares: list[tuple[float, float]]) -> None:
    run.run_dir.mkdir(parents=True)
    lines = [
        {"event": "step", "step": number, "trainer_busy_share": trainer, "tokens_per_s": servers}
        for number, (trainer, servers) in enumerate(shares, 1)
    ]
    (run.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def idle_trainer(eight_gpus: Path, *flags: str) -> RunConfig:
    given = [f"--runs_dir={eight_gpus}/runs", "--cluster.split={train: 6, rollout: 2}", *flags]
    run = resolve_run(parse_config(GOOD, given), eight_gpus)
    write_steps(run, [(0.3, 1000.0)] * (2 * WINDOW_STEPS + 3))
    return parse_config(GOOD, given)


def test_a_run_whose_trainer_idles_advises_to_move_gpus_to_rollouts(eight_gpus: Path) -> None:
    run = resolve_run(idle_trainer(eight_gpus), eight_gpus)
    assert gpus_of(run) == (6, 2)
    move = advise_move(run, eight_gpus)
    assert move is not None
    assert move.better.train < 6
    assert "faster" in str(move)


def test_a_resumed_run_moves_gpus_only_where_the_run_file_allows_it(eight_gpus: Path) -> None:
    allowed = idle_trainer(eight_gpus, "--cluster.resize=at_restart", "--name=moves")
    assert gpus_of(resolve_run(allowed, eight_gpus)) == (6, 2)
    train, servers = gpus_of(resolve_run(allowed, eight_gpus, resumes=True))
    assert (train < 6, train + servers) == (True, 8)
    advised = idle_trainer(eight_gpus, "--name=stays")
    assert gpus_of(resolve_run(advised, eight_gpus, resumes=True)) == (6, 2)


def test_windows_count_whole_steps_from_the_end() -> None:
    steps = [{"tokens_per_s": 50.0, "trainer_busy_share": 0.0}] * 3
    steps += [{"tokens_per_s": 100.0, "trainer_busy_share": 0.5}] * WINDOW_STEPS
    [window] = busy_windows(steps)
    assert (window.trainer, window.servers) == (pytest.approx(0.5), pytest.approx(1.0))
    assert busy_windows(steps[:5]) == []
