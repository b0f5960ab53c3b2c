"""The trainer's weights on their way to the servers, one publication after the other.

Invariant: when `send` of version v returns, every serving server holds exactly the weights that the trainer had when v was
held, proved by checksums and by a probe. The clock ticks once for each publication, when every serving server holds that
version. At most one publication runs.

With `engine.overlap_publication`, an error of the servers reaches the trainer when its step has ended, or at once if it
waits for a batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import numpy as np
from anyio.abc import TaskGroup

from agentrl.engine.config import KEPT_PUBLISHED, ComputeType, EngineConfig, probe_bounds
from agentrl.engine.journal import LoopState
from agentrl.engine.report import PublishReport, SyncCost
from agentrl.errors import AgentRLError, WeightSyncError
from agentrl.inference.backend import Inference, Probe, UpdateReport, WeightSource
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.base import Trainer
from agentrl.weights.disk import WEIGHTS_FILE, prune
from agentrl.weights.peft_files import ADAPTER_WEIGHTS_FILE
from agentrl.weights.types import WeightFeed

PROBE_TEXT = """The quick brown fox jumps over the lazy dog. 0 1 2 3 4 5 6 7 8 9 + - * ( ) = ?
Water boils at 100 degrees at sea level, and at less on a mountain: the air is thinner there, so steam leaves sooner. A \
train that leaves at 9:40 and travels 180 km at 60 km/h arrives at 12:40. def area(width, height): return width * height
{"name": "search", "arguments": {"query": "opening hours of the museum", "limit": 5}}
She opened the letter, read it twice, and put it back into the drawer. "Nobody must know," she said. If x + 7 = 19, then \
x = 12, because 19 - 7 = 12. The three largest oceans are the Pacific, the Atlantic and the Indian Ocean.
"""
"""The probe, encoded with the run's tokenizer: of several kinds, and long enough for a mean and a high quantile."""
PROBE_TOKENS = 256
"""Most tokens of the probe."""


