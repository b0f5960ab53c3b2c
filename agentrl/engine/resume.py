"""The state of a run at a checkpoint, from which another process continues.

Invariant: a task whose group was trained or dropped before the checkpoint is not drawn again in the same pass. A group that
was still open is opened again under its number, because its episodes ended with the process.
"""

from __future__ import annotations

import msgspec

from agentrl.errors import TrainError


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

    def to_note(self) -> str:
        """Return this as a line of JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_note(cls, note: str, *, where: str) -> RunState:
        """Return the state that `to_note` wrote.

        Args:
            note: the note of a checkpoint.
            where: names the checkpoint in the message.

        Raises:
            TrainError: when the note has another form, because the checkpoint was not written by a run.
        """
        try:
            state = msgspec.json.decode(note, type=cls)
        except msgspec.DecodeError as error:
            raise TrainError(
                f"{where}: the checkpoint holds no state of a run ({error}), so no run can continue from it; "
                "start a new run with model.path set to it"
            ) from error
        if min((state.step, state.policy_version, state.groups_admitted, *state.groups_open)) < 0:
            raise TrainError(f"{where}: the run state of the checkpoint has a negative number: {note}")
        return state
