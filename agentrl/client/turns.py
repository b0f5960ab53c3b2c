"""The turns of an episode as its workflow sees them: `client.turns[-1].reward(0.5)`.

Invariant: a handle stands for one recorded turn, by its index; it holds no copy of the turn, so it shows a reward that was
given by another way, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, overload

from agentrl.types import BranchPath, Message, Speaker, Turn

if TYPE_CHECKING:
    from agentrl.client.episode import EpisodeRecord


class TurnHandle:
    """One turn of a running episode."""

    __slots__ = ("_branch", "_episode", "index")

    def __init__(self, episode: EpisodeRecord, index: int, branch: BranchPath) -> None:
        """Stand for turn `index` of `episode`, as a client of `branch` sees it."""
        self._episode = episode
        self._branch = branch
        self.index = index
        """Number of the turn in the episode, from 0 in order of completion."""

    @property
    def record(self) -> Turn:
        """What was recorded: token ids, log-probs, versions."""
        return self._episode.turns[self.index]

    @property
    def message(self) -> Message:
        """The assistant message of the turn."""
        return self.record.message

    @property
    def given_reward(self) -> float | None:
        """The reward of the turn; None until it has one."""
        return self.record.reward

    def reward(self, value: float | Mapping[str, float]) -> None:
        """Set the reward of this turn, a number or named parts of it, once.

        Raises:
            RewardError: `value` is not a finite number, or the turn has a reward already.
            WorkflowError: the turn is of a declared branch that the client is not in, or the episode is closed.
        """
        self._episode.reward_turn(self.index, value, self._branch)

    def __repr__(self) -> str:
        return f"<turn {self.index}: {self.message}>"


class TurnHandles(Sequence[TurnHandle]):
    """The completed turns of an episode, in order; it grows as calls complete."""

    def __init__(self, episode: EpisodeRecord, speaker: Speaker) -> None:
        """Show the turns of the role, the player and the branch of `speaker`; where one is empty, those of all."""
        self._episode = episode
        self._speaker = speaker

    def _indices(self) -> list[int]:
        role, player, branch = self._speaker
        turns = enumerate(self._episode.turns)
        named = [(at, turn) for at, turn in turns if role in ("", turn.role) and player in ("", turn.player)]
        return [at for at, turn in named if turn.branch[: len(branch)] == branch]

    def _handle(self, index: int) -> TurnHandle:
        return TurnHandle(self._episode, index, self._speaker.branch)

    def __len__(self) -> int:
        return len(self._indices())

    def __iter__(self) -> Iterator[TurnHandle]:
        return iter([self._handle(index) for index in self._indices()])

    @overload
    def __getitem__(self, index: int) -> TurnHandle: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TurnHandle]: ...

    def __getitem__(self, index: int | slice) -> TurnHandle | Sequence[TurnHandle]:
        found = self._indices()
        if isinstance(index, slice):
            return [self._handle(at) for at in found[index]]
        try:
            return self._handle(found[index])
        except IndexError:
            raise IndexError(f"episode {self._episode.id} has {len(found)} turns so far, asked for {index}") from None
