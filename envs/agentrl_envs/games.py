"""Nim and tic-tac-toe for two players, without a download.

Invariant: the moves of a game follow from its task, its seed and what the players wrote. A game pays 1 to the winner and -1
to the loser, 0 to both for a draw. A player that names no legal move three times in a row loses; the other one gets 0,
because it has beaten no opponent. Training and held-out games share no start; Nim's heaps in another order are the same.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol

from agentrl.env import ChatStart, ChatStep, EpisodeEnd
from agentrl.errors import ConfigError
from agentrl.types import Message, Task

PLAYERS: Final = ("first", "second")
"""The names of the players, in the order of their moves."""
_MOVE = re.compile(r"\[([0-9 ,]{1,40})\]")
_MAX_INVALID: Final = 3
_HELD_OUT_SHARE: Final = 8
_MAX_MISSES: Final = 2_000
_LINES: Final = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


class Rules(Protocol):
    """The rules of a game and the state of one play of it; a move is a tuple of numbers."""

    instructions: str

    def moves(self) -> Sequence[tuple[int, ...]]:
        """Return the legal moves; none when the game is over."""
        ...

    def play(self, move: tuple[int, ...]) -> None:
        """Do a legal move of the player whose turn it is."""
        ...

    def winner(self) -> int | None:
        """Return the index of the player that has won; None if no one has, or not yet."""
        ...

    def __str__(self) -> str:
        """Return the position as the players see it."""
        ...


class Nim:
    """Heaps of objects; who takes the last object wins. The move [2, 3] takes 3 from heap 2."""

    instructions = (
        "Nim: take any number of objects from one heap. Who takes the last object wins. End your answer with your move in "
        "brackets, the number of the heap and how many to take: [2, 3] takes 3 from heap 2."
    )

    def __init__(self, start: Sequence[int]) -> None:
        self._heaps = list(start)
        self._num_moves = 0

    @staticmethod
    def random_start(rng: random.Random) -> list[int]:
        """Return three heaps of 1 to 7 objects, the smallest first."""
        return sorted(rng.randint(1, 7) for _ in range(3))

    def moves(self) -> Sequence[tuple[int, ...]]:
        """Return the pairs of heap, from 1, and objects to take."""
        return [(heap, take) for heap, size in enumerate(self._heaps, 1) for take in range(1, size + 1)]

    def play(self, move: tuple[int, ...]) -> None:
        """Take objects."""
        heap, take = move
        self._heaps[heap - 1] -= take
        self._num_moves += 1

    def winner(self) -> int | None:
        """Return who took the last object."""
        return None if any(self._heaps) else (self._num_moves - 1) % 2

    def __str__(self) -> str:
        return "; ".join(f"heap {number}: {size}" for number, size in enumerate(self._heaps, 1))


class TicTacToe:
    """Three in a row on a board of nine squares. The move [5] marks the middle."""

    instructions = (
        "Tic-tac-toe: three of your marks in a row, a column or a diagonal win. The first player is X, the second O. End "
        "your answer with the number of a free square in brackets, such as [5]."
    )

    def __init__(self, start: Sequence[int]) -> None:
        self._board = [-1] * 9
        self._num_moves = 0
        for square in start:
            self.play((square,))

    @staticmethod
    def random_start(rng: random.Random) -> list[int]:
        """Return the squares of 0 or 2 moves that are played already."""
        return rng.sample(range(1, 10), rng.choice((0, 2)))

    def moves(self) -> Sequence[tuple[int, ...]]:
        """Return the free squares, from 1."""
        return [] if self.winner() is not None else [(at + 1,) for at, owner in enumerate(self._board) if owner < 0]

    def play(self, move: tuple[int, ...]) -> None:
        """Mark a square."""
        self._board[move[0] - 1] = self._num_moves % 2
        self._num_moves += 1

    def winner(self) -> int | None:
        """Return whose marks stand three in a row."""
        board = self._board
        return next((board[a] for a, b, c in _LINES if board[a] >= 0 and board[a] == board[b] == board[c]), None)

    def __str__(self) -> str:
        marks = ["XO"[owner] if owner >= 0 else str(at) for at, owner in enumerate(self._board, 1)]
        return "\n".join(" ".join(marks[row : row + 3]) for row in (0, 3, 6))


_GAMES: Final[dict[str, type[Nim | TicTacToe]]] = {"nim": Nim, "tic_tac_toe": TicTacToe}


def game_tasks(
    *,
    game: str = "nim",
    count: int = 40,
    seed: int = 0,
    split: Literal["train", "held_out"] = "train",
    opponent: Literal["self", "random"] = "self",
) -> list[Task]:
    """Return `count` tasks with different starts; one start in eight is held out.

    Args:
        game: `nim` or `tic_tac_toe`.
        count: how many.
        seed: picks the starts.
        split: which one of the starts depends on the start alone.
        opponent: `self`: the policy plays both sides; `random`: it plays one side, which the seed of the episode chooses,
            against random legal moves.

    Raises:
        ValueError: there is no such game, or it has not so many starts.

    Example:
        >>> game_tasks(count=1)[0].data
        {'game': 'nim', 'start': [1, 2, 7], 'opponent': 'self'}
    """
    if game not in _GAMES:
        raise ValueError(f"game must be one of {sorted(_GAMES)}, got {game!r}")
    rng = random.Random(f"{game} starts {seed}")
    starts: dict[str, list[int]] = {}
    misses = 0
    while len(starts) < count:
        start = _GAMES[game].random_start(rng)
        is_held_out = zlib.crc32(f"{game} {start}".encode()) % _HELD_OUT_SHARE == 0
        if is_held_out != (split == "held_out") or str(start) in starts:
            misses += 1
            if misses > _MAX_MISSES:
                raise ValueError(f"found only {len(starts)} of {count} different {split} starts; ask for fewer tasks")
            continue
        misses = 0
        starts[str(start)] = start
    return [
        Task(id=f"{game}-{split}-{opponent}-{number}", data={"game": game, "start": start, "opponent": opponent})
        for number, start in enumerate(starts.values())
    ]


class GameEnvironment:
    """Nim or tic-tac-toe against oneself or a random player; a task may name `game`, `start` and `opponent`.

    Args:
        game: `nim` or `tic_tac_toe`.
        opponent: as for `game_tasks`. With `self` the environment is a game of two players.

    Raises:
        ConfigError: there is no such game or opponent.
    """

    def __init__(self, game: str = "nim", opponent: str = "self") -> None:
        if game not in _GAMES or opponent not in ("self", "random"):
            raise ConfigError(
                f"expected a game of {sorted(_GAMES)} and an opponent self or random, got {game!r} and {opponent!r}"
            )
        self._default = {"game": game, "opponent": opponent}
        self._rules: Rules = Nim((1,))
        self._rng = random.Random(0)
        self._mover = 0
        self._own: int | None = None
        self._num_invalid = 0
        self._told: set[int] = set()

    @classmethod
    def check_arguments(cls, game: str = "nim", opponent: str = "self") -> None:
        """Refuse what the class refuses, before anything else starts."""
        cls(game, opponent)

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        """Begin a game."""
        chosen: dict[str, Any] = {**self._default, **task.data}
        self._rng = random.Random(seed)
        kind = _GAMES[chosen["game"]]
        start = chosen["start"] if "start" in chosen else kind.random_start(self._rng)
        self._rules, self._mover, self._num_invalid = kind(start), 0, 0
        self._told.clear()
        self._own = self._rng.randrange(2) if chosen["opponent"] == "random" else None
        if self._own == 1:
            self._play_randomly()
        return ChatStart(messages=[self._position()], player=self._player(self._mover))

    async def step(self, message: Message) -> ChatStep:
        """Play the last move in brackets."""
        moves = _MOVE.findall(str(message.get("content") or ""))
        move = tuple(int(number) for number in re.findall(r"\d+", moves[-1])) if moves else ()
        if move not in self._rules.moves():
            return self._refuse()
        self._num_invalid = 0
        told = ""
        self._rules.play(move)
        self._mover = 1 - self._mover
        if self._own is not None and self._rules.moves():
            told = f"Your opponent plays {self._play_randomly()}.\n"
        elif self._own is None:
            told = f"Your opponent plays {list(move)}.\n"
        if not self._rules.moves():
            winner = self._rules.winner()
            return self._end([0.0, 0.0] if winner is None else [1.0, -1.0] if winner == 0 else [-1.0, 1.0])
        return ChatStep(messages=[self._position(told)], player=self._player(self._mover))

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _refuse(self) -> ChatStep:
        self._num_invalid += 1
        if self._num_invalid >= _MAX_INVALID:
            return self._end([-1.0 if player == self._mover else 0.0 for player in range(2)], forfeited=True)
        text = f"That is no legal move. {self._rules.instructions}\n\n{self._rules}"
        return ChatStep(messages=[{"role": "user", "content": text}], player=self._player(self._mover))

    def _end(self, rewards: Sequence[float], *, forfeited: bool = False) -> ChatStep:
        metrics = {"game.forfeited": float(forfeited)}
        if self._own is None:
            return ChatStep(
                player_rewards=dict(zip(PLAYERS, rewards, strict=True)), end=EpisodeEnd.TERMINATED, metrics=metrics
            )
        own = rewards[self._own]
        return ChatStep(reward=own, end=EpisodeEnd.TERMINATED, metrics={**metrics, "success": float(own > 0)})

    def _play_randomly(self) -> list[int]:
        move = self._rng.choice(self._rules.moves())
        self._rules.play(move)
        self._mover = 1 - self._mover
        return list(move)

    def _player(self, index: int) -> str:
        return "" if self._own is not None else PLAYERS[index]

    def _position(self, told: str = "") -> Message:
        """Return what the next player reads: the rules in its first message, then moves and positions."""
        begin = ""
        if self._mover not in self._told:
            self._told.add(self._mover)
            begin = f"You are the {PLAYERS[self._mover]} player. {self._rules.instructions}\n\n"
        return {"role": "user", "content": f"{begin}{told}{self._rules}"}
