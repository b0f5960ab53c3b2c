"""The parts and settings of a run, as the engine gets them.

Invariant: what the engine relies on is checked here, once: tasks with different ids, and something left to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.algo.config import AlgorithmConfig
from agentrl.client.config import SamplingConfig
from agentrl.data.digest import check_unique
from agentrl.data.load import TrainingTasks
from agentrl.engine.config import INTERRUPT_S, EngineConfig
from agentrl.engine.resume import NEW_RUN, RunState
from agentrl.errors import ConfigError
from agentrl.inference.backend import Inference
from agentrl.observe.progress import NoProgress, Progress
from agentrl.observe.trackers.feed import TrackerFeed
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.runner import PolicyRunner
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.base import Trainer
from agentrl.types import Task
from agentrl.workflow import RolloutWorkflow


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts and settings of one run."""

    workflow: RolloutWorkflow
    runner: PolicyRunner | None = None
    """Runs the episodes of `workflow`; None: on the event loop of this process."""
    tasks: TrainingTasks
    """Drawn in an order fixed by `seed`, in their own, or by a curriculum."""
    shuffle_tasks: bool = True
    """Whether each pass over the training tasks has its own order."""
    eval_tasks: Sequence[Task] = ()
    """Held-out tasks; needed when `engine.eval_every` is set."""
    inference: Inference
    """The running servers; they get the trainer's weights before the first episode."""
    renderer: Renderer
    trainer: Trainer
    run_dir: Path
    """Directory of the metrics, episodes, weights and checkpoints."""
    name: str = "run"
    algorithm: AlgorithmConfig
    rollout: RolloutConfig
    sampling: SamplingConfig
    engine: EngineConfig
    seed: int = 0
    """Of the task order and of the model calls."""
    send_dtype: str | None = None
    """Type in which weights are sent from the trainer's memory; None: through files."""
    resume: RunState = NEW_RUN
    """The state that an earlier process saved with the checkpoint of `trainer`."""
    interrupt_s: float = INTERRUPT_S
    """Seconds that a cancelled or failing run has to end its training step and save it; 0: it saves nothing."""
    progress: Progress = field(default_factory=NoProgress)
    trackers: TrackerFeed | None = None
    """Gets the records of the run, which also go to its files."""

    def __post_init__(self) -> None:
        if not self.tasks.is_endless:
            check_unique(self.tasks.finite, "the training")
        if self.resume.step >= self.engine.steps and not self.resume.evaluations_due:
            raise ConfigError(
                f"engine.steps: {self.engine.steps}, but the checkpoint has done {self.resume.step} steps; raise it to "
                "continue"
            )
        if self.engine.eval_every or self.resume.evaluations_due:
            check_unique(self.eval_tasks, "the evaluation")
