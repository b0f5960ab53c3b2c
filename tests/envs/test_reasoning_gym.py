"""Puzzles of the real reasoning-gym: made again in the worker, scored by the package, and never in two splits."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.data.load import load_tasks
from agentrl.data.stream import TaskStream
from agentrl.env import EnvironmentPool, EpisodeEnd
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.types import Task
from agentrl_envs.reasoning_gym import ReasoningGymEnvironment, ReasoningStream, load_scorer, reasoning_tasks
from agentrl_workflows.environment import PlayEnvironment
from tests.rollout.harness import episode, make_renderer, says

pytestmark = [
    pytest.mark.external,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::SyntaxWarning", "default::UserWarning"),
]
pytest.importorskip("reasoning_gym", reason="the extra agentrl[reasoning]")
FAMILIES = ["chain_sum", "gcd", "number_sorting", "maze"]


@pytest.fixture
def anyio_backend() -> str:
    """The workers are processes; one backend is enough for what they say."""
    return "asyncio"


def test_every_answer_scores_full_and_an_empty_one_does_not_in_most_families() -> None:
    score = load_scorer()
    for family in [*FAMILIES, "arc_agi", "acre", "sokoban", "word_ladder", "polynomial_equations", "zebra_puzzles"]:
        for task in reasoning_tasks([family], size=2, seed=11):
            puzzle = (family, None, 11, task["number"], task["question"])
            assert score(*puzzle, task["answer"]) == 1.0, family
            assert (score(*puzzle, "") or 0.0) <= 0.05, family


def test_training_and_held_out_puzzles_share_no_question_whatever_their_seeds() -> None:
    train = [task for seed in (0, 1) for task in reasoning_tasks(FAMILIES, size=80, seed=seed)]
    held_out = [task for seed in (0, 1) for task in reasoning_tasks(FAMILIES, size=40, seed=seed, split="held_out")]
    assert {task["question"] for task in train}.isdisjoint(task["question"] for task in held_out)
    assert [task["family"] for task in train[:4]] == FAMILIES
    for seed in (0, 1):
        own = [task["question"] for task in train if task["seed"] == seed]
        assert len(set(own)) == len(own) == 80
    assert reasoning_tasks(FAMILIES, size=8, seed=3) == reasoning_tasks(FAMILIES, size=8, seed=3)


def test_levels_rise_from_the_first_task_to_the_last() -> None:
    tasks = reasoning_tasks(["chain_sum"], size=41, levels=(0, 4))
    levels = [task["level"] for task in tasks]
    assert (levels[0], levels[20], levels[40]) == (0, 2, 4)
    assert levels == sorted(levels)
    first, last = (sum(len(task["question"]) for task in part) for part in (tasks[:5], tasks[-5:]))
    assert last > first


@pytest.mark.parametrize(
    ("families", "levels", "message"),
    [
        (["graph_color"], None, "does not accept the answer that comes with the puzzle, 'None'"),
        (["rush_hour"], None, "leave the family out"),
        (["nope"], None, "has no family 'nope'"),
        (["composite"], None, "has no family 'composite'"),
        (["acre"], (0, 1), "acre has no levels"),
        (["chain_sum"], (0, 99), "chain_sum has the levels 0 to 10, got 99"),
        (["caesar_cipher"], (3, 3), "caesar_cipher cannot be used at level 3: rotation must be"),
    ],
)
def test_a_family_that_cannot_be_trained_on_is_refused(
    families: list[str], levels: tuple[int, int] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        reasoning_tasks(families, size=2, levels=levels)


def test_a_stream_makes_each_puzzle_when_it_is_drawn_and_none_that_is_held_out() -> None:
    stream, again = (ReasoningStream(["chain_sum", "gcd"], level=1, seed=3) for _ in range(2))
    assert isinstance(stream, TaskStream)
    tasks = [stream.task(index) for index in range(40)]
    assert again.task(39) == tasks[39]
    assert [task["family"] for task in tasks[:3]] == ["chain_sum", "gcd", "chain_sum"]
    held_out = reasoning_tasks(["chain_sum", "gcd"], size=40, split="held_out", levels=(1, 1), seed=3)
    assert {task["question"] for task in tasks}.isdisjoint(task["question"] for task in held_out)
    assert stream.task(10_000_000)["seed"] > 3
    with pytest.raises(ConfigError, match="chain_sum has the levels 0 to 10, got 99"):
        ReasoningStream(["chain_sum"], level=99)
    with pytest.raises(ConfigError, match="accepts none of the answers"):
        ReasoningStream(["graph_color"]).task(0)


def test_more_puzzles_than_a_family_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="tower_of_hanoi has not enough train questions"):
        reasoning_tasks(["tower_of_hanoi"], size=10_000)


async def test_a_workflow_plays_a_puzzle_and_gets_the_package_s_score(tmp_path: Path) -> None:
    [task] = reasoning_tasks(["chain_sum"], size=1)
    workflow = PlayEnvironment("agentrl_envs.reasoning_gym:ReasoningGymEnvironment", {"instructions": ""})
    renderer = make_renderer(tmp_path)
    trajectory = await episode(workflow, renderer, script=says(f"<answer>{task['answer']}</answer>"), task=task)
    assert trajectory.failure is None
    answered = trajectory.turns[0].message["content"].endswith("</answer>")  # the tiny tokenizer may need more tokens
    assert trajectory.metrics["reasoning.answered"] == answered


async def test_answers_are_scored_in_workers_that_all_instances_share() -> None:
    tasks = reasoning_tasks(["chain_sum", "polynomial_equations"], size=4)
    async with EnvironmentPool(ReasoningGymEnvironment, name="reasoning") as pool:
        for task in tasks:
            for content, reward, answered in (
                (f"Hm, <answer>1</answer>, no, <answer> {task['answer']} </answer>", 1.0, 1.0),
                ("<answer>no idea</answer>", 0.0, 1.0),
                (task["answer"], 0.0, 0.0),
                ("<answer>" + "9" * 30_000 + "</answer>", 0.0, 0.0),
            ):
                async with pool.episode(task, seed=0) as running:
                    step = await running.step({"role": "assistant", "content": content})
                assert step.end is EpisodeEnd.TERMINATED
                assert step.reward == pytest.approx(reward, abs=0.02)
                assert step.metrics == {"success": float(reward == 1.0), "reasoning.answered": answered}


async def test_the_reference_of_a_task_scores_full() -> None:
    tasks = reasoning_tasks(["chain_sum", "gcd", "word_sorting", "sudoku", "number_sorting", "base_conversion"], size=12)
    async with EnvironmentPool(ReasoningGymEnvironment, name="reasoning") as pool:
        for task in tasks:
            async with pool.episode(task, seed=0) as running:
                step = await running.step({"role": "assistant", "content": task["reference"]})
            assert step.reward == 1.0, task


async def test_a_puzzle_that_this_version_does_not_make_is_a_fault() -> None:
    [task] = reasoning_tasks(["gcd"], size=1)
    changed = Task(id=task.id, data={**task.data, "question": "Another one?"})
    async with EnvironmentPool(ReasoningGymEnvironment, name="reasoning").episode(changed, seed=0) as running:
        with pytest.raises(EnvironmentFault, match="makes another puzzle"):
            await running.step({"role": "assistant", "content": "<answer>1</answer>"})


async def test_a_scorer_that_raises_is_a_fault_and_no_reward() -> None:
    [task] = reasoning_tasks(["gcd"], size=1)
    broken = Task(id=task.id, data={**task.data, "level": 99})
    async with EnvironmentPool(ReasoningGymEnvironment, name="reasoning").episode(broken, seed=0) as running:
        with pytest.raises(EnvironmentFault, match="the function raised"):
            await running.step({"role": "assistant", "content": "<answer>1</answer>"})


def test_a_run_file_takes_puzzles_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("""
workflow: agentrl_workflows.environment:PlayEnvironment
workflow_args: {environment: "agentrl_envs.reasoning_gym:ReasoningGymEnvironment"}
tasks:
  factory: agentrl_envs.reasoning_gym:reasoning_tasks
  factory_args: {families: [chain_sum, gcd], size: 20, levels: [0, 3]}
  eval: {factory_args: {families: [chain_sum, gcd], size: 10, split: held_out, levels: [3, 3]}}
  shuffle: false
model: {path: /models/none}
""")
    tasks = load_tasks(load_config(file).tasks)
    assert [task["level"] for task in tasks.train.finite[::19]] == [0, 3]
    assert {task["level"] for task in tasks.evaluation} == {3}
