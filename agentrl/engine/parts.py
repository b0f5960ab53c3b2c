"""The parts and settings of a run, as the engine gets them, and the state from which it begins or resumes.

Invariant: what the engine relies on is checked here, once: tasks with different ids, and something left to do. A source of
groups owns each group from its ticket until it completes or drops it; the buffer keeps the staleness bound of such groups by
dropping or masking: clients do not wait for the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from agentrl.algo.batch_advantages import NO_BATCHES, RunningSquare
from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.slots import load_without_torch
from agentrl.client.config import SamplingConfig
from agentrl.data.digest import TaskDigest, check_unique
from agentrl.data.draw import DrawState
from agentrl.data.load import TrainingTasks
from agentrl.engine.buffer import GroupBuffer, VersionClock
from agentrl.engine.config import INTERRUPT_S, ComputeType, EngineConfig
from agentrl.errors import ConfigError, TrainError
from agentrl.inference.backend import Backend, Inference
from agentrl.observe.progress import NoProgress, Progress
from agentrl.observe.trackers.feed import TrackerFeed
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import PolicyRunner
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.base import Trainer
from agentrl.types import Group, Task, Trajectory, Turn
from agentrl.workflow import RolloutWorkflow


class RunState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's part of a checkpoint, which the trainer stores as a note.

    Example:
        >>> state = RunState(step=3, policy_version=3, groups_admitted=8, groups_open=(6, 7))
        >>> RunState.from_note(state.to_note(), where="step-000003") == state
        True
    """

    step: int
    """Training steps finished."""
    policy_version: int
    """Version under which the weights of the checkpoint were published."""
    groups_admitted: int
    """Number of groups opened; the next new group has this number."""
    groups_open: tuple[int, ...]
    """Numbers of the groups neither trained nor dropped."""
    evaluations_due: tuple[int, ...] = ()
    """Steps after which an evaluation was asked for that had no result yet."""
    tasks: TaskDigest | None = None
    """The training tasks; None in checkpoints of earlier releases."""
    eval_tasks: TaskDigest | None = None
    """The evaluation tasks; None where the run evaluates nothing."""
    draw: DrawState | None = None
    """Results and choices of the curriculum; None where the run has none."""
    advantages_seen: RunningSquare = NO_BATCHES
    """What `algorithm.normalize: running` has seen."""

    @property
    def continues(self) -> bool:
        """Whether an earlier process of the run has published weights, which are version 1 and above."""
        return self.policy_version > 0

    def mark(self) -> dict[str, object]:
        """Return the `resumed` event, by which readers leave out the lines of work that was lost."""
        return {
            "step": self.step,
            "groups_admitted": self.groups_admitted,
            "groups_open": self.groups_open,
            "evaluations_due": self.evaluations_due,
        }

    def with_tasks(self, tasks: TrainingTasks) -> RunState:
        """Return the state of a run that continues with other training tasks."""
        return msgspec.structs.replace(self, tasks=tasks.digest(self._drawn))

    @property
    def _drawn(self) -> tuple[int, ...]:
        """Number of tasks that were drawn from each endless source."""
        return () if self.tasks is None else tuple(stream.drawn for stream in self.tasks.streams)

    def check_tasks(self, tasks: Sequence[Task] | TrainingTasks, eval_tasks: Sequence[Task], *, where: str) -> None:
        """Raise ConfigError, which names `where` and what has changed, unless a run continues with the tasks that it had."""
        training = None if self.tasks is None else TrainingTasks.of(tasks).digest(self._drawn)
        for name, now, before in (
            ("training", training, self.tasks),
            ("evaluation", TaskDigest.of(eval_tasks), self.eval_tasks),
        ):
            difference = now.difference(before) if now is not None and before is not None else None
            if difference is not None:
                raise ConfigError(
                    f"the {name} tasks are not those of {where}: {difference}. Groups are drawn by number, so some tasks "
                    "would be trained twice and others never. Restore the tasks, start another run with --name, or pass "
                    "--accept-changed-tasks to continue with these"
                )

    def to_note(self) -> str:
        """Return this as a line of JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_note(cls, note: str, *, where: str) -> RunState:
        """Return the state that `to_note` wrote; raises TrainError, which names the checkpoint `where`, for another form."""
        try:
            state = msgspec.json.decode(note, type=cls)
        except msgspec.DecodeError as error:
            raise TrainError(
                f"{where}: the checkpoint holds no state of a run ({error}), so no run can continue from it; "
                "start a new run with model.path set to it"
            ) from error
        numbers = (state.step, state.policy_version, state.groups_admitted, *state.groups_open, *state.evaluations_due)
        if min(numbers) < 0:
            raise TrainError(f"{where}: the run state of the checkpoint has a negative number: {note}")
        return state


NEW_RUN = RunState(step=0, policy_version=0, groups_admitted=0, groups_open=())
"""The state of a run that has done nothing."""
BEGUN_RUN = RunState(step=0, policy_version=1, groups_admitted=0, groups_open=())
"""The state of a run that lost its process before its first checkpoint: its first weights were version 1."""


class EpisodeLister(Protocol):
    """Lists an episode among those in flight while the block runs; see `InFlight.episode`."""

    def __call__(
        self, episode_id: str, task_id: str, group: int | None
    ) -> AbstractContextManager[Callable[[Turn], None], bool | None]:
        """Yield the callback for the turns of the episode."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupIntake:
    """The parts of a run that a source of groups works with."""

    buffer: GroupBuffer
    clock: VersionClock
    backend: Backend
    """Answers model calls, and counts them by episode."""
    release: Callable[[str], None]
    """Drops what the servers keep of an ended episode."""
    flight: EpisodeLister
    on_episode: Callable[[Trajectory, int], None]
    """Records a finished episode of a group."""
    resumed_step: int
    """Steps of the checkpoint from which the run continues; 0 for a new run."""


