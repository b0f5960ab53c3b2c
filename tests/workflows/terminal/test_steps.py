"""Tasks of several steps are played one after the other in the same files, and each step has tests of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.commands.validate import FindingKind, TaskValidation
from agentrl.config import parse_config
from agentrl.errors import ConfigError
from agentrl.types import StopReason, Trajectory
from agentrl_sandbox.harbor.task import read_harbor_folder
from agentrl_testing import call, play_async
from agentrl_workflows.terminal import TerminalAgent
from agentrl_workflows.terminal.steps import combined_verdict
from agentrl_workflows.terminal.verifier import TaskVerdict

pytestmark = [pytest.mark.anyio]
ARGUMENTS = {"images": {"debian:12": None}}
REWARD = "/logs/verifier/reward.txt"
FIRST = f'[ "$(cat one.txt)" = 1 ]; echo $((1 - $?)) > {REWARD}\n'
SECOND = f'[ "$(cat one.txt two.txt)" = "1\n2" ]; echo $((1 - $?)) > {REWARD}\n'


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def write_task(folder: Path, top: str = "", first: str = "", second: str = "") -> Path:
    for name, ask, test in (("first", "Write one.", FIRST), ("second", "Write two.", SECOND)):
        for part in ("tests", "solution", "workdir"):
            (folder / "steps" / name / part).mkdir(parents=True)
        (folder / "steps" / name / "instruction.md").write_text(f"{ask}\n")
        (folder / "steps" / name / "tests" / "test.sh").write_text(test)
    (folder / "steps" / "first" / "solution" / "solve.sh").write_text("echo 1 > one.txt\n")
    (folder / "steps" / "second" / "solution" / "solve.sh").write_text("cat hint.txt > two.txt\n")
    (folder / "steps" / "second" / "workdir" / "setup.sh").write_text("ls /app > /app/seen; echo 2 > hint.txt\n")
    steps = f'[[steps]]\nname = "first"\n{first}\n[[steps]]\nname = "second"\n{second}\n'
    settings = f'schema_version = "1.4"\n{top}\n{steps}[agent]\ntimeout_sec = 60\n'
    (folder / "task.toml").write_text(settings)
    return folder


async def played(folder: Path, *scripts: str) -> Trajectory:
    task = {"question": "Write one.", "folder": str(folder)}
    replies = [reply for script in scripts for reply in (call("bash", command=script), "Done.")]
    return await play_async(TerminalAgent, task, replies, workflow_args=ARGUMENTS)


@pytest.mark.starts
async def test_each_step_asks_in_the_files_of_the_one_before_it_and_the_reward_is_the_mean(tmp_path: Path) -> None:
    folder = write_task(tmp_path)
    both = await played(folder, "echo 1 > one.txt", "[ -e setup.sh ] && grep -qx one.txt seen && echo 2 > two.txt")
    assert (both.final_reward, both.stop_reason) == (1.0, StopReason.COMPLETED), both.failure
    half = await played(folder, "echo 1 > one.txt", "true")
    assert half.final_reward == 0.5
    assert (
        await played(write_task(tmp_path / "last", 'multi_step_reward_strategy = "final"'), "true", "true")
    ).final_reward == 0


@pytest.mark.starts
@pytest.mark.parametrize("goes_on", [True, False])
async def test_the_conversation_of_the_step_before_goes_on_where_the_task_says_so(tmp_path: Path, goes_on: bool) -> None:
    second = f'dependencies = ["first"]\ninherit_prior_session = {str(goes_on).lower()}'
    both = await played(write_task(tmp_path, second=second), "echo 1 > one.txt", "cat hint.txt > two.txt")
    assert both.final_reward == 1.0, both.failure
    assert both.path(3) == ([0, 1, 2, 3] if goes_on else [2, 3])


def test_a_step_that_depends_on_a_later_one_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"steps\.first\.dependencies: expected names of steps above it, got second"):
        read_harbor_folder(write_task(tmp_path, first='dependencies = ["second"]'))


@pytest.mark.starts
async def test_a_step_that_has_to_reach_something_is_the_last_one_where_it_does_not(tmp_path: Path) -> None:
    folder = write_task(tmp_path, first="min_reward = 0.5")
    missed = await played(folder, "true")
    assert (missed.final_reward, len(missed.turns)) == (0.0, 2), missed.failure
    met = await played(folder, "echo 1 > one.txt", "cat hint.txt > two.txt")
    assert (met.final_reward, len(met.turns)) == (1.0, 4), met.failure


@pytest.mark.starts
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("for p in cat bash; do printf '#!/bin/sh\\necho 1' > /usr/bin/$p; done", "true"),
        (f"mkdir -p /logs/verifier /tests; echo 1 > {REWARD}; echo 'echo 1 > {REWARD}' > /tests/test.sh", "true"),
        (f"setsid bash -c 'while true; do mkdir -p /logs/verifier; echo 1 > {REWARD}; done' >/dev/null 2>&1 &", "true"),
        ("printf '#!/bin/sh\\necho 1' > /usr/bin/cat; chmod +x /usr/bin/cat", "rm -rf /app; ln -s /tests /app"),
        ("printf '#!/bin/sh\\ntrue' > /usr/bin/tar; chmod 755 /usr/bin/tar", "true"),
    ],
)
async def test_agents_that_attack_the_tests_of_a_later_step_get_nothing(tmp_path: Path, first: str, second: str) -> None:
    paid = await played(write_task(tmp_path), first, second)
    assert paid.final_reward == 0.0, paid.failure


@pytest.mark.starts
async def test_an_agent_that_keeps_a_later_step_from_beginning_is_not_paid_for_it(tmp_path: Path) -> None:
    folder = write_task(tmp_path)
    (folder / "steps" / "second" / "workdir" / "setup.sh").write_text("[ ! -e stop ]\n")
    paid = await played(folder, "echo 1 > one.txt; touch stop")
    assert (paid.final_reward, paid.metrics["verifier_broken"]) == (0.5, 1), paid.failure


@pytest.mark.starts
async def test_validate_plays_the_solution_of_each_step_and_names_the_words_of_one_that_fails(tmp_path: Path) -> None:
    write_task(tmp_path / "good")
    bad = write_task(tmp_path / "bad")
    (bad / "steps" / "second" / "tests" / "test.sh").write_text(f"echo no two here; echo 0 > {REWARD}")
    run = {
        "workflow": "agentrl_workflows.terminal:TerminalAgent",
        "workflow_args": ARGUMENTS,
        "tasks": {"path": str(tmp_path), "format": "harbor"},
        "model": {"path": "there-is-none"},
    }
    report = await TaskValidation(parse_config(run)).check()
    [finding] = [finding for finding in report.findings if finding.kind is not FindingKind.DUPLICATE]
    assert (finding.kind, finding.where) == (FindingKind.REFERENCE, "train task bad")
    assert finding.detail.endswith("expected 1; the tests say: step second: no two here")
    assert report.counts["train"].full == 1


def test_the_verdict_over_steps_is_the_mean_of_each_number_or_the_last_one(tmp_path: Path) -> None:
    harbor = read_harbor_folder(write_task(tmp_path / "mean"))
    verdicts = [TaskVerdict(reward=1.0, parts={"a": 1.0}), TaskVerdict(reward=0.5, parts={"b": 1.0}, said="half")]
    mean = combined_verdict(harbor, verdicts)
    assert (mean.reward, dict(mean.parts), mean.last_words) == (0.75, {"a": 0.5, "b": 0.5}, "step second: half")
    last = read_harbor_folder(write_task(tmp_path / "final", 'multi_step_reward_strategy = "final"'))
    assert (combined_verdict(last, verdicts).reward, dict(combined_verdict(last, verdicts).parts)) == (0.5, {"b": 1.0})
    broken = combined_verdict(harbor, [verdicts[0], TaskVerdict(reward=0.0, broken="nothing")])
    assert (broken.reward, broken.broken) == (0.5, "step second: nothing")


def test_a_step_has_what_its_task_has_and_its_own(tmp_path: Path) -> None:
    first = 'min_reward = {style = 0.5}\nagent = {timeout_sec = 5}\nverifier = {timeout_sec = 7, env = {B = "2"}}'
    folder = write_task(tmp_path, '[verifier]\nenv = {A = "1"}', first)
    (folder / "tests").mkdir()
    (folder / "tests" / "shared.py").write_text("")
    one, two = read_harbor_folder(folder).steps
    assert (one.instruction, one.agent_timeout_s, one.verifier_timeout_s) == ("Write one.", 5, 7)
    assert (two.instruction, two.agent_timeout_s, two.verifier_timeout_s) == ("Write two.", 60, 600)
    assert (one.verifier_env, two.verifier_env, one.min_reward) == ({"A": "1", "B": "2"}, {"A": "1"}, {"style": 0.5})
    assert set(one.files("tests")) == {"test.sh", "shared.py"}
    assert (set(two.files("workdir")), one.key) == ({"setup.sh"}, f"{folder}#first")
