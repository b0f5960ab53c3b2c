"""Computes what solutions of this package return, in a Python process beside this one.

Invariant: only sources that this package has written come here; a model's code belongs in the sandbox. A wrong solution may
loop or fill the memory, so every solution has a limit of CPU time, and the process one of memory. No answer depends on the
speed of the machine: the limit is some thousand times what a solution that ends takes.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final, cast

from agentrl.errors import WorkflowError
from agentrl_rewards.code.values import decode_value, encode_arguments, encode_value

LATE: Final = "!late"
"""The answer of a solution that has spent its CPU time."""
_CPU_S: Final = 30.0
"""Of all calls of one solution; the slowest takes a hundredth of a second."""
_MEMORY: Final = 2 * 2**30
_TIMEOUT_S: Final = 600


def compute_answers(
    jobs: Sequence[tuple[str, str, Sequence[tuple[object, ...]]]], *, cpu_s: float = _CPU_S
) -> list[list[str]]:
    """Return what each function returns for each of its arguments, as text of `encode_value`, or `!` and the error's type.

    Args:
        jobs: sources, names of their functions, and arguments.
        cpu_s: CPU time of all calls of one solution.

    Raises:
        WorkflowError: the process failed.
    """
    texts = [[source, name, encode_arguments([list(each) for each in inputs])] for source, name, inputs in jobs]
    asked = json.dumps([cpu_s, texts])
    command = [sys.executable, "-m", __name__]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        command, input=asked.encode(), capture_output=True, env=environment, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise WorkflowError(f"coding tasks: the process that computes answers failed: {done.stderr.decode()[-500:]}")
    return cast("list[list[str]]", json.loads(done.stdout))


class _SolutionLoader(importlib.abc.InspectLoader):
    """Loads a module from its text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        """Return the text."""
        del fullname
        return self._text


def _load_solution(source: str) -> ModuleType:
    loader = _SolutionLoader(source)
    spec = importlib.util.spec_from_loader("solution", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _late(*_: object) -> None:
    raise TimeoutError


def _answers(function: Any, inputs: Sequence[str], cpu_s: float) -> list[str]:  # noqa: ANN401 - a function of any solution
    """Return the answers; a solution that was late once is late for the rest."""
    found: list[str] = []
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        for arguments in inputs:
            try:
                found.append(encode_value(function(*cast("list[object]", decode_value(arguments)))))
            except TimeoutError:
                break
            except Exception as error:  # noqa: BLE001 - wrong solutions may raise anything
                found.append(f"!{type(error).__name__}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return [*found, *[LATE] * (len(inputs) - len(found))]


def main() -> None:
    """Answer the jobs of standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGPROF, _late)
    found: list[list[str]] = []
    cpu_s, jobs = cast("tuple[float, list[list[str]]]", json.loads(sys.stdin.buffer.read()))
    for source, name, inputs in jobs:
        function = getattr(_load_solution(source), name)
        texts = [encode_arguments(each) for each in cast("list[object]", decode_value(inputs))]
        found.append(_answers(function, texts, cpu_s))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
