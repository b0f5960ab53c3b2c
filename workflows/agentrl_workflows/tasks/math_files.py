r"""Math problems from the files of GSM8K, MATH, AIME and DeepScaleR.

Every task has `question`, `answer` (what `MathGrader` compares with) and `reference` (a response that is right).

Invariant: a record without a question or an answer is an error that names it; nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from agentrl.data.source import DataRecord, read_records
from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl_rewards.extract import after, boxed

_MARK: Final = "####"
_CALCULATION: Final = re.compile(r"<<[^<>]*>>")
_BARE_BOX: Final = re.compile(r"\\boxed\s+([^\s$.,]+)")
_LEVEL: Final = re.compile(r"(?:Level )?(\d)")


def gsm8k_tasks(path: str | Sequence[str], *, start: int = 0, count: int | None = None) -> list[Task]:
    """Return the tasks of GSM8K files: `question`, and `answer` with the solution and `#### 72` at its end.

    Args:
        path: as for `read_records`.
        start: the first records are left out.
        count: number of records that are kept; None keeps all.

    Raises:
        ConfigError: a file or a record cannot be used.
    """
    return [gsm8k_task(record) for record in read_records(path, start=start, count=count)]


def gsm8k_task(record: DataRecord) -> Task:
    """Return the task of a record of GSM8K; `tasks.map` takes this function.

    Raises:
        ConfigError: the record cannot be used.
    """
    written = record.text("answer")
    answer = after(_MARK)(written)
    if answer is None:
        raise record.error(f"'answer': expected a solution that ends with '{_MARK} 72', got {written[-40:]!r}")
    answer = answer.replace(",", "").replace("$", "")
    steps = _CALCULATION.sub("", written.rpartition(_MARK)[0]).strip()
    return Task(id=f"gsm8k-{record.name}", data=_math_fields(record.text("question"), answer, steps))


def math_tasks(
    path: str | Sequence[str], *, levels: Sequence[int] | None = None, start: int = 0, count: int | None = None
) -> list[Task]:
    r"""Return the tasks of MATH files: `problem`, `solution` with a `\boxed` answer, `level`, and `type` or `subject`.

    MATH-500, which has a field `answer` and numbers as levels, is read, too; so is a folder with one file a problem.

    Args:
        path: as for `read_records`.
        levels: levels from 1 to 5 that are kept; None keeps all.
        start: the first records are left out.
        count: number of records that are read; None reads all.

    Raises:
        ConfigError: a file or a record cannot be used, or no record has one of the levels.
    """
    tasks = [math_task(record) for record in read_records(path, start=start, count=count)]
    kept = [task for task in tasks if levels is None or task.data.get("level") in levels]
    if not kept:
        raise ConfigError(f"{path}: no record has one of the levels {list(levels or [])}; MATH has levels 1 to 5")
    return kept


def math_task(record: DataRecord) -> Task:
    r"""Return the task of a record of MATH or MATH-500; `tasks.map` takes this function.

    Raises:
        ConfigError: the record cannot be used.
    """
    solution = record.text("solution")
    answer = boxed(solution) or next(iter(_BARE_BOX.findall(solution)), None)
    if record.optional("answer") is not None:
        answer = record.answer("answer")
    if answer is None:
        raise record.error(f"'solution': expected a \\boxed answer, got {solution[-40:]!r}")
    data = _math_fields(record.text("problem"), answer, solution if boxed(solution) == answer else "")
    if (level := _LEVEL.fullmatch(str(record.optional("level")))) is not None:
        data["level"] = int(level[1])
    if (subject := record.optional("subject", "type")) is not None:
        data["subject"] = subject
    name = record.optional("unique_id")
    return Task(id=f"math-{name.removesuffix('.json') if isinstance(name, str) else record.name}", data=data)


def aime_tasks(path: str | Sequence[str], *, start: int = 0, count: int | None = None) -> list[Task]:
    """Return the tasks of AIME files: `problem` or `question`, and `answer`, an integer from 0 to 999.

    Field names in capitals are read, too, as files from 1983 to 2024 have them.

    Args:
        path: as for `read_records`.
        start: the first records are left out.
        count: number of records that are kept; None keeps all.

    Raises:
        ConfigError: a file or a record cannot be used, or an answer is no such integer.
    """
    return [aime_task(record) for record in read_records(path, start=start, count=count)]


def aime_task(record: DataRecord) -> Task:
    """Return the task of a record of AIME; `tasks.map` takes this function.

    Raises:
        ConfigError: the record cannot be used.
    """
    answer = record.answer("answer", "Answer")
    if not (answer.isdecimal() and int(answer) <= 999):
        raise record.error(f"'answer': expected an integer from 0 to 999, got {answer!r}")
    name = record.optional("id", "ID")
    question = record.text("problem", "Problem", "question", "Question")
    return Task(id=f"aime-{record.name if name is None else name}", data=_math_fields(question, str(int(answer)), ""))


def deepscaler_tasks(path: str | Sequence[str], *, start: int = 0, count: int | None = None) -> list[Task]:
    """Return the tasks of DeepScaleR files: `problem`, `answer`, and a `solution` that may be empty and is not used.

    Args:
        path: as for `read_records`.
        start: the first records are left out.
        count: number of records that are kept; None keeps all.

    Raises:
        ConfigError: a file or a record cannot be used.
    """
    return [deepscaler_task(record) for record in read_records(path, start=start, count=count)]


def deepscaler_task(record: DataRecord) -> Task:
    """Return the task of a record of DeepScaleR; `tasks.map` takes this function.

    Raises:
        ConfigError: the record cannot be used.
    """
    return Task(id=f"deepscaler-{record.name}", data=_math_fields(record.text("problem"), record.answer("answer"), ""))


def _math_fields(question: str, answer: str, solution: str) -> dict[str, Any]:
    r"""Return the fields of a math task; a solution without a `\boxed` answer gets one at its end."""
    final = f"The answer is \\boxed{{{answer}}}."
    reference = solution if boxed(solution) else f"{solution}\n{final}".strip()
    return {"question": question.strip(), "answer": answer, "reference": reference}
