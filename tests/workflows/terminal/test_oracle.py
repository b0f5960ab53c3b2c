"""`agentrl validate` plays a task's own solution for every agent that works in a container, and says why one is not paid."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.client import Client
from agentrl.commands.validate import FindingKind, TaskValidation, ValidationReport
from agentrl.config import parse_config
from agentrl.types import Task
from agentrl_workflows.terminal import TerminalWorkflow, Workplace

pytestmark = [pytest.mark.starts, pytest.mark.anyio]
PAYS_A_YES = "cat /app/*.txt | grep -c yes > /logs/verifier/reward.txt"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Silent(TerminalWorkflow):
    """An agent of a user's own."""

    async def work(self, task: Task, client: Client, place: Workplace) -> None:
        await client.chat.completions.create(messages=[{"role": "user", "content": task["question"]}])


class Generous(Silent):
    full_reward = 2.0


def write_task(folder: Path, solution: str | None, *, settings: str = "[agent]\ntimeout_sec = 600\n") -> None:
    for name in ("tests", "environment", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(f'schema_version = "1.4"\n{settings}')
    (folder / "instruction.md").write_text("Say yes.\n")
    (folder / "environment" / "Dockerfile").write_text("FROM debian:12\nWORKDIR /app\n")
    (folder / "tests" / "test.sh").write_text(PAYS_A_YES)
    if solution is not None:
        (folder / "solution" / "solve.sh").write_text(solution)


async def validated(folder: Path, workflow: str = f"{__name__}:Silent", **workflow_args: object) -> ValidationReport:
    run = {
        "workflow": workflow,
        "workflow_args": {"images": {"debian:12": None}, **workflow_args},
        "tasks": {"path": str(folder), "format": "harbor"},
        "model": {"path": "there-is-none"},
    }
    return await TaskValidation(parse_config(run)).check()


@pytest.mark.parametrize(
    ("workflow", "arguments"),
    [
        (f"{__name__}:Silent", {}),
        ("agentrl_workflows.terminal:TerminalAgent", {"command_s": 0.01}),
        ("agentrl_workflows.terminal:TerminalCommand", {"command": ["true"], "no_call": "allow"}),
    ],
)
async def test_the_oracle_plays_the_tasks_of_every_agent_with_programs_variables_and_the_tasks_time(
    tmp_path: Path, workflow: str, arguments: dict[str, object]
) -> None:
    settings = '[agent]\ntimeout_sec = 600\n[solution.env]\nWORD = "yes"\n'
    write_task(tmp_path, "sleep 0.1; /solution/helper.sh > answer.txt", settings=settings)
    (tmp_path / "solution" / "helper.sh").write_text("#!/bin/bash\necho $WORD\n")
    (tmp_path / "solution" / "helper.sh").chmod(0o755)
    report = await validated(tmp_path, workflow, **arguments)
    assert report.findings == []
    assert (report.counts["train"].full, report.counts["train"].unchecked) == (1, 0)


async def test_solutions_and_tests_run_by_their_first_line(tmp_path: Path) -> None:
    write_task(tmp_path, "#!/usr/bin/env python3\nopen('answer.txt', 'w').write('yes')\n")
    (tmp_path / "tests" / "test.sh").write_text(f"#!/bin/bash -e\n{PAYS_A_YES}\nfalse\necho 0 > /logs/verifier/reward.txt\n")
    assert (await validated(tmp_path)).findings == []


@pytest.mark.parametrize(
    ("solution", "seconds", "said"),
    [
        ("sleep 6000", 0.5, "was interrupted after 0.5 s (agent.timeout_sec of its task.toml), and said: "),
        ("echo no such tool; exit 3", 600, "ended with exit status 3, and said: no such tool"),
        ("kill -9 $$", 600, "was ended by SIGKILL"),
        ("head -c 9000000 /dev/zero", 600, "reached limits.output_kb of workflow_args"),
    ],
)
async def test_a_solution_that_ends_badly_and_is_not_paid_is_named_with_its_end(
    tmp_path: Path, solution: str, seconds: float, said: str
) -> None:
    write_task(tmp_path, solution, settings=f"[agent]\ntimeout_sec = {seconds}\n")
    [finding] = (await validated(tmp_path)).findings
    assert finding.kind is FindingKind.FAILED
    assert f"solution/solve.sh {said}" in finding.detail
    assert "the tests then pay 0" in finding.detail


async def test_a_solution_is_judged_by_the_full_reward_of_its_workflow(tmp_path: Path) -> None:
    write_task(tmp_path, "echo yes > answer.txt; exit 3")
    assert (await validated(tmp_path)).findings == []
    [finding] = (await validated(tmp_path, f"{__name__}:Generous")).findings
    assert "ended with exit status 3, and said: [exit status 3]; the tests then pay 1, and " in finding.detail


async def test_a_solution_that_the_container_cannot_hold_is_named(tmp_path: Path) -> None:
    write_task(tmp_path, "echo yes > answer.txt")
    (tmp_path / "solution" / "data").write_bytes(b"x" * (48 << 20))
    [finding] = (await validated(tmp_path, limits={"work_mb": 16})).findings
    assert finding.kind is FindingKind.FAILED
    assert f"{tmp_path}/solution does not fit into the container" in finding.detail


async def test_a_solution_that_does_not_solve_its_task_is_found_and_none_is_counted(tmp_path: Path) -> None:
    write_task(tmp_path / "wrong", "echo no > answer.txt")
    write_task(tmp_path / "cut", "echo yes > answer.txt; exit 1")
    write_task(tmp_path / "none", None)
    report = await validated(tmp_path)
    [finding] = [finding for finding in report.findings if finding.kind is not FindingKind.DUPLICATE]
    assert (finding.kind, finding.where) == (FindingKind.REFERENCE, "train task wrong")
    assert finding.detail == "return 0, completed after 0 turns; expected 1; the tests say: [exit status 1]"
    assert (report.counts["train"].full, report.counts["train"].unchecked) == (1, 1)


async def test_a_solution_that_is_not_paid_is_named_with_the_last_words_of_the_tests(tmp_path: Path) -> None:
    write_task(tmp_path, "echo no > answer.txt")
    words = "echo AssertionError: expected yes, got $(cat answer.txt); echo FAILED test_answer >&2"
    (tmp_path / "tests" / "test.sh").write_text(f"{words}; {PAYS_A_YES}; true")
    [finding] = (await validated(tmp_path)).findings
    assert finding.kind is FindingKind.REFERENCE
    assert finding.detail.endswith("; the tests say: AssertionError: expected yes, got no\nFAILED test_answer")


async def test_named_numbers_without_a_reward_are_named_whoever_gets_them(tmp_path: Path) -> None:
    counts = 'echo \'{"passed": 28, "total": 28}\' > /logs/verifier/reward.json'
    write_task(tmp_path / "always", "true")
    (tmp_path / "always" / "tests" / "test.sh").write_text(f"{counts}; echo ran 28")
    write_task(tmp_path / "solved", "touch solved")
    (tmp_path / "solved" / "tests" / "test.sh").write_text(f"[ -e solved ] && {counts} || {PAYS_A_YES}; true")
    findings = [finding for finding in (await validated(tmp_path)).findings if finding.kind is not FindingKind.DUPLICATE]
    assert {(finding.kind, finding.where) for finding in findings} == {
        (FindingKind.FAILED, "train task always"),
        (FindingKind.REFERENCE, "train task solved"),
    }
    for finding in findings:
        assert 'expected a number called reward, score or accuracy, got \'{"passed": 28' in finding.detail
    assert any("always/tests/test.sh names no reward" in found.detail and "ran 28" in found.detail for found in findings)
