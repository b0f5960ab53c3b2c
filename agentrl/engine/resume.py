"""The state of a run at a checkpoint, from which another process continues.

Invariant: a task whose group was trained or dropped before the checkpoint is not drawn again in the same pass. A group that
was still open is opened again under its number, because its episodes ended with the process. An evaluation that was due is
done.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentrl.data.digest import TaskDigest
from agentrl.data.draw import DrawState
from agentrl.data.load import TrainingTasks
from agentrl.errors import ConfigError, TrainError
from agentrl.types import Task


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
