"""`agentrl validate` plays references and empty replies without a model, and finds what is wrong with tasks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.client import Client
from agentrl.commands.validate import Finding, FindingKind, TaskValidation, ValidationReport, print_validation
from agentrl.config import load_config, parse_config
from agentrl.errors import ConfigError
from agentrl.types import Task, Trajectory
from agentrl.workflow import GroupWorkflow, RolloutWorkflow
from examples.calculator_agent import CalculatorAgent
from tests.support.cli import agentrl
from tests.support.sandboxes import usable_host

ROOT = Path(__file__).parents[2]
CALL = '<tool_call>\n{"name": "calc", "arguments": {"a": 2, "op": "+", "b": 3}}\n</tool_call>'
GOOD = {"question": "2 + 3 = ?", "answer": "5", "reference": "It is 5"}


class Exact(RolloutWorkflow):
    """Pays 1.0 for the answer at the end of the reply."""

    max_tokens: int | None = None
    broken: str = ""
    pays_all: bool = False

    async def run(self, task: Task, client: Client) -> float:
        messages = [{"role": "user", "content": task["question"]}]
        limits: dict[str, Any] = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        completion = await client.chat.completions.create(messages=messages, **limits)
        if task.id == self.broken:
            raise ValueError("this grader is broken")
        reply = completion.choices[0].message.content or ""
        return 1.0 if self.pays_all else float(reply.endswith(task["answer"]))


class SameStart(Exact):
    prompt_is_task = False


class TwoCalls(CalculatorAgent):
    full_reward = 0.98

    def reference(self, task: Task) -> Sequence[str]:
        return [CALL, f"The answer is {task['answer']}."][: task["calls"]]


class Ranked(GroupWorkflow):
    async def run(self, task: Task, client: Client) -> float:
        await client.chat.completions.create(messages=[{"role": "user", "content": task["question"]}])
        return 0.0

    async def score_group(self, task: Task, episodes: Sequence[Trajectory]) -> Sequence[float]:
        return [0.0 for _ in episodes]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def tasks_file(folder: Path, name: str, tasks: Sequence[Mapping[str, object]]) -> str:
    (folder / name).write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return str(folder / name)


async def validated(
    folder: Path,
    train: Sequence[Mapping[str, object]],
    held_out: Sequence[Mapping[str, object]] = (),
    *,
    workflow: str = "Exact",
    limit: int | None = None,
    **workflow_args: object,
) -> ValidationReport:
    tasks = {"path": tasks_file(folder, "train.jsonl", train)}
    tasks |= {"eval": {"path": tasks_file(folder, "held_out.jsonl", held_out)}} if held_out else {}
    run = parse_config(
        {
            "workflow": f"{__name__}:{workflow}",
            "workflow_args": workflow_args,
            "tasks": tasks,
            "model": {"path": "there-is-none"},
            "rollout": {"max_episode_tokens": 1},
        }
    )
    return await TaskValidation(run, limit=limit).check()


def kinds(report: ValidationReport) -> list[tuple[FindingKind, str]]:
    return [(finding.kind, finding.where) for finding in report.findings]


async def test_a_right_set_has_nothing_to_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"question": "3 + 3 = ?", "answer": "6", "reference": "x" * 5_000 + "6"}
    report = await validated(tmp_path, [GOOD, long], [{"question": "1 + 1 = ?", "answer": "2", "reference": "2"}])
    assert report.findings == []
    assert print_validation(report)
    assert capsys.readouterr().out == (
        "train     2 tasks, 2 of 2 references score full\nheld-out  1 tasks, 1 of 1 references score full\nNothing to fix.\n"
    )


async def test_a_reference_that_the_grader_refuses_is_found(tmp_path: Path) -> None:
    report = await validated(tmp_path, [GOOD, {"question": "2 * 3 = ?", "answer": "6", "reference": "It is 7"}])
    assert kinds(report) == [(FindingKind.REFERENCE, "train task 2")]
    assert "return 0, completed after 1 turns, last reply 'It is 7'; expected 1" in report.findings[0].detail
    assert report.counts["train"].full == 1


async def test_a_grader_that_pays_an_empty_reply_is_found(tmp_path: Path) -> None:
    report = await validated(tmp_path, [GOOD, {"question": "2 * 3 = ?", "answer": "6"}], pays_all=True)
    assert kinds(report) == [(FindingKind.EMPTY, "train task 1"), (FindingKind.EMPTY, "train task 2")]


class Guessed(Exact):
    def guess(self, task: Task) -> str | None:
        return task.data.get("guess")


async def test_a_guess_that_earns_credit_is_named_with_its_task(tmp_path: Path) -> None:
    guessed = {"question": "2 * 3 = ?", "answer": "6", "reference": "6"}
    train = [GOOD, {**guessed, "guess": "6"}, {**guessed, "question": "3 * 2 = ?", "guess": "7"}]
    report = await validated(tmp_path, train, workflow="Guessed")
    assert kinds(report) == [(FindingKind.GUESS, "train task 2")]
    assert "'6': return 1" in report.findings[0].detail


@pytest.mark.starts
async def test_constants_that_earn_a_share_of_code_tasks_are_found(tmp_path: Path) -> None:
    usable_host()
    calls = {"calls": [["f(1)", "2"], ["f(2)", "2"], ["f(3)", "0"]]}
    task = {"question": "Write f.", "tests": calls}
    for credit, found in (("full", []), ("partial", [(FindingKind.GUESS, "train task 1")])):
        run = parse_config(
            {
                "workflow": "agentrl_workflows.code_feedback:CodeFeedback",
                "workflow_args": {"credit": credit, "max_attempts": 1},
                "tasks": {"path": tasks_file(tmp_path, "code.jsonl", [task])},
                "model": {"path": "there-is-none"},
            }
        )
        report = await TaskValidation(run).check()
        assert kinds(report) == found


async def test_the_same_prompt_is_found_within_a_set_and_between_the_sets(tmp_path: Path) -> None:
    again = {"id": "again", **GOOD, "question": "2 +  3 = ?\n"}
    report = await validated(tmp_path, [GOOD, again], [{"id": "leak", **GOOD}])
    assert kinds(report) == [(FindingKind.DUPLICATE, "train task again"), (FindingKind.LEAK, "held-out task leak")]
    assert report.findings[1].detail == "the prompt is that of the train task 1"


async def test_prompts_are_not_compared_where_they_do_not_make_the_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = await validated(tmp_path, [GOOD, GOOD], workflow="SameStart")
    assert report.findings == []
    print_validation(report)
    assert "prompts   not compared: the workflow has prompt_is_task = False" in capsys.readouterr().out


async def test_an_episode_that_fails_is_found_with_its_error(tmp_path: Path) -> None:
    report = await validated(tmp_path, [GOOD, {"question": "?"}], broken="1")
    assert kinds(report) == [(FindingKind.FAILED, f"train task {number}") for number in (1, 1, 2)]
    assert "workflow_error" in report.findings[0].detail
    assert "this grader is broken" in report.findings[0].detail
    assert "task '2' has no field 'answer'; it has ['question']" in report.findings[2].detail


async def test_tasks_without_a_reference_are_counted_as_not_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = await validated(tmp_path, [GOOD, {"question": "4 + 4 = ?", "answer": "8"}])
    assert (report.counts["train"].full, report.counts["train"].unchecked, report.findings) == (1, 1, [])
    print_validation(report)
    assert "1 without a reference: not checked" in capsys.readouterr().out


async def test_a_reference_may_be_one_text_for_each_model_call(tmp_path: Path) -> None:
    tasks = [{"question": "2 + 3 = ?", "answer": "5", "calls": 2}]
    report = await validated(tmp_path, tasks, workflow="TwoCalls")
    assert (report.counts["train"].full, report.findings) == (1, [])


async def test_a_reference_with_too_few_replies_is_a_failed_episode_that_says_so(tmp_path: Path) -> None:
    tasks = [{"question": "2 + 3 = ?", "answer": "5", "calls": 1}]
    [finding] = (await validated(tmp_path, tasks, workflow="TwoCalls")).findings
    assert finding.kind is FindingKind.FAILED
    assert "the reference has 1 replies; the workflow asked for one more" in finding.detail


async def test_the_rewards_of_a_group_are_not_checked_but_its_prompts_are(tmp_path: Path) -> None:
    report = await validated(tmp_path, [GOOD, GOOD], workflow="Ranked")
    assert report.counts["train"].unchecked == 2
    assert [finding.kind for finding in report.findings] == [FindingKind.DUPLICATE]


async def test_a_limit_checks_the_first_tasks_of_each_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"question": "2 * 3 = ?", "answer": "6", "reference": "7"}
    report = await validated(tmp_path, [GOOD, wrong, wrong], limit=1)
    assert report.findings == []
    print_validation(report)
    assert "train     1 tasks, 1 of 1 references score full, 2 beyond the limit" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--limit 0: expected at least 1"):
        await validated(tmp_path, [GOOD], limit=0)


async def test_a_reply_that_the_workflow_s_own_limit_cut_is_explained(tmp_path: Path) -> None:
    [finding] = (await validated(tmp_path, [GOOD], max_tokens=3)).findings
    assert finding.kind is FindingKind.REFERENCE
    assert "its max_tokens cut a reply (a token is a byte here)" in finding.detail


@pytest.mark.parametrize("reference", [5, [], ["a", 5], {"a": "b"}])
async def test_a_reference_that_is_no_text_is_refused_before_anything_runs(tmp_path: Path, reference: object) -> None:
    with pytest.raises(ConfigError, match=r"task 1: Exact\.reference must return a text, a list of texts"):
        await validated(tmp_path, [{**GOOD, "reference": reference}])


def test_only_the_first_findings_of_a_kind_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding(FindingKind.EMPTY, f"train task {number}", "return 1") for number in range(13)]
    assert not print_validation(ValidationReport(findings=findings))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FIX empty reply scores full: train task 0: return 1"
    assert lines[-2:] == ["FIX empty reply scores full: and 3 more", "13 to fix."]
    assert len(lines) == 12


@pytest.mark.parametrize(
    ("factory", "arguments"),
    [
        ("agentrl_workflows.tasks.word_problems:word_problems", {"count": 50}),
        ("agentrl_workflows.tasks.math_files:gsm8k_tasks", {"path": "gsm8k.jsonl"}),
    ],
)
async def test_word_problems_and_gsm8k_files_are_right_for_the_reasoning_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str, arguments: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    record = {"question": "Ann picks 3 bags of 24 apples. How many?", "answer": "3 * 24 = <<3*24=72>>72.\n#### 72"}
    tasks_file(tmp_path, "gsm8k.jsonl", [record])
    run = parse_config(
        {
            "workflow": "agentrl_workflows.reasoning:Reasoning",
            "workflow_args": {"compare": "number"},
            "tasks": {"factory": factory, "factory_args": arguments},
            "model": {"path": "there-is-none"},
        }
    )
    report = await TaskValidation(run).check()
    assert report.findings == []
    assert report.counts["train"].full == report.counts["train"].tasks > 0


@pytest.mark.starts
@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("examples/bundled/repository.yaml", 1),
        ("examples/bundled/code_feedback.yaml", 1),
        ("examples/bundled/terminal.yaml", 2),
        ("examples/terminal/run.yaml", 2),
        ("workflows/agentrl_workflows/calculator/demo.yaml", 20),
    ],
)
async def test_bundled_tasks_have_right_references(monkeypatch: pytest.MonkeyPatch, path: str, limit: int) -> None:
    usable_host()
    monkeypatch.chdir(ROOT)
    report = await TaskValidation(load_config(path), limit=limit).check()
    assert report.findings == []
    assert report.counts["train"].full == limit


@pytest.mark.starts
def test_the_command_ends_with_status_1_when_something_is_to_be_fixed(tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(
        "async def solve(task, client):\n"
        "    await client.chat.completions.create(messages=[{'role': 'user', 'content': task['question']}])\n"
        "    return 1.0\n"
    )
    tasks_file(tmp_path, "tasks.jsonl", [GOOD])
    (tmp_path / "run.yaml").write_text("workflow: my_agent:solve\ntasks: {path: tasks.jsonl}\nmodel: {path: none}\n")
    ended = agentrl(tmp_path, "validate", "run.yaml", "--limit", "1")
    assert (ended.returncode, ended.stderr) == (1, "")
    assert re.search(r"^FIX empty reply scores full: train task 1: return 1, ", ended.stdout, re.M)
    assert ended.stdout.endswith("1 to fix.\n")
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"my_agent.py", "run.yaml", "tasks.jsonl"}
