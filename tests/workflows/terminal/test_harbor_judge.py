"""The package `harbor`, the judge of what a valid task folder is, takes the folders that agentrl writes.

It needs Python 3.12, so it lives in an environment of its own: `HARBOR_PYTHON=.../bin/python` names its interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from agentrl_workflows.terminal_commits.commits import History
from agentrl_workflows.terminal_commits.folder import CommitTask, TaskOptions
from agentrl_workflows.terminal_tasks.catalog import bundled_problems
from agentrl_workflows.terminal_tasks.problem import write_problems
from tests.support.commits import AFTER, BEFORE, make_repository

HARBOR_PYTHON = os.environ.get("HARBOR_PYTHON")
JUDGE = """
import json, sys
from pathlib import Path
from harbor.models.task.task import Task
print(json.dumps({folder: Task(Path(folder)).instruction for folder in sys.argv[1:]}))
"""


@pytest.mark.skipif(HARBOR_PYTHON is None, reason="HARBOR_PYTHON names no Python 3.12 with harbor")
def test_harbor_reads_every_bundled_folder_and_those_of_the_generator(tmp_path: Path) -> None:
    folders = write_problems(bundled_problems(), tmp_path / "bundled")
    history = History(make_repository(tmp_path / "repository", BEFORE, AFTER))
    task = CommitTask(history, history.commit("HEAD~"), history.commit("HEAD"), TaskOptions(feedback=True))
    task.write(tmp_path / "made", {"tests.test_purse.PurseTest.test_empty": "failed"})
    names = [*map(str, folders), str(tmp_path / "made")]
    assert HARBOR_PYTHON is not None
    read = subprocess.run([HARBOR_PYTHON, "-c", JUDGE, *names], capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout)
    assert {name: text.strip() for name, text in found.items()} == {
        name: (Path(name) / "instruction.md").read_text().strip() for name in names
    }
