"""Feedback after each turn: what a task's `tests/feedback.sh` says of the agent's files so far, as a reward of the turn.

Invariant: feedback runs as the tests do: over a copy, in a container of its own that ends before the agent goes on. The
agent sees nothing of it. The rewards of an episode add up to what it has gained from the first state to the last.
"""

from __future__ import annotations

import anyio

from agentrl.client import Client
from agentrl.support.concurrency import outside_work
from agentrl_sandbox.containers import Container
from agentrl_sandbox.harbor.task import HarborTask
from agentrl_sandbox.types import MIB, Limits
from agentrl_workflows.terminal.benches import TaskBenches
from agentrl_workflows.terminal.copies import archive_of, unpack
from agentrl_workflows.terminal.opening_errors import FEEDBACK_SCRIPT
from agentrl_workflows.terminal.verifier import kept_paths, run_tests


class TaskFeedback:
    """Measures how far an agent is; remembers of each task how far one is that does nothing."""

    def __init__(self, benches: TaskBenches) -> None:
        self._benches = benches
        self._first: dict[str, float] = {}

    async def first(self, harbor: HarborTask, limits: Limits) -> float:
        """Return what the feedback says of an untouched environment; 0 where it says nothing."""
        key = harbor.key
        if key not in self._first:
            self._first[key] = await self._said(harbor, limits, None) or 0.0
        return self._first[key]

    async def of(self, container: Container, harbor: HarborTask, limits: Limits) -> float | None:
        """Return what it says of the agent's files as they are now; None where they cannot be copied, or it says nothing.

        Raises:
            EnvironmentFault: the copy's container does not start.
        """
        copy = await archive_of(container, [harbor.image.workdir, *harbor.kept], limits.work_mb * MIB)
        return None if copy is None else await self._said(harbor, limits, copy)

    async def _said(self, harbor: HarborTask, limits: Limits, copy: bytes | None) -> float | None:
        async with self._benches.opened(harbor, limits, "second") as bench:
            if copy is not None:
                paths = [harbor.image.workdir, *harbor.kept]
                async with bench.run() as container:
                    is_there = await unpack(container, copy, paths)
                if not is_there:
                    return None
                await bench.keep(kept_paths(await bench.changed(), harbor), homes=("/root",))
            verdict = await run_tests(bench, harbor, limits, script=FEEDBACK_SCRIPT)
        return None if verdict.broken else verdict.reward


def has_feedback(harbor: HarborTask) -> bool:
    """Return whether a task offers feedback."""
    return harbor.has_test(FEEDBACK_SCRIPT)


class TurnFeedback:
    """Rewards the turns of one episode where its task offers feedback; does nothing where it does not."""

    def __init__(
        self, feedback: TaskFeedback, container: Container, harbor: HarborTask, limits: Limits, weight: float
    ) -> None:
        self._feedback, self._container, self._harbor, self._limits = feedback, container, harbor, limits
        self._weight = weight if has_feedback(harbor) else 0.0
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
