"""One interrupted run from a running server to a verdict: episodes, updates, the server's own words, the judge.

Invariant: the episodes go the public way (workflow, client, token graph, pool, HTTP), through a tap that only listens; the
verdict is on every trained token.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import anyio.to_thread
import numpy as np
from safetensors.torch import load_file

from agentrl.engine.publishing import PROBE_TEXT
from agentrl.inference.backend import Probe, UpdateReport
from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.pool import launch_pool
from agentrl.inference.pool.pool import ServerPool
from agentrl.tokens.renderer import Renderer
from agentrl.weights.disk import WEIGHTS_FILE
from agentrl.weights.types import Publication, WeightFeed
from tests.support.accounts import check_accounts, cut_versions, split_turns
from tests.support.channel import LocalTrainer
from tests.support.interruption import Interrupted, Plan, interrupt
from tests.support.judge import Judge, Judged
from tests.support.servers import Kind, call
from tests.support.tap import Served, Tap, tapped
from tests.support.versions import UNRELATED, Versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run whose books are in order, and its verdict."""

    run: Interrupted
    served: tuple[Served, ...]
    judged: Judged
    versions: Versions

    @property
    def interruptions(self) -> int:
        """Updates that came while at least one completion was half-way: it has tokens from before and from after."""
        return len(cut_versions(self.run.trajectories))

    @property
    def split_turns(self) -> int:
        """Completions with tokens of more than one version."""
        return split_turns(self.run.trajectories)


async def version_run(
    url: str,
    kind: Kind,
    base: Path,
    plan: Plan,
    *,
    folder: Path,
    pause: str = "exact",
    scale: float = UNRELATED,
    sync: Literal["disk", "distributed"] = "disk",
    drop_salt: bool = False,
) -> Outcome:
    """Interrupt episodes on the server at `url` by the updates of `plan` and return the judged outcome.

    Args:
        url: a running server, of which nobody else asks anything; it is left with the last weights of the plan.
        kind: which.
        base: HF checkpoint it was started with.
        plan: what to run.
        folder: for published weights.
        pause: `inference.pause_mode`.
        scale: how far versions are apart.
        sync: whether servers read the weights from disk, or get them from a process group whose rank 0 is here.
        drop_salt: take a guard away: requests reach the server without their cache salt.

    Raises:
        AssertionError: a token is lost, duplicated or differs from what the server said. Differences from the recompute
            are not raised: they are the verdict.
    """
    renderer = Renderer.load(base)
    versions = Versions(base, folder / "versions", quiet_ids=renderer.control_ids, scale=scale, seed=plan.seed)
    judge = Judge(base)
    probe_ids = np.array(renderer.encode_content(PROBE_TEXT), np.int32)

    probes: dict[int, Probe] = {}

    trainer = LocalTrainer({})

    async def update(pool: ServerPool, publication: Publication) -> UpdateReport:
        probe = probes[publication.version]
        if sync == "disk":
            return await pool.update_weights(publication, probe)
        trainer.weights = load_file(Path(publication.path) / WEIGHTS_FILE)
        return await pool.update_weights(WeightFeed(version=publication.version, channel=trainer.channel), probe)

    async with tapped(url, drop_salt=drop_salt) as tap, AsyncExitStack() as cleanup:
        cleanup.push_async_callback(_part, url, tap, trainer)
        config = InferenceConfig.model_validate(
            {"backend": kind, "urls": (tap.url,), "pause_mode": pause, "health_interval_s": 3600.0}
        )
        async with launch_pool(config, model_path=base, vocab_size=renderer.vocab_size, log_dir=folder) as pool:
            first = pool.policy_version + 1
            for version in range(first, first + 1 + plan.updates):  # before the episodes: the run itself only moves bytes
                probes[version] = judge.probe(versions.publication(version), probe_ids)
            run = await interrupt(plan, pool=pool, renderer=renderer, publication=versions.publication, update=update)
    check_accounts(run.trajectories, tap.served)
    judged = judge.judge(run.trajectories, versions.publication)
    sampled = sum(one.completion_tokens for one in tap.served)
    if len(judged.version) != sampled:
        raise AssertionError(f"{len(judged.version)} tokens are trained; the server sampled {sampled}")
    return Outcome(run=run, served=tuple(tap.served), judged=judged, versions=versions)


async def _part(url: str, tap: Tap, trainer: LocalTrainer) -> None:
    """End the process groups of a run at both ends: other tests use the server, too."""
    for name in tap.groups:
        await anyio.to_thread.run_sync(lambda name=name: call(url, "/destroy_weights_update_group", {"group_name": name}))
    trainer.sender.open((), tap.groups)
