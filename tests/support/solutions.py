"""Runs the calls of many solutions, of our own making, in one sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentrl_rewards.code.values import encode_value
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.types import Limits, python_program

# A solution has 2 s of CPU time for all its calls; those that it does not come to are late.
_RUN_ALL = """
import json, signal, sys
from pathlib import Path
sys.path.insert(0, ".")
from values import encode_value
def late(*_):
    raise TimeoutError
signal.signal(signal.SIGPROF, late)
def results(source, calls):
    found, space = [], {}
    signal.setitimer(signal.ITIMER_PROF, 2)
    try:
        exec(source, space)
        for call in calls:
            try:
                found.append(encode_value(eval(call, space)))
            except TimeoutError:
                break
            except Exception as error:
                found.append(type(error).__name__)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return found + ["late"] * (len(calls) - len(found))
jobs = json.loads(Path("jobs.json").read_text())
print(json.dumps([results(source, calls) for source, calls in jobs]))
"""


async def run_solutions(sandbox: BoxSandbox, jobs: Sequence[tuple[str, list[str]]], limits: Limits) -> list[list[str]]:
    """Return what each call of each source returned, in the text of `encode_value`, or the name of what it raised."""
    with open(encode_value.__code__.co_filename, "rb") as module:  # noqa: ASYNC230 - a small file
        files = {"jobs.json": json.dumps(jobs).encode(), "values.py": module.read()}
    result = await sandbox.run(python_program(_RUN_ALL, files=files), limits)
    assert result.is_success, result.text[-500:]
    return json.loads(result.stdout)
