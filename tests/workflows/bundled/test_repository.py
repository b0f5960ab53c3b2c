"""The repository agent: its tools, its hidden tests, and three projects whose reference patch alone solves them."""

from __future__ import annotations

import ast
import json
import operator
from pathlib import Path

import anyio
import pytest

from agentrl.errors import ConfigError
from agentrl.tokens.verify import verify
from agentrl.types import Task
from agentrl_sandbox import Limits, Program, Result, open_sandbox, python_program
from agentrl_workflows.repositories import RepositoryTask, load_repository_tasks, repository_tasks
from agentrl_workflows.repositories.project import Project
from agentrl_workflows.repositories.tasks import Edit, check_path
from agentrl_workflows.repository import RepositoryAgent
from tests.support.player import Player, tool_call
from tests.support.sandboxes import usable_host

TASKS = {each.name: each for each in load_repository_tasks()}
LEDGER = next(task for task in repository_tasks() if task.id == "repository-ledger")
SUBMIT = tool_call("submit")
# Runs the hidden calls of projects of our own making in one sandbox, each project in a folder and a process of its own.
RUN_ALL = """
import json, pathlib, subprocess, sys
ONE = "import json, sys; from driver import check; print(json.dumps([repr(eval(call)) for call in json.load(sys.stdin)]))"
found = []
for number, (files, driver, calls) in enumerate(json.loads(pathlib.Path("jobs.json").read_text())):
    root = pathlib.Path(f"project-{number}")
    for name, text in {**files, "driver.py": driver}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    run = subprocess.run([sys.executable, "-c", ONE], cwd=root, input=json.dumps(calls), capture_output=True, text=True)
    found.append(json.loads(run.stdout))
print(json.dumps(found))
"""


def edits(task: RepositoryTask) -> str:
    return "\n".join(tool_call("edit_file", path=each.path, old=each.old, new=each.new) for each in task.patch)


@pytest.mark.starts
async def test_the_reference_patch_alone_passes_every_hidden_test_of_each_project() -> None:
    usable_host()
    jobs = [(dict(files), task.tests) for task in TASKS.values() for files in (task.files, task.patched())]
    sent = json.dumps([[files, tests.driver, [call for call, _ in tests.calls]] for files, tests in jobs])
    async with open_sandbox() as sandbox:
        result = await sandbox.run(python_program(RUN_ALL, files={"jobs.json": sent.encode()}), Limits(wall_s=300))
    assert result.is_success, result.text
    shares: list[float] = []
    for (_, tests), found in zip(jobs, json.loads(result.stdout), strict=True):
        right = [repr(ast.literal_eval(value)) for _, value in tests.calls]
        shares.append(sum(map(operator.eq, found, right)) / len(right))
    assert len(shares) == 2 * 3
    assert all(before < 1.0 for before in shares[::2]), shares
    assert shares[1::2] == [1.0] * 3


