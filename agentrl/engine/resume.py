"""Where a run stood when a checkpoint was written, so that another process can go on from there.

Invariant: a task whose group was trained or dropped before the checkpoint is not drawn again in the same pass, and one whose
group was still open is: its group is opened anew under its number, because its episodes ended with the process.
"""

from __future__ import annotations

import msgspec

from agentrl.errors import TrainError


class RunState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's part of a checkpoint; the trainer keeps it as a note beside its own.

    Example:
        >>> state = RunState(step=3, policy_version=3, groups_admitted=8, groups_open=(6, 7))
        >>> RunState.from_note(state.to_note(), where="step-000003") == state
        True
    """

    step: int
    """Training steps finished."""
    policy_version: int
    """Version the weights of the checkpoint were published as."""
    groups_admitted: int
    """Groups opened; the next has this number."""
    groups_open: tuple[int, ...]
    """Numbers of those neither trained nor dropped."""

    def to_note(self) -> str:
        """Return this as a line of JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_note(cls, note: str, *, where: str) -> RunState:
        """Return what `to_note` wrote.

        Args:
            note: the note of a checkpoint.
            where: names the checkpoint in the message.

        Raises:
            TrainError: when it is not such a note: the checkpoint was not written by a run.
        """
        try:
            state = msgspec.json.decode(note, type=cls)
        except msgspec.DecodeError as error:
            raise TrainError(
                f"{where}: the checkpoint does not say where its run stood ({error}), so the run cannot go on from it; "
                "start a new run with model.path set to it"
            ) from error
        if min((state.step, state.policy_version, state.groups_admitted, *state.groups_open)) < 0:
            raise TrainError(f"{where}: the checkpoint's run state is negative somewhere: {note}")
        return state
