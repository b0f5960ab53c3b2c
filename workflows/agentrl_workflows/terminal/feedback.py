"""Feedback after each turn: what a task's `tests/feedback.sh` says of the agent's files so far, as a reward of the turn.

Invariant: feedback runs as the tests do: over a copy, in a container of its own that ends before the agent goes on. The
agent sees nothing of it. The rewards of an episode add up to what it has gained from the first state to the last.
"""

from __future__ import annotations

import secrets
import shlex
from typing import Final

import anyio

from agentrl.client import Client
from agentrl.support.concurrency import outside_work
from agentrl_sandbox.containers import Container
from agentrl_sandbox.harbor.task import HarborTask
from agentrl_sandbox.types import MIB, Limits
from agentrl_workflows.terminal.benches import TaskBenches, limits_as_full_disks
from agentrl_workflows.terminal.verifier import kept_paths, run_tests

FEEDBACK_SCRIPT: Final = "feedback.sh"
_COPY_S: Final = 60.0


class TaskFeedback:
    """Measures how far an agent is; remembers of each task how far one is that does nothing."""

    def __init__(self, benches: TaskBenches) -> None:
        self._benches = benches
        self._first: dict[str, float] = {}

    async def first(self, harbor: HarborTask, limits: Limits) -> float:
        """Return what the feedback says of an untouched environment; 0 where it says nothing."""
        key = str(harbor.folder)
        if key not in self._first:
            self._first[key] = await self._said(harbor, limits, None) or 0.0
        return self._first[key]

    async def of(self, container: Container, harbor: HarborTask, limits: Limits) -> float | None:
        """Return what it says of the agent's files as they are now; None where they cannot be copied, or it says nothing.

        Raises:
            EnvironmentFault: the copy's container does not start.
        """
        copy = await _archive_of(container, [harbor.image.workdir, *harbor.kept], limits.work_mb * MIB)
        return None if copy is None else await self._said(harbor, limits, copy)

    async def _said(self, harbor: HarborTask, limits: Limits, copy: bytes | None) -> float | None:
        async with self._benches.opened(harbor, limits) as bench:
            if copy is not None:
                paths = [harbor.image.workdir, *harbor.kept]
                async with bench.run() as container:
                    is_there = await _unpack(container, copy, paths)
                if not is_there:
                    return None
                await bench.keep(kept_paths(await bench.changed(), harbor), homes=("/root",))
            verdict = await run_tests(bench, harbor, limits, script=FEEDBACK_SCRIPT)
        return None if verdict.broken else verdict.reward


class TurnFeedback:
    """Rewards the turns of one episode where its task offers feedback; does nothing where it does not."""

    def __init__(
        self, feedback: TaskFeedback, container: Container, harbor: HarborTask, limits: Limits, weight: float
    ) -> None:
        self._feedback, self._container, self._harbor, self._limits = feedback, container, harbor, limits
        self._weight = weight if harbor.has_test(FEEDBACK_SCRIPT) else 0.0
        self._last: float | None = None
        self.counts: dict[str, float] = {}
        """What happened so far, for `client.record`; empty where there is no feedback."""

    async def give(self, client: Client) -> float:
        """Reward the last turn of `client` with what its files gained since the turn before; return the seconds it took.

        Cancellation: the copy is gone, and the turn has no reward.
        """
        if not self._weight:
            return 0.0
        begin = anyio.current_time()
        with outside_work():
            if self._last is None:
                self._last = await self._feedback.first(self._harbor, self._limits)
            now = await self._feedback.of(self._container, self._harbor, self._limits)
        self.counts["feedback_missed"] = self.counts.get("feedback_missed", 0.0) + (now is None)
        gained = 0.0 if now is None else now - self._last
        self._last = self._last if now is None else now
        self.counts["feedback"] = self._last
        client.turns[-1].reward(self._weight * gained)
        return anyio.current_time() - begin


async def _archive_of(container: Container, paths: list[str], max_bytes: int) -> bytes | None:
    """Return an archive of these paths, which a program of the agent's container makes.

    None: they cannot be copied, or a limit has ended the container, which is the agent's doing. An agent that changes the
    program changes no more than what it could as well write into the files themselves.
    """
    name = f"/tmp/{secrets.token_hex(8)}"
    line = f'cd / && for p in {_quoted_paths(paths)}; do [ -e "$p" ] && echo "$p"; done | tar -cf {name} -T - ; rc=$?'
    try:
        await container.execute(["/bin/sh", "-c", f"{line}; exit $rc"], timeout_s=_COPY_S)
        with limits_as_full_disks(container):
            return await container.download(name, max_bytes=max_bytes)
    except OSError:
        return None
    finally:
        with anyio.move_on_after(_COPY_S, shield=True):
            await container.execute(["/bin/rm", "-f", name], timeout_s=_COPY_S)


async def _unpack(container: Container, copy: bytes, paths: list[str]) -> bool:
    """Put the files of an archive in the place of these paths; return whether the container holds an archive so large."""
    try:
        with limits_as_full_disks(container):
            await container.upload({"/tmp/copy.tar": copy})
    except OSError:
        return False
    line = f"rm -rf {_quoted_paths(paths)}; tar -xf /tmp/copy.tar"
    await container.execute(["/bin/sh", "-c", f"cd / && {line}"], timeout_s=_COPY_S)
    return True


def _quoted_paths(paths: list[str]) -> str:
    return " ".join(shlex.quote(path.removeprefix("/")) for path in paths)
