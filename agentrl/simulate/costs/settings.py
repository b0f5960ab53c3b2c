"""The settings of a run file that decide who waits for whom; each is read, or derived as the engine derives it."""

from __future__ import annotations

from agentrl.config import RunConfig
from agentrl.simulate.costs.model import Fleet, RunShape


def shape_of_run(run: RunConfig, steps: int | None = None) -> RunShape:
    """Return the settings of a run; `steps` plays only so many, as the beginning of the run."""
    algorithm, rollout, engine = run.algorithm, run.rollout, run.engine
    count = engine.steps if steps is None else min(steps, engine.steps)
    return RunShape(
        steps=count,
        group_size=algorithm.group_size,
        groups_per_step=algorithm.groups_per_step,
        max_staleness=algorithm.max_staleness,
        policy=algorithm.staleness_policy,
        slots=rollout.max_concurrent_episodes,
        keeps_incomplete=rollout.incomplete_group == "keep",
        min_group_size=rollout.min_group_size,
        eval_every=engine.eval_every,
        eval_episodes=engine.eval_episodes if engine.eval_every else 0,
        freezes_evaluation=engine.eval_weights == "frozen",
        checkpoint_every=engine.checkpoint_every,
        overlaps_publication=engine.overlap_publication,
        rereads_context=run.inference.pause_mode == "exact",
        total_steps=engine.steps,
    )


def fleet_of_run(run: RunConfig) -> Fleet:
    """Return the servers and trainer processes that a run file asks for."""
    return Fleet(servers=len(run.inference.urls) or run.inference.servers, trainer_gpus=run.trainer.parallel.shape.world)
