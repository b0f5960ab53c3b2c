"""The sandbox of this machine, and one that does what a test says."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Awaitable, Callable

import pytest

from agentrl.errors import ConfigError
from agentrl_sandbox.bubblewrap.host import FIRST_UID, Host, find_host
from agentrl_sandbox.types import Limits, Program, Result


def usable_host() -> Host:
    """Return the programs of this machine, or skip the test where bubblewrap or user namespaces are missing."""
    try:
        found = find_host()
    except ConfigError as error:
        pytest.skip(str(error))
    command = [*found.entry(FIRST_UID), "unshare", "--user", "--map-root-user", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"this kernel makes no user namespace for an unprivileged user: {tried.stderr.strip()}")
    return found


class AnsweringSandbox:
    """Returns what `answer` makes of a program; `programs` has all that came in."""

    name, is_isolated = "answering", False
    limits = Limits()

    def __init__(self, answer: Callable[[Program], Awaitable[Result]]) -> None:
        self.programs: list[Program] = []
        self._answer = answer

    async def run(self, program: Program, limits: Limits | None = None) -> Result:
        del limits
        self.programs.append(program)
        return await self._answer(program)


def job_of(program: Program) -> dict[str, str]:
    """Return the job that a program of the code grader gets."""
    job: dict[str, str] = json.loads(program.stdin)
    return job
