"""Codex and Claude Code, unmodified, mend a small project inside the sandbox, where they reach the door and nothing else."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.tokens.verify import verify
from agentrl.workflow import load_workflow
from agentrl_testing import play
from agentrl_workflows.repositories import repository_tasks
from tests.clients.catalog import CLIENTS, ROOT, ClientProgram, tool_call
from tests.support.sandboxes import usable_host

MEND = "sed -i 's/, last)$/, max(found[-1][1], last))/' calendar_days.py"
RUN_FILES = {"Codex": "codex", "Claude Code": "claude_code"}
TOOLS = {"Codex": ("exec_command", "cmd"), "Claude Code": ("Bash", "command")}
DEADLINE_S = 600
pytestmark = [pytest.mark.clients]


@pytest.mark.parametrize(
    "program", [each for each in CLIENTS if each.client in RUN_FILES], ids=lambda program: program.client
)
def test_a_coding_cli_is_paid_by_the_hidden_tests(program: ClientProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    usable_host()
    program.check_installed()
    installed = program.bin_folder.resolve().parents[1]
    _skip_unless_shown(installed)
    monkeypatch.chdir(ROOT)
    run = load_config(f"examples/coding_clis/{RUN_FILES[program.client]}.yaml")
    given = dict(run.workflow_args)
    first = str(installed / "node_modules" / ".bin" / Path(program.command[0]).name)
    given["command"] = [first, *given["command"][1:]]
    given["sandbox"] = {**given["sandbox"], "readable": [str(installed)]}
    task = next(each for each in repository_tasks("examples/coding_clis/tasks") if each.id == "repository-intervals")

    tool, argument = TOOLS[program.client]
    arguments = {argument: MEND, "description": "Works on it"}
    replies = ["I look at it.\n" + tool_call(tool, json.dumps(arguments)), "Done."]
    found = play(load_workflow(run.workflow, given), task, replies, timeout=DEADLINE_S)
    assert found.failure is None, found.failure
    assert found.final_reward == 1.0, found.turns[-1]
    assert [turn.parent for turn in found.turns] == [None, 0]
    assert len(found.branches()) == 1
    verify(found)


def _skip_unless_shown(folder: Path) -> None:
    """Skip where the unprivileged user that root becomes cannot see the programs."""
    hidden = [each for each in (folder, *folder.parents) if not each.stat().st_mode & stat.S_IXOTH]
    if hidden and os.geteuid() == 0:
        pytest.skip(f"{hidden[0]} is closed to the users of sandboxes")
    if folder.is_relative_to("/work"):
        pytest.skip(f"{folder} is covered by the sandbox's own /work")
