"""The GPU examples are valid runs, and their plans say what a machine like this one lacks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.inference.config import tensor_parallel
from agentrl.plan.memory import GIB
from agentrl.plan.plan import plan_run
from tests.support.cli import status_here

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "gpu").glob("*.yaml"))


def test_the_command_prints_a_plan_and_last_what_this_machine_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert status_here("train", str(EXAMPLES[0]), "--dry-run") == 1
    shown = capsys.readouterr().out
    assert "not on this machine: model.path: there is no directory /models/" in "".join(shown.splitlines()[-4:])
    assert shown.splitlines()[-1].startswith("not on this machine: ")
    assert re.search(r"^memory +trainer about [\d.]+ GiB", shown, re.M)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_what_the_comment_says_fits_does_by_the_estimate(path: Path) -> None:
    run = load_config(path)
    plan = plan_run(run)
    stated = re.search(r"of (\d+) GB", path.read_text())
    assert plan.memory is not None
    assert stated is not None
    gpu = int(stated[1]) * 1e9
    trainer, server = plan.memory.trainer, plan.memory.server
    fraction = float(run.inference.sglang_args[-1])
    if plan.shared_gpus:
        assert trainer.total + fraction * gpu < gpu
    assert trainer.total < gpu
    assert server.fixed + 16 * (run.inference.max_context_tokens or 0) * server.kv_per_token < fraction * gpu
    assert run.trainer.microbatch_tokens >= (run.inference.max_context_tokens or 0)
    assert re.search(rf"about {trainer.total / GIB:.0f} GiB", path.read_text())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_batch_is_several_minibatches_of_the_stated_size_so_that_clipping_acts(path: Path) -> None:
    run = load_config(path)
    episodes = run.algorithm.groups_per_step * run.algorithm.group_size
    assert run.trainer.minibatches > 1
    assert f"minibatches of {episodes // run.trainer.minibatches} episodes" in path.read_text()


def test_there_are_examples_from_one_to_512_gpus() -> None:
    names = " ".join(path.stem for path in EXAMPLES)
    assert all(size in names for size in ("0.6b", "1.7b", "4b", "8b", "32b", "235b-a22b"))
    assert all(count in names for count in ("one-gpu", "eight-gpus", "64-gpus", "512-gpus"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_trainer_and_servers_take_the_gpus_that_the_name_states(path: Path) -> None:
    plan = plan_run(load_config(path))
    run = plan.run
    stated = {"one": 1, "eight": 8, "64": 64, "512": 512}[path.stem.split("-")[-2]]
    assert [problem for problem in plan.problems if problem.startswith("trainer.")] == []
    servers = run.inference.servers * tensor_parallel(run.inference)
    assert run.trainer.parallel.shape.world + servers - len(plan.shared_gpus) == stated


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_no_example_is_refused(path: Path) -> None:
    assert plan_run(load_config(path)).problems == ()


def test_the_table_of_the_guide_gives_the_memory_of_the_files_that_it_names() -> None:
    page = (ROOT / "docs" / "howto" / "gpus.md").read_text()
    named = re.findall(r"\[(\d+) GiB\]\(\.\./\.\./(examples/gpu/[\w.-]+\.yaml)\)", page)
    assert len(named) == 12
    for stated, file in named:
        memory = plan_run(load_config(ROOT / file)).memory
        assert memory is not None
        assert stated == f"{memory.trainer.total / GIB:.0f}", file