class GroupSource(Protocol):
    """Brings groups that no task of the run opens, such as conversations of the users of an online run, into the buffer."""

    async def fill(self, intake: GroupIntake) -> None:
        """Open groups, and complete or drop each, until the buffer is closed.

        Cancellation: episodes in flight end and are lost; what the source has promised to keep is on the disk.
        """
        ...

    def is_idle(self) -> bool:
        """Return whether nothing can move before somebody outside acts, so that standing still is no stall."""
        ...

    def dropped(self, index: int) -> None:
        """Take note that the buffer dropped a group."""
        ...

    async def taken(self, step: int, groups: Sequence[Group]) -> Sequence[Group]:
        """Take note that `step` trains these groups, and return their episodes in the groups that are compared."""
        ...


def load_driver_functions(algorithm: AlgorithmConfig) -> None:
    """Load the functions that make a batch, so that a run without them ends before its first groups.

    Raises:
        ConfigError: one of them is not there, does not take its options, or imports torch.
    """
    load_without_torch(algorithm.slots.advantage, Sequence)
    if algorithm.slots.shaping.name != "none":
        load_without_torch(algorithm.slots.shaping, Group)


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
    source: GroupSource | None = None
    """Brings the groups that are trained; None: they are those of the tasks."""
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
    compute_type: ComputeType = "float32"
    """By which the defaults of the probe and of the spot checks go."""
    resume: RunState = NEW_RUN
    """The state that an earlier process saved with the checkpoint of `trainer`."""
    interrupt_s: float = INTERRUPT_S
    """Seconds that a cancelled or failing run has to end its training step and save it; 0: it saves nothing."""
    progress: Progress = field(default_factory=NoProgress)
    trackers: TrackerFeed | None = None
    """Gets the records of the run, which also go to its files."""

    def __post_init__(self) -> None:
        load_driver_functions(self.algorithm)
        if not self.tasks.is_endless:
            check_unique(self.tasks.finite, "the training")
        if self.resume.step >= self.engine.steps and not self.resume.evaluations_due:
            raise ConfigError(
                f"engine.steps: {self.engine.steps}, but the checkpoint has done {self.resume.step} steps; raise it to "
                "continue"
            )
        if self.engine.eval_every or self.resume.evaluations_due:
            check_unique(self.eval_tasks, "the evaluation")
