"""A few model calls of every server, recomputed by the trainer while it has the weights that sampled them.

Invariant: a server whose log-probs are not the trainer's is named, and an impossible log-prob stops the run. The reasons and
the bounds: `docs/adr/0014-spot-checks.md`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from uuid import uuid4

import anyio
import numpy as np

from agentrl.concurrency import task_group
from agentrl.engine.config import LOGPROB_TOLERANCE, EngineConfig
from agentrl.engine.inflight import FinishedCall, FinishedCalls
from agentrl.errors import InvariantError, ServerError
from agentrl.inference.backend import Inference, ServerSet
from agentrl.trainer.base import Trainer
from agentrl.types import Float32Array

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotReport:
    """The result of one spot check."""

    metrics: Mapping[str, float]
    wrong: Mapping[str, str]
    """The servers whose log-probs are not the trainer's, and how far off they are."""


class SpotCheck:
    """Recomputes a few calls of every server while the trainer has the weights that sampled them."""

    SHARE = 16
    """A step checks one call for this many of its episodes, and at least one of each server."""
    ASKED_TOKENS = 16
    """Output tokens of a call made for a check, to a server that has finished none under the present version."""
    ASK_TIMEOUT_S = 10.0
    """Seconds that such a call may take."""
    MAX_SKIPPED = 4
    """Number of batches in a row that are taken without a check because servers are loading weights."""
    WARN_AFTER = 5
    """Number of steps in a row without a check of a server after which the trainer warns."""

    def __init__(
        self, *, trainer: Trainer, inference: Inference, calls: FinishedCalls, config: EngineConfig, episodes_per_step: int
    ) -> None:
        """Begin with no server checked.

        Args:
            trainer: recomputes log-probs.
            inference: asked for a call where a server has finished none, if it is a `ServerSet`.
            calls: of the run.
            config: the tolerances.
            episodes_per_step: episodes of a batch, a share of which is checked.
        """
        self._trainer, self._calls, self._config = trainer, calls, config
        self.servers = inference if isinstance(inference, ServerSet) else None
        """Where servers can be asked and taken out; None: there is only one."""
        self._tolerance = config.logprob_tolerance or LOGPROB_TOLERANCE["float32"]
        self._episodes_per_step = episodes_per_step
        self._unchecked: Counter[str] = Counter()
        self._skipped = 0

    def skip(self) -> Mapping[str, float] | None:
        """Return the metrics of a batch without a check; None when there were too many in a row."""
        if self._skipped == self.MAX_SKIPPED:
            return None
        self._skipped += 1
        return {"unchecked_servers": float(1 if self.servers is None else len(self.servers.serving))}

    async def run(self, version: int) -> SpotReport:
        """Compare calls that servers began with `version`, which the trainer must have, and return the result.

        Raises:
            InvariantError: a server reported a log-prob that no token is sampled with.
            TrainError: the trainer could not compute log-probs.

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
        example = self._calls.example
        if example is None or self.servers is None:
            return
        sampling = replace(example.sampling, max_new_tokens=min(self.ASKED_TOKENS, example.sampling.max_new_tokens), stop=())
        request = replace(example, request_id=uuid4().hex, episode_id=f"spot check of {server}", sampling=sampling)
        with anyio.move_on_after(self.ASK_TIMEOUT_S), suppress(ServerError):  # the pool's health check deals with the server
            self._calls.add(request, await self.servers.sample(server, request), None)
            found += self._calls.of_version(server, version)[:1]

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
        """Return why the server's log-probs are wrong; None: they are right."""
        mean, largest, each = float(found.mean()), float(found.max()), self._config.max_logprob_difference
        # Rounding of single tokens averages out: the fewer tokens, the more of it is left.
        bound = self._tolerance * (1 + 4 / math.sqrt(len(found)))
        over = None if each is None or largest <= each else f"engine.max_logprob_difference = {each:g}"
        if not mean <= bound:
            over = f"{bound:.3g} (engine.logprob_tolerance = {self._tolerance:g}, for {len(found)} tokens)"
        if over is None:
            return None
        return (
            f"{server or 'the server'}: log-probs of {len(found)} tokens that it sampled with version {version} differ from "
            f"the trainer's by {mean:.3g} nats on average and {largest:.3g} at most, over {over}"
        )

    def _count_unchecked(self, serving: Sequence[str], checked: Mapping[str, Float32Array]) -> int:
        missed = [server for server in serving if server not in checked]
        self._unchecked = Counter({server: self._unchecked[server] + 1 for server in missed})
        for server in missed:
            if self._unchecked[server] == self.WARN_AFTER:
                logger.warning(
                    "%s: its log-probs have not been compared with the trainer's for %d steps, because it finished no call "
                    "at a temperature above 0",
                    server or "the server",
                    self.WARN_AFTER,
                )
        return len(missed)
