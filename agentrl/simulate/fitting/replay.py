"""Play a fitted run itself, and scale its costs so that it takes as long as it did.

Invariant: all costs grow by one factor, so their proportions stay as they were fitted.

On shared cores, processor seconds leave a part of the time unexplained: threads that wake up late, move between cores, or
wait for memory. It grows with the work, so the other settings of the same machine have it too.
"""

from __future__ import annotations

from dataclasses import replace

from agentrl.simulate.costs.model import CostModel, Fleet, RunShape
from agentrl.simulate.play import play_run
from agentrl.simulate.workload import EpisodeSource

_ROUNDS = 5
"""Plays, each of which brings the step time closer to the measured one."""
_PLAYED_STEPS = 32


def calibrate(costs: CostModel, step_s: float, shape: RunShape, fleet: Fleet, source: EpisodeSource) -> CostModel:
    """Return `costs`, of parts on shared cores, scaled so that a step of the run takes the measured `step_s` seconds."""
    shape = replace(shape, steps=min(shape.steps, _PLAYED_STEPS))
    factor = 1.0
    for _ in range(_ROUNDS):
        factor *= step_s / play_run(shape, fleet, _scaled(costs, factor), source, warm_up=1).step_s
    origin = f"{costs.origin}; each cost times {factor:.2f}, so that the run itself takes as long as it did"
    return replace(_scaled(costs, factor), origin=origin)


def _scaled(costs: CostModel, factor: float) -> CostModel:
    server, trainer, update, host = costs.server, costs.trainer, costs.update, costs.host
    return replace(
        costs,
        server=replace(server, tokens_per_s=server.tokens_per_s / factor),
        trainer=replace(trainer, fixed_s=trainer.fixed_s * factor, gpu_s_per_token=trainer.gpu_s_per_token * factor),
        update=replace(
            update,
            spot_check_s=update.spot_check_s * factor,
            publish_s=update.publish_s * factor,
            update_s=update.update_s * factor,
            pause_s=update.pause_s * factor,
            between_s=update.between_s * factor,
            checkpoint_s=update.checkpoint_s * factor,
        ),
        host=replace(host, turn_s=host.turn_s * factor, batch_s_per_token=host.batch_s_per_token * factor),
    )
