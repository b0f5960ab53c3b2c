"""The commands of a task around the agent, in its container: `setup.sh` and health checks before it, then what collects.

Invariant: what they leave is the agent's, as any file of its container is.
"""

from __future__ import annotations

from typing import Final

import anyio

from agentrl.support.concurrency import outside_work
from agentrl_sandbox.containers import Container
from agentrl_sandbox.harbor.judging import HealthCheck
from agentrl_sandbox.harbor.task import HarborTask
from agentrl_workflows.terminal.scripts import end_of_output

_SETUP: Final = "setup.sh"


async def make_ready(container: Container, harbor: HarborTask) -> str:
    """Run the `setup.sh` of a step, and wait for the health checks of a task; return why it is not ready, or nothing."""
    with outside_work():
        if harbor.step and _SETUP in harbor.files("workdir"):
            argv = ["/bin/bash", f"{harbor.image.workdir}/{_SETUP}"]
            result = await container.execute(argv, timeout_s=harbor.build_timeout_s)
            if not result.is_success:
                return f"workdir/{_SETUP} failed, and said: {end_of_output(result)}"
        for check in harbor.healthchecks:
            if problem := await _sickness(container, check):
                return problem
    return ""


async def _sickness(container: Container, check: HealthCheck) -> str:
    failures, grace_end = 0, anyio.current_time() + check.start_period_sec
    while True:
        counts = anyio.current_time() >= grace_end
        result = await container.execute(["/bin/bash", "-c", check.command], timeout_s=check.timeout_sec)
        if result.is_success:
            return ""
        failures += counts
        if failures >= check.retries:
            said = f"environment.healthcheck: {check.command} failed {failures} times, and said: {end_of_output(result)}"
            return f"{said}; no ENTRYPOINT and no CMD of an image runs here, so it has to start what it waits for"
        await anyio.sleep(check.interval_sec if counts else check.start_interval_sec)


async def collect(container: Container, harbor: HarborTask) -> None:
    """Run the commands of a task that collect what the agent left; that one fails is for the tests to notice."""
    for each in harbor.collect:
        await container.execute(["/bin/bash", "-c", each.command], timeout_s=each.timeout_sec)
