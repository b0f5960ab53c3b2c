"""The package `harbor`, the judge of what a valid task folder is, takes the folders that agentrl writes.

It needs Python 3.12, so it lives in an environment of its own: `HARBOR_PYTHON=.../bin/python` names its interpreter.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl_sandbox.harbor.task import read_harbor_folder
from agentrl_workflows.terminal.steps import combined_verdict
from agentrl_workflows.terminal.verifier import TaskVerdict
from agentrl_workflows.terminal_commits.commits import History
from agentrl_workflows.terminal_commits.folder import CommitTask, TaskOptions
from agentrl_workflows.terminal_tasks.catalog import bundled_problems
from agentrl_workflows.terminal_tasks.problem import write_problems
from tests.support.commits import AFTER, BEFORE, make_repository
from tests.support.harbor_package import HARBOR_PYTHON, asked_of_harbor

JUDGE = """
import json, sys
from pathlib import Path
from harbor.models.task.task import Task
print(json.dumps({folder: Task(Path(folder)).instruction for folder in sys.argv[1:]}))
"""


@pytest.mark.starts
@pytest.mark.skipif(HARBOR_PYTHON is None, reason="HARBOR_PYTHON names no Python 3.12 with harbor")
def test_harbor_reads_every_bundled_folder_and_those_of_the_generator(tmp_path: Path) -> None:
    folders = write_problems(bundled_problems(), tmp_path / "bundled")
    history = History(make_repository(tmp_path / "repository", BEFORE, AFTER))
    task = CommitTask(history, history.commit("HEAD~"), history.commit("HEAD"), TaskOptions(feedback=True))
    task.write(tmp_path / "made", {"tests.test_purse.PurseTest.test_empty": "failed"})
    names = [*map(str, folders), str(tmp_path / "made")]
    found = json.loads(asked_of_harbor(JUDGE, *names))
    assert {name: text.strip() for name, text in found.items()} == {
        name: (Path(name) / "instruction.md").read_text().strip() for name in names
    }


PLACES = """
import json, sys
from pathlib import Path
from harbor.models.task.task import Task
from harbor.models.task.verifier_mode import resolve_verifier_environment_definition
from harbor.models.task.artifacts import with_convention_entry

def place(folder):
    task = Task(folder)
    found = resolve_verifier_environment_definition(task.config, task.paths)
    if found is None:
        return None
    artifacts = with_convention_entry(task.config.artifacts, convention_source="/logs/artifacts")
    sources = [entry.source for entry in artifacts]
    return [found.config.docker_image, found.directory.name, found.bundled_tests, found.config.env, sources]

print(json.dumps({folder: place(Path(folder)) for folder in sys.argv[1:]}))
"""
SETTINGS = {
    "shared": "[verifier]\n",
    "copy": '[verifier]\nenvironment_mode = "separate"\n[environment.env]\nA = "1"\n',
    "named": '[environment]\ndocker_image = "own:1"\n[verifier.environment]\ndocker_image = "judge:1"\nenv = {B = "2"}\n',
    "copy of a named one": '[environment]\ndocker_image = "own:1"\n[verifier.environment]\nenv = {B = "2"}\n',
    "built": '[environment]\ndocker_image = "own:1"\n[verifier]\nenvironment_mode = "separate"\n',
    "collects": '[verifier.environment]\n[[verifier.collect]]\ncommand = "true"\n',
    "healthy": '[verifier.environment]\n[environment.healthcheck]\ncommand = "true"\n',
}


@pytest.mark.starts
@pytest.mark.skipif(HARBOR_PYTHON is None, reason="HARBOR_PYTHON names no Python 3.12 with harbor")
def test_harbor_takes_the_same_environment_for_the_tests(tmp_path: Path) -> None:
    expected: dict[str, list[object] | None] = {}
    for name, settings in SETTINGS.items():
        folder = tmp_path / name
        for part in ("tests", "environment"):
            (folder / part).mkdir(parents=True)
        (folder / "task.toml").write_text(f'schema_version = "1.4"\nartifacts = ["/app/out"]\n{settings}')
        (folder / "instruction.md").write_text("Write 42.\n")
        (folder / "environment" / "Dockerfile").write_text("FROM base:1\n")
        (folder / "tests" / "test.sh").write_text("true\n")
        if name == "built":
            (folder / "tests" / "Dockerfile").write_text("FROM judge:2\nCOPY test.sh /tests/\n")
        read = read_harbor_folder(folder)
        judge, image = read.judge, read.for_judge().image.image
        if judge is None:
            expected[str(folder)] = None
        else:
            named = None if image in ("base:1", "judge:2") else image
            where = [named, "tests" if judge.has_tests else "environment", judge.has_tests]
            expected[str(folder)] = [*where, judge.env, list(judge.artifacts)]
    assert json.loads(asked_of_harbor(PLACES, *expected)) == expected


STEPS = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from harbor.models.task.task import Task
from harbor.models.verifier.result import VerifierResult
from harbor.trial.multi_step import MultiStepTrial

folder = Path(sys.argv[1])
task = Task(folder)
paths = task.paths
found = {step.name: [task.step_instruction(step.name).strip(), step.min_reward] for step in task.config.steps}
results = [SimpleNamespace(verifier_result=VerifierResult(rewards=each)) for each in json.loads(sys.argv[2])]
trial = SimpleNamespace(task=task, result=SimpleNamespace(step_results=results))
trial._aggregate_step_rewards = lambda: MultiStepTrial._aggregate_step_rewards(trial)
print(json.dumps([found, MultiStepTrial._select_multi_step_reward(trial).rewards]))
"""


@pytest.mark.starts
@pytest.mark.skipif(HARBOR_PYTHON is None, reason="HARBOR_PYTHON names no Python 3.12 with harbor")
@pytest.mark.parametrize("strategy", ["", 'multi_step_reward_strategy = "final"'])
def test_harbor_takes_the_same_steps_and_their_rewards(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "Dockerfile").write_text("FROM base:1\n")
    steps = '[[steps]]\nname = "one"\nmin_reward = 0.5\n[[steps]]\nname = "two"\n'
    (tmp_path / "task.toml").write_text(f'schema_version = "1.4"\n{strategy}\n{steps}')
    for name in ("one", "two"):
        (tmp_path / "steps" / name / "tests").mkdir(parents=True)
        (tmp_path / "steps" / name / "instruction.md").write_text(f"# canary 1\n\nDo {name}.\n")
        (tmp_path / "steps" / name / "tests" / "test.sh").write_text("true\n")
    read = read_harbor_folder(tmp_path)
    rewards: list[dict[str, float]] = [{"reward": 1.0, "style": 0.5}, {"reward": 0.5, "speed": 1.0}]
    found, named = json.loads(asked_of_harbor(STEPS, str(tmp_path), json.dumps(rewards)))
    assert found == {step.step: [step.instruction, step.min_reward.get("reward")] for step in read.steps}
    verdict = combined_verdict(read, [TaskVerdict(reward=each["reward"], parts=each) for each in rewards])
    assert (named["reward"], named) == (verdict.reward, verdict.parts)
