"""`cluster.split` becomes numbers before anything starts, and a run's idle time corrects it when it is resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.commands.ending import describe_end, describe_interrupted_run
from agentrl.config import RunConfig, load_config, parse_config
from agentrl.errors import ConfigError
from agentrl.plan.model import model_of
from agentrl.plan.plan import plan_run
from agentrl.plan.resizing import WINDOW_STEPS, advise_driver, read_splits, record_split
from agentrl.plan.splits import split_of
from agentrl.plan.text import describe_plan, resolved_yaml
from agentrl_simulate.costs import gpu_sheet
from agentrl_simulate.plan.moves import advise_move, busy_windows

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


def resolve_run(run: RunConfig, root: Path, *, resumes: bool = False) -> RunConfig:
    return plan_run(run, root, resumes=resumes).run


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
    text = describe_plan(plan_run(parse_config(GOOD, ["--cluster.gpus=16"])))
    assert re.search(r"\nsplit +\d+ GPUs? train, \d+ serve of 16; .*\n +formula, .* s of rollouts", text)


def test_a_run_without_a_split_has_no_row() -> None:
    assert "\nsplit " not in describe_plan(plan_run(parse_config({**GOOD, "cluster": {}})))


def write_steps(
    run: RunConfig, shares: list[tuple[float, float]], *, driver: float = 0.3, without: tuple[str, ...] = ()
) -> None:
    """Append steps to the metrics of a run: busy share of the trainer, tokens/s of the servers."""
    file = run.run_dir / "metrics.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    done = len(file.read_text().splitlines()) if file.exists() else 0
    with file.open("a") as metrics:
        for number, (trainer, servers) in enumerate(shares, done + 1):
            line = {"event": "step", "step": number, "wall_s": float(number), "tokens_per_s": servers}
            line |= {"trainer_busy_share": trainer, "driver_busy_cores": driver}
            metrics.write(json.dumps({key: value for key, value in line.items() if key not in without}) + "\n")


def run_file(eight_gpus: Path, *flags: str) -> RunConfig:
    return parse_config(GOOD, [f"--runs_dir={eight_gpus}/runs", "--cluster.split={train: 6, rollout: 2}", *flags])


IDLE_TRAINER = [(0.3, 1000.0)] * (2 * WINDOW_STEPS + 3)
BUSY_TRAINER = [(1.0, 400.0)] * (2 * WINDOW_STEPS - 1) + [(1.0, 1000.0)]
BALANCED = [(1.0, 1000.0)] * (2 * WINDOW_STEPS)


def test_a_run_whose_trainer_idles_advises_to_move_gpus_to_rollouts(eight_gpus: Path) -> None:
    run = resolve_run(run_file(eight_gpus), eight_gpus)
    write_steps(run, IDLE_TRAINER)
    assert gpus_of(run) == (6, 2)
    move = advise_move(run, model_of(run.model), eight_gpus)
    assert move is not None
    assert move.better.train < 6
    assert "faster" in str(move)


def start(run: RunConfig, root: Path, step: int, *, resumes: bool) -> RunConfig:
    """Return the run as `train_run` starts it after a step, with its split recorded."""
    resolved = resolve_run(run, root, resumes=resumes)
    resolved.run_dir.mkdir(parents=True, exist_ok=True)
    record_split(resolved, step)
    return resolved


def test_a_resumed_run_starts_from_the_split_that_it_last_had(eight_gpus: Path) -> None:
    file = run_file(eight_gpus, "--cluster.resize=at_restart")
    first = start(file, eight_gpus, 0, resumes=False)
    assert gpus_of(first) == (6, 2)
    write_steps(first, IDLE_TRAINER)
    second = start(file, eight_gpus, 20, resumes=True)
    train, servers = gpus_of(second)
    assert (train < 6, train + servers) == (True, 8)
    write_steps(second, BALANCED)
    third = start(file, eight_gpus, 40, resumes=True)
    assert gpus_of(third) == (train, servers)
    write_steps(third, BUSY_TRAINER)
    fourth = start(file, eight_gpus, 60, resumes=True)
    assert gpus_of(fourth)[0] > train
    assert [(one.step, one.train) for one in read_splits(first.run_dir)] == [
        (0, 6),
        (20, train),
        (40, train),
        (60, gpus_of(fourth)[0]),
    ]


def test_the_resolved_file_of_a_run_moves_its_servers_with_the_split(eight_gpus: Path) -> None:
    first = start(run_file(eight_gpus, "--cluster.resize=at_restart"), eight_gpus, 0, resumes=False)
    assert first.inference.device == "cuda:6"
    write_steps(first, IDLE_TRAINER)
    file = first.run_dir / "config.yaml"
    file.write_text(resolved_yaml(first))
    second = start(load_config(file), eight_gpus, 20, resumes=True)
    train, servers = gpus_of(second)
    assert train < 6
    assert (second.inference.device, train + servers) == (f"cuda:{train}", 8)


def test_steps_under_an_earlier_split_advise_nothing(eight_gpus: Path) -> None:
    file = run_file(eight_gpus, "--cluster.resize=at_restart")
    write_steps(start(file, eight_gpus, 0, resumes=False), IDLE_TRAINER)
    second = start(file, eight_gpus, len(IDLE_TRAINER), resumes=True)
    assert advise_move(second, model_of(second.model), eight_gpus) is None
    write_steps(second, [(0.1, 1000.0)] * WINDOW_STEPS)
    assert resolve_run(file, eight_gpus, resumes=True) == second


def test_a_run_file_decides_where_it_forbids_the_move_or_the_number_of_gpus_has_changed(eight_gpus: Path) -> None:
    moved = run_file(eight_gpus, "--cluster.resize=at_restart")
    write_steps(start(moved, eight_gpus, 0, resumes=False), IDLE_TRAINER)
    assert gpus_of(start(moved, eight_gpus, 20, resumes=True)) != (6, 2)
    assert gpus_of(resolve_run(run_file(eight_gpus), eight_gpus, resumes=True)) == (6, 2)
    grown = run_file(eight_gpus, "--cluster.resize=at_restart", "--cluster.gpus=16")
    assert gpus_of(resolve_run(grown, eight_gpus, resumes=True)) == (6, 2)
    assert gpus_of(resolve_run(moved, eight_gpus)) == (6, 2)


def test_a_record_of_something_else_is_named(eight_gpus: Path) -> None:
    run = start(run_file(eight_gpus, "--cluster.resize=at_restart"), eight_gpus, 0, resumes=False)
    (run.run_dir / "splits.json").write_text('{"splits": 6}')
    with pytest.raises(ConfigError, match=r"splits\.json: expected the splits of the run"):
        resolve_run(run, eight_gpus, resumes=True)


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        ([], "set rollout.runner: processes and rollout.workers"),
        (["--rollout.runner=processes", "--rollout.workers=2"], "make fewer and longer ones"),
    ],
)
def test_a_driver_without_time_is_named_in_place_of_another_split(eight_gpus: Path, flags: list[str], change: str) -> None:
    run = resolve_run(run_file(eight_gpus, *flags), eight_gpus)
    write_steps(run, IDLE_TRAINER, driver=1.02)
    assert advise_move(run, model_of(run.model), eight_gpus) is None
    text = advise_driver(run)
    assert text is not None
    assert text.startswith("1.0 cores busy")
    assert change in text
    assert f"driver      {text}" in describe_end(run, None)


def test_an_interrupted_run_is_described_with_the_split_that_it_had(eight_gpus: Path) -> None:
    given = parse_config(GOOD, [f"--runs_dir={eight_gpus}/runs", "--trainer.parallel.dp=auto", "--cluster.gpus=8"])
    run = start(given, eight_gpus, 0, resumes=False)
    write_steps(run, IDLE_TRAINER)
    (run.run_dir / "config.yaml").write_text(resolved_yaml(run))
    assert f"move from ({split_of(run)}) to" in describe_interrupted_run(given)


def test_a_driver_with_time_left_is_not_named(eight_gpus: Path) -> None:
    run = resolve_run(run_file(eight_gpus), eight_gpus)
    write_steps(run, IDLE_TRAINER, driver=0.8)
    assert advise_driver(run) is None


def test_steps_that_do_not_say_how_busy_the_trainer_was_are_no_idle_time(eight_gpus: Path) -> None:
    run = resolve_run(run_file(eight_gpus), eight_gpus)
    write_steps(run, IDLE_TRAINER, without=("trainer_busy_share", "driver_busy_cores"))
    assert advise_move(run, model_of(run.model), eight_gpus) is None
    assert advise_driver(run) is None


LONG = ["--model.path=/models/Qwen3-32B", "--cluster.gpus=64", "--inference.sglang_args=--tp-size 4"]
AXES = ["--trainer.parallel.tp=auto", "--trainer.parallel.cp=auto"]


def test_split_and_mesh_are_decided_together(eight_gpus: Path) -> None:
    flags = [*LONG, "--trainer.microbatch_tokens=65536", *AXES]
    plan = plan_run(parse_config(GOOD, flags), eight_gpus)
    run, mesh = plan.run, plan.run.trainer.parallel.shape
    assert mesh.cp * mesh.tp > 1
    assert mesh.world + 4 * run.inference.servers == 64
    assert plan.memory is not None
    assert plan.memory.trainer.total <= gpu_sheet("h100").memory
    alone = resolve_run(parse_config(GOOD, [*flags, "--cluster.split={train: 32, rollout: 32}"]), eight_gpus)
    assert alone.trainer.parallel.shape.world == 32
    file = eight_gpus / "run.yaml"
    file.write_text(resolved_yaml(run))
    assert resolve_run(load_config(file), eight_gpus) == load_config(file)


def test_a_mesh_is_not_larger_than_the_gpus_that_train_need(eight_gpus: Path) -> None:
    run = resolve_run(parse_config(GOOD, ["--model.path=/models/Qwen3-8B", *AXES]), eight_gpus)
    assert (run.trainer.parallel.tp, run.trainer.parallel.cp) == (1, 1)
    assert run.trainer.parallel.shape.world > 1


def test_a_named_split_on_which_no_mesh_fits_is_an_error(eight_gpus: Path) -> None:
    run = parse_config(GOOD, [*LONG, *AXES, "--cluster.split={train: 4, rollout: 60}"])
    with pytest.raises(ConfigError, match=r"auto finds no mesh of 4 GPU\(s\) \(h100\) .* raise cluster\.split\.train"):
        resolve_run(run, eight_gpus)


def test_windows_count_whole_steps_from_the_end() -> None:
    steps = [{"tokens_per_s": 50.0, "trainer_busy_share": 0.0}] * 3
    steps += [{"tokens_per_s": 100.0, "trainer_busy_share": 0.5}] * WINDOW_STEPS
    [window] = busy_windows(steps)
    assert (window.trainer, window.servers) == (pytest.approx(0.5), pytest.approx(1.0))
    assert busy_windows(steps[:5]) == []