def probe_ids(renderer: Renderer) -> list[int]:
    """Return the tokens of the probe: as many as fit into half of the context."""
    limit = PROBE_TOKENS if renderer.max_context is None else min(PROBE_TOKENS, max(2, renderer.max_context // 2))
    return renderer.encode_content(PROBE_TEXT)[:limit]


class HeldVersion(NamedTuple):
    """Weights of the trainer that are about to be published."""

    version: int
    probe: Probe
    """With the trainer's log-probs under these weights."""
    stays: bool
    """Whether steps of the trainer leave them as they are."""
    seconds: float
    """Time that the trainer was busy with it."""


class _Source(NamedTuple):
    source: WeightSource
    num_bytes: int


class WeightPublisher:
    """Moves weights from the trainer to the servers."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        inference: Inference,
        run_dir: Path,
        config: EngineConfig,
        probe_ids: Sequence[int],
        send_dtype: str | None = None,
        compute_type: ComputeType = "float32",
    ) -> None:
        """Publish files, or send from the trainer's memory in `send_dtype`; `probe_ids` are at least two."""
        self._send_dtype = send_dtype
        self._trainer = trainer
        self._inference = inference
        self._directory = Path(config.publish_dir) if config.publish_dir else run_dir / "weights"
        self._probe_ids = np.asarray(probe_ids, np.int32)
        self._tolerance = probe_bounds(config, compute_type)

    async def hold(self, version: int) -> HeldVersion:
        """Hold the trainer's weights as `version`, for `send`."""
        begin = time.perf_counter()
        await self._trainer.hold(version, dtype=self._send_dtype)
        [logprobs] = await self._trainer.logprobs([self._probe_ids])
        probe = Probe(token_ids=self._probe_ids, logprobs=logprobs, tolerance=self._tolerance)
        return HeldVersion(version, probe, self._trainer.steps_while_sending, time.perf_counter() - begin)

    async def send(self, held: HeldVersion, *, beside: bool) -> PublishReport:
        """Put held weights on every server, once; with `beside` the trainer steps meanwhile, and writing counts as update.

        Cancellation: servers may have either version; the run is over.
        """
        begin = time.perf_counter()
        source, num_bytes = await self._source(held.version)
        written_s = time.perf_counter() - begin
        update = await self._inference.update_weights(source, held.probe)
        self._check(held.version, update)
        seconds = time.perf_counter() - begin
        if self._send_dtype is None:
            await anyio.to_thread.run_sync(lambda: prune(self._directory, keep=KEPT_PUBLISHED))
        return PublishReport(
            publish_s=held.seconds + (0.0 if beside else written_s),
            update_s=seconds - (0.0 if beside else written_s),
            pause_after_s=update.pause_after_s + (written_s if beside else 0.0),
            pause_s=update.pause_s,
            probe_difference=update.probe_difference,
            num_bytes=update.num_bytes or num_bytes,
            version=held.version,
            trainer_digest=update.trainer_digest,
            server_digests=update.server_digests,
        )

    async def _source(self, version: int) -> _Source:
        if self._send_dtype is not None:
            return _Source(WeightFeed(version=version, channel=self._trainer.channel, dtype=self._send_dtype), 0)
        publication = await self._trainer.publish(version, str(self._directory))
        file = ADAPTER_WEIGHTS_FILE if publication.adapter else WEIGHTS_FILE
        return _Source(publication, (Path(publication.path) / file).stat().st_size)

    def _check(self, version: int, update: UpdateReport) -> None:
        if update.version != version or self._inference.policy_version != version:
            raise WeightSyncError(
                f"published version {version}, but the servers report {update.version} for the update and "
                f"{self._inference.policy_version} now"
            )


class Publications:
    """Publishes the trainer's weights each time that they have changed."""

    def __init__(self, weights: WeightPublisher, state: LoopState) -> None:
        self._weights, self._clock, self._buffer = weights, state.clock, state.buffer
        self._journal, self._board, self._watchdog = state.journal, state.board, state.watchdog
        self._ended: anyio.Event | None = None
        """The end of the publication that overlaps training, until `finish` has been called; None: there is none."""
        self._error: AgentRLError | None = None
        self._report: PublishReport | None = None
        self._waited_s = 0.0

    async def first(self) -> None:
        """Put the weights with which the run begins on every server, as the version at which the clock stands."""
        await self._send(await self._hold(self._clock.version), who="the trainer", beside=False)
        self.take_cost()

    async def begin(self, tasks: TaskGroup, *, beside: bool) -> None:
        """Publish the weights after a step as the next version, once the publication before has ended.

        With `beside` and a snapshot, return when the trainer may step; the publication runs in `tasks`.
        """
        await self.finish()
        self._clock.stepped()
        begin = time.perf_counter()
        try:
            held = await self._hold(self._clock.trainer_version)
            if beside and held.stays:
                self._ended = anyio.Event()
                tasks.start_soon(self._send_beside, held, self._ended)
            else:
                await self._send(held, who="the trainer", beside=False)
                self._clock.tick(held.version)
        finally:
            self._waited_s += time.perf_counter() - begin

    async def finish(self) -> None:
        """Return when no publication runs."""
        if self._ended is None:
            return
        begin = time.perf_counter()
        waiting = self._board.waiting("the trainer", f"the publication of version {self._clock.trainer_version} to end")
        with waiting, self._journal.during("trainer", "wait_for_servers"):
            await self._ended.wait()
        self._waited_s += time.perf_counter() - begin
        self._ended = None
        if self._error is not None:
            raise self._error

    def take_cost(self) -> SyncCost:
        """Return the cost since the last call."""
        cost = SyncCost(self._report, self._waited_s)
        self._report, self._waited_s = None, 0.0
        return cost

    async def _hold(self, version: int) -> HeldVersion:
        self._journal.publishing(version)
        with self._board.waiting("the trainer", f"its worker to copy the weights of version {version}"):
            return await self._weights.hold(version)

    async def _send(self, held: HeldVersion, *, who: str, beside: bool) -> None:
        with self._board.waiting(who, f"the servers to take version {held.version}"):
            self._report = await self._weights.send(held, beside=beside)
        self._journal.published(time.perf_counter(), self._report)
        self._watchdog.progress()

    async def _send_beside(self, held: HeldVersion, ended: anyio.Event) -> None:
        try:
            await self._send(held, who="a publication", beside=True)
            self._clock.tick(held.version)
        except AgentRLError as error:
            self._error = error
            self._buffer.close()  # nothing waits for the next batch
        finally:
            ended.set()
