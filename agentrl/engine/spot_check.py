"""Spot checks: a few calls of every server, recomputed with the weights that sampled them, before a batch is trained.

Invariant: a server whose log-probs are not the trainer's gets no call from then on, and the groups that it may have spoilt
are dropped. Where no other server is left, the run ends. Bounds: docs/adr/0014-spot-checks.md.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import uuid4

import anyio
import numpy as np

from agentrl.engine.config import MAX_SKIPPED_CHECKS, spot_bounds
from agentrl.engine.inflight import FinishedCall, FinishedCalls
from agentrl.engine.journal import LoopState
from agentrl.engine.parts import EngineParts
from agentrl.engine.publishing import Publications
from agentrl.errors import InvariantError, ServerError
from agentrl.inference.backend import ServerSet
from agentrl.support.concurrency import task_group
from agentrl.types import Float32Array

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotReport:
    """The result of one spot check."""

    metrics: Mapping[str, float]
    wrong: Mapping[str, str]
    """The servers whose log-probs are not the trainer's, and how far off they are."""


class SpotCheck:
    """Recomputes a few calls of every server with the weights that sampled them; bounds: `docs/adr/0014-spot-checks.md`."""

    SHARE = 16
    """A step checks one call for this many of its episodes, and at least one of each server."""
    ASKED_TOKENS = 16
    """Output tokens of a call made for a check, to a server that has finished none under the present version."""
    ASK_TIMEOUT_S = 60.0
    """Seconds that such a call may take, behind those that wait at a busy server."""
    WARN_AFTER = 5
    """Number of steps in a row without a check of a server after which the trainer warns."""

    def __init__(self, parts: EngineParts, calls: FinishedCalls) -> None:
        self._trainer, self._calls, self._engine = parts.trainer, calls, parts.engine
        self.servers = parts.inference if isinstance(parts.inference, ServerSet) else None
        """The servers that can be asked and taken out; None: there is only one."""
        self._tolerance = spot_bounds(parts.engine, parts.compute_type)
        self._episodes_per_step = parts.algorithm.groups_per_step * parts.algorithm.group_size
        self._unchecked: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}
        """Why no call of a server was compared, by its name."""
        self._skipped = 0

    def skip(self) -> Mapping[str, float] | None:
        """Return the metrics of a batch without a check; None when there were too many in a row."""
        if self._skipped == MAX_SKIPPED_CHECKS:
            return None
        self._skipped += 1
        return {"unchecked_servers": float(1 if self.servers is None else len(self.servers.serving))}

    async def run(self, version: int) -> SpotReport:
        """Compare calls that servers began with `version`, which the trainer must have, and return the result.

        Cancellation: the trainer cannot be used again.
        """
        began = time.perf_counter()
        self._skipped = 0
        if self._calls.impossible is not None:
            raise InvariantError(self._calls.impossible)
        serving = self._calls.servers if self.servers is None else self.servers.serving
        limit = max(1, self._episodes_per_step // (self.SHARE * max(1, len(serving))))
        chosen = {server: self._calls.of_version(server, version)[:limit] for server in {*serving, *self._calls.servers}}
        async with task_group() as tasks:
            for server in serving:
                if not chosen[server]:
                    tasks.start_soon(self._ask, server, version, chosen[server])
        differences = await self._differences(version, chosen)
        wrong: dict[str, str] = {}
        for server, found in differences.items():
            verdict = self._verdict(server, version, found)
            if verdict is None:
                self._calls.passed(server)
            else:
                wrong[server] = verdict
        unchecked = self._count_unchecked(serving or ("",), differences)
        joined = np.concatenate([np.empty(0, np.float32), *differences.values()])
        metrics = {"spot_check_tokens": float(len(joined)), "unchecked_servers": float(unchecked)}
        if len(joined):
            metrics |= {"mean_spot_difference": float(joined.mean()), "max_spot_difference": float(joined.max())}
        return SpotReport(metrics=metrics | {"seconds_spot_check": time.perf_counter() - began}, wrong=wrong)

    def forget(self, server: str) -> set[int]:
        """Drop the calls of a server, and return the groups with calls since its last check that passed."""
        return self._calls.forget(server)

    async def _ask(self, server: str, version: int, found: list[FinishedCall]) -> None:
        """Have a server answer the beginning of the run's last request, and add the call to `found`."""
        self._reasons[server] = "it finished no call at a temperature above 0"
        example = self._calls.example
        if example is None or self.servers is None:
            return
        sampling = replace(example.sampling, max_new_tokens=min(self.ASKED_TOKENS, example.sampling.max_new_tokens), stop=())
        request = replace(example, request_id=uuid4().hex, episode_id=f"spot check of {server}", sampling=sampling)
        with anyio.move_on_after(self.ASK_TIMEOUT_S) as waited:
            try:
                self._calls.add(request, await self.servers.sample(server, request), None)
            except ServerError as error:  # the pool's health check deals with the server
                self._reasons[server] = f"the call that the trainer made for a check failed: {error}"
            else:
                found += self._calls.of_version(server, version)[:1]
        if waited.cancelled_caught:
            self._reasons[server] = (
                f"it finished no call of the present version, nor one that the trainer made for a check, in "
                f"{self.ASK_TIMEOUT_S:g} s: it is busy"
            )

    async def _differences(self, version: int, chosen: Mapping[str, Sequence[FinishedCall]]) -> dict[str, Float32Array]:
        """Return, for each server with calls, |log-prob of the server - the trainer's| of their tokens, nats."""
        calls = [(server, call) for server, some in chosen.items() for call in some]
        if not calls:
            return {}
        recomputed = await self._trainer.logprobs(
            [call.token_ids for _, call in calls], [call.temperature for _, call in calls]
        )
        parts: dict[str, list[Float32Array]] = {}
        for (server, call), values in zip(calls, recomputed, strict=True):
            start, count = call.context_size - 1, call.tokens_of(version)
            reported = call.generation.output_logprobs[:count]
            parts.setdefault(server, []).append(np.abs(reported - values[start : start + count]))
        return {server: np.concatenate(some) for server, some in parts.items()}

    def _verdict(self, server: str, version: int, found: Float32Array) -> str | None:
        """Return the reason why the server's log-probs are wrong; None: they are right."""
        excess = self._tolerance.excess(found)
        if excess is None:
            return None
        return (
            f"{server or 'the server'}: log-probs of {len(found)} tokens that it sampled with version {version} differ from "
            f"the trainer's by {excess}; see engine.logprob_tolerance and engine.max_logprob_difference"
        )

    def _count_unchecked(self, serving: Sequence[str], checked: Mapping[str, Float32Array]) -> int:
        missed = [server for server in serving if server not in checked]
        self._unchecked = Counter({server: self._unchecked[server] + 1 for server in missed})
        for server in missed:
            if self._unchecked[server] == self.WARN_AFTER:
                logger.warning(
                    "%s: its log-probs have not been compared with the trainer's for %d steps: %s",
                    server or "the server",
                    self.WARN_AFTER,
                    self._reasons.get(server, "it finished no call at a temperature above 0"),
                )
        return len(missed)


class ServerChecks:
    """Checks the servers before each batch, and acts on what a check finds."""

    def __init__(self, parts: EngineParts, state: LoopState, publications: Publications) -> None:
        self._clock, self._buffer = state.clock, state.buffer
        self._journal, self._board, self._watchdog = state.journal, state.board, state.watchdog
        self._publications = publications
        self._check = SpotCheck(parts, state.backend.finished)

    async def before(self, step: int) -> Mapping[str, float]:
        """Check the servers, if they have the trainer's version or were not checked for long; return the metrics.

        Raises:
            InvariantError: the log-probs of every server are wrong.
        """
        if self._clock.version != self._clock.trainer_version:
            # The trainer no longer has the weights that the servers sample with: only a wait would make a check possible.
            skipped = self._check.skip()
            if skipped is not None:
                return skipped
            await self._publications.finish()
        version = self._clock.version
        with (
            self._board.waiting("the trainer", f"a spot check of the servers at version {version}"),
            self._journal.during("trainer", "spot_check"),
        ):
            report = await self._check.run(version)
        self._watchdog.progress()
        self._take_out(report.wrong, step)
        return report.metrics

    def _take_out(self, wrong: Mapping[str, str], step: int) -> None:
        servers = self._check.servers
        if wrong and (servers is None or not set(servers.serving) - wrong.keys()):
            raise InvariantError(
                f"step {step}: {'; '.join(wrong.values())}. No other server is left: servers and trainer do not "
                "compute the same model (other weights, another dtype, or another attention kernel?)"
            )
        for server, reason in wrong.items():
            if servers is not None:
                servers.take_out(server, reason)
            # Calls since the last check that passed may be as wrong as those that were compared.
            dropped = self._buffer.condemn(sorted(self._check.forget(server)), "unverified")
            logger.warning("%d groups with calls of %s since its last spot check are dropped", dropped, server)
