"""Evaluation of one checkpoint of a demo: greedy, and sampled under each limit of an episode.

Invariant: the tasks are held out; every evaluation of a checkpoint asks the same servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.engine.evaluate import EvalReport, evaluate_policy
from agentrl.inference.launch.pool import launch_pool
from agentrl.tokens.renderer import Renderer
from agentrl.types import Task
from agentrl.workflow import load_workflow
from agentrl_workflows.demo.progress import episode_progress
from agentrl_workflows.demo.recipe import DemoRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """One checkpoint on the held-out tasks."""

    greedy: EvalReport
    """Under the largest limit."""
    by_limit: Mapping[int, EvalReport]
    """Sampled, by limit."""

    @property
    def sampled(self) -> EvalReport:
        """Sampled, under the largest limit."""
        return self.by_limit[max(self.by_limit)]

    @property
    def failures(self) -> dict[str, int]:
        """Episodes without a result, by stop reason, of all evaluations of the checkpoint."""
        total: Counter[str] = Counter()
        for report in (self.greedy, *self.by_limit.values()):
            total.update(report.failures)
        return dict(total)


async def evaluate_checkpoint(
    run: RunConfig, checkpoint: Path, recipe: DemoRecipe, tasks: Sequence[Task], limits: tuple[int, ...]
) -> Evaluations:
    """Evaluate one checkpoint on `tasks`: greedy once, sampled under each limit.

    Cancellation: the servers it started end.
    """
    renderer = Renderer.load(checkpoint)

    async def one(limit: int, greedy: bool) -> EvalReport:
        workflow = load_workflow(run.workflow, {**run.workflow_args, recipe.limit_argument: limit})
        label = f"{'greedy' if greedy else 'sampled'}, at most {limit} {recipe.limit_unit}s"
        with episode_progress(label, recipe.eval_episodes) as advance:
            return await evaluate_policy(
                workflow,
                tasks,
                backend=pool,
                renderer=renderer.within(pool.max_context_tokens),
                rollout=run.rollout,
                sampling=run.sampling,
                episodes=recipe.eval_episodes,
                greedy=greedy,
                on_episode=lambda _episode: advance(),
            )

    log_dir = run.run_dir / "logs" / "evaluation"
    servers = max(recipe.eval_servers, run.inference.servers)
    inference = run.resolved_inference.model_copy(update={"servers": servers})
    async with launch_pool(
        inference, model_path=checkpoint, vocab_size=renderer.vocab_size, seed=run.seed, log_dir=log_dir
    ) as pool:
        greedy = await one(max(limits), True)
        return Evaluations(greedy=greedy, by_limit={limit: await one(limit, False) for limit in limits})