@pytest.mark.starts
async def test_hidden_tests_pay_for_the_patch_and_for_nothing_else(play: Player) -> None:
    usable_host()
    init = LEDGER["files"]["ledger/__init__.py"]
    hostile = [
        "import os\nos._exit(0)\n",
        "print('value 1 {}')\nimport sys\nsys.exit(0)\n",
        "class E(dict):\n    def __eq__(self, o): return True\n"
        "def monthly_totals(*_): return E()\ndef written(c): return c\nEntry = parse_line = None\n",
    ]
    clumsy = [
        tool_call("list_files"),
        tool_call("read_file", path="ledger/parse.py"),
        tool_call("read_file", path="../../etc/passwd"),
        tool_call("edit_file", path="ledger/parse.py", old="line", new="row"),
        tool_call("edit_file", path="ledger/missing.py", old="a", new="b"),
        tool_call("edit_file", path="tests/test_new.py", old="", new="import sys\nsys.exit(3)\n"),
        tool_call("edit_file", path="tests/test_new.py", old="import sys\nsys.exit(3)\n", new="x = 1\n"),
        tool_call("run_tests"),
        "I give up.",
    ]
    task = Task(id="x", data={**LEDGER.data, "calls": LEDGER["calls"][:2]})
    scripts = [
        [edits(TASKS["ledger"]), SUBMIT],
        [SUBMIT],
        clumsy,
        *([tool_call("edit_file", path="ledger/__init__.py", old=init, new=source), SUBMIT] for source in hostile),
    ]
    agent = RepositoryAgent(partial_credit=True, sandbox={"limits": {"wall_s": 60}})
    solved, unsolved, gave_up, *tampered = await play.all(agent, task, *scripts)

    assert (solved.final_reward, solved.failure) == (1.0, None)
    assert (solved.metrics["solved"], solved.metrics["submitted"], solved.metrics["changed_files"]) == (1.0, 1.0, 1.0)
    verify(solved)
    assert (unsolved.final_reward, unsolved.failure, unsolved.metrics["passed"]) == (0.0, None, 0.0)
    for episode in tampered:
        assert (episode.final_reward, episode.failure, episode.metrics["edits"]) == (0.0, None, 1.0)

    names = ("submitted", "edits", "test_runs", "changed_files")
    assert [gave_up.metrics[name] for name in names] == [0.0, 2.0, 1.0, 1.0]
    _, listed, text, outside, ambiguous, missing, made, changed, ran = play.read(gave_up)
    assert "ledger/report.py" in listed
    assert "def parse_amount" in text
    assert "Error: there is no file" in outside
    assert "exactly once, but it is there" in ambiguous
    assert "Error: there is no file ledger/missing.py" in missing
    assert "done" in made
    assert "done" in changed
    assert "Ran 3 tests" in ran


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../a",
        "a/../b",
        ".grader/runner.py",
        "a/.b",
        "solution.py",
        "solution/x.py",
        "",
        ".",
        "a\0b",
        "a" * 201,
    ],
)
def test_paths_that_leave_the_project_or_reach_the_grader_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"expected a relative path|cannot be used"):
        check_path(path)
    with pytest.raises(ValueError, match=r"expected a relative path|cannot be used"):
        Edit(path=path, old="", new="x").applied({})


def test_an_edit_that_no_sandbox_could_write_is_refused() -> None:
    for path in ("a", "a/b/c"):
        with pytest.raises(ValueError, match="file and a folder"):
            Edit(path=path, old="", new="x").applied({"a/b": "x"})
    with pytest.raises(ValueError, match="at most 200 files"):
        Edit(path="new", old="", new="x").applied({f"f{number}": "" for number in range(200)})
    with pytest.raises(ValueError, match="2,000,000 characters"):
        Edit(path="a", old="y", new="x" * 2_000_000).applied({"a": "xy"})


async def test_the_model_sees_no_hidden_test_in_the_project_that_its_own_tests_run_in() -> None:
    programs: list[Program] = []

    class Seen:
        async def run(self, program: Program, limits: Limits | None = None) -> Result:
            programs.append(program)
            raise KeyboardInterrupt

    project = Project(LEDGER["files"], Seen(), ("python3",), 100)
    with pytest.raises(KeyboardInterrupt):
        await project.run_tests()
    await anyio.lowlevel.checkpoint()
    [program] = programs
    assert set(program.files) == set(LEDGER["files"])
    assert not any(b"def check(" in data for data in program.files.values())
    assert not any(call in LEDGER["question"] for call, _ in LEDGER["calls"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a", "missing required field"),
        ("name: a\nissue: b\nfiles: {../x: y}\ntests: {driver: d, calls: []}\npatch: []", "cannot be used"),
        (
            "name: a\nissue: b\nfiles: {x: y}\ntests: {driver: d, calls: []}\npatch: [{path: x, old: z, new: y}]",
            "exactly once",
        ),
    ],
)
def test_a_task_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"a\.yaml.*{message}"):
        load_repository_tasks(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no repository task"):
        load_repository_tasks(str(tmp_path / "none"))
