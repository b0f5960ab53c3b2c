"""The games of TextArena for one player, or for several that the policy plays all (`SelfPlay`).

Invariant: what happens in a game follows from its seed and the moves. TextArena draws from Python's global random numbers,
so every instance swaps in its own around each call, and one lock keeps all instances apart; a game that hangs in a call
makes the others late, too. A reward that is no number, as some games pay for a move of the wrong form, is a fault.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import random
import re
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import anyio.to_thread

from agentrl.env import ChatStart, ChatStep, EpisodeEnd
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.types import Message, Task

Result = TypeVar("Result")
_ONLINE: Final = re.compile(r"\b(nltk|word_lists|jury|OpenRouterAgent)\b")
"""What a game's source imports if it downloads word lists, or asks a model of somebody else, as it plays."""
_ALL: Final = -1
_random_numbers = threading.Lock()


class TextArenaEnvironment:
    """A game of TextArena, played in a thread beside the event loop.

    A game of several players names them `player_0`, `player_1` and so on, and pays each what TextArena pays; a game of one
    pays its turn. Records `game.invalid_move`: whether a player lost by an invalid move.

    Args:
        game: its id, such as `TicTacToe-v0`; its wrappers are left out, because every player has a conversation of its own.
        num_players: of the game; 1: a game of one.
        game_args: further arguments of the game.
        allow_downloads: play games that load data or ask models over the network.

    Raises:
        ConfigError: TextArena is not installed, has no such game, or the game cannot be played here by so many.
    """

    extra = "agentrl[textarena]"
    needs_packages = ("textarena",)

    def __init__(
        self,
        game: str,
        *,
        num_players: int = 1,
        game_args: Mapping[str, Any] | None = None,
        allow_downloads: bool = False,
    ) -> None:
        self._game, self._num_players = game, num_players
        self._random = random.Random(0).getstate()
        with self._own_random_numbers():
            self._env = _make_game(game, dict(game_args or {}), allow_downloads=allow_downloads)

    @classmethod
    def check_arguments(
        cls, game: str, *, num_players: int = 1, game_args: Mapping[str, Any] | None = None, allow_downloads: bool = False
    ) -> None:
        """Begin a game once, before anything else starts.

        Raises:
            ConfigError: it cannot be played here.
        """
        environment = cls(game, num_players=num_players, game_args=game_args, allow_downloads=allow_downloads)
        try:
            with environment._own_random_numbers():
                environment._env.reset(num_players=num_players, seed=0)
        except Exception as error:
            kind = type(error).__name__
            raise ConfigError(f"TextArena: {game} cannot be played by {num_players}: {kind}: {str(error)[:300]}") from error

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        """Begin a game."""
        await self._call(lambda: self._env.reset(num_players=self._num_players, seed=seed))
        player, messages = await self._observe()
        return ChatStart(messages=messages, player=player)

    async def step(self, message: Message) -> ChatStep:
        """Play the answer, which the game reads itself.

        Raises:
            EnvironmentFault: the game is over without a reward for every player.
        """
        action = str(message.get("content") or "")
        is_done, _ = await self._call(lambda: self._env.step(action))
        if not is_done:
            player, messages = await self._observe()
            return ChatStep(messages=messages, player=player)
        rewards, info = await self._call(self._env.close)
        if not isinstance(rewards, dict) or set(cast("dict[int, object]", rewards)) != set(range(self._num_players)):
            raise EnvironmentFault(f"TextArena: {self._game} is over and pays {rewards!r:.200}, not every player")
        paid = cast("dict[int, Any]", rewards)
        metrics = {"game.invalid_move": float(any(each.get("invalid_move") for each in info.values()))}
        if self._num_players == 1:
            return ChatStep(reward=paid[0], end=EpisodeEnd.TERMINATED, metrics=metrics)
        named = {_player_name(player): reward for player, reward in paid.items()}
        return ChatStep(player_rewards=named, end=EpisodeEnd.TERMINATED, metrics=metrics)

    async def close(self) -> None:
        """Do nothing: a game holds nothing."""

    async def _observe(self) -> tuple[str, list[Message]]:
        """Return who plays next, and what that player has not seen yet, its own moves left out."""
        player, seen = await self._call(self._env.get_observation)
        lines = [
            text if sender == _ALL else f"[Player {sender}] {text}"
            for sender, text, kind in seen
            if not (sender == player and kind.name == "PLAYER_ACTION")
        ]
        text = "\n".join(line.strip() for line in lines) or "Go on."
        return "" if self._num_players == 1 else _player_name(player), [{"role": "user", "content": text}]

    async def _call(self, call: Callable[[], Result]) -> Result:
        def guarded() -> Result:
            with self._own_random_numbers():
                return call()

        return await anyio.to_thread.run_sync(guarded, abandon_on_cancel=True)

    @contextmanager
    def _own_random_numbers(self) -> Generator[None]:
        """Give the block this game's random numbers, and keep its prints off the terminal."""
        with _random_numbers:
            before = random.getstate()
            random.setstate(self._random)
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    yield
            finally:
                self._random = random.getstate()
                random.setstate(before)


def _player_name(player: int) -> str:
    return f"player_{player}"


def _make_game(game: str, args: Mapping[str, Any], *, allow_downloads: bool) -> Any:  # noqa: ANN401 - see the import
    try:
        import textarena  # pyright: ignore[reportMissingImports] - the extra `textarena`
        from textarena.envs import registration  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("TextArena is not installed; run `pip install 'agentrl[textarena]'`") from error
    specs: dict[str, Any] = registration.ENV_REGISTRY
    if game not in specs:
        stem = game.split("-")[0].lower()
        near = [name for name in specs if stem[:4] in name.lower()][:6] or sorted(specs)[:6]
        raise ConfigError(f"TextArena has no game {game!r}; such names are {', '.join(near)}")
    module = cast("str", specs[game].entry_point).partition(":")[0]
    online_call = None if allow_downloads else _ONLINE.search(_source_of(module))
    if online_call:
        raise ConfigError(
            f"TextArena: {game} uses {online_call[1]}, which loads data or asks a model over the network; choose another "
            "game, or set allow_downloads: true where that is possible"
        )
    try:
        env = textarena.make(game, **args)  # pyright: ignore
    except (ImportError, SyntaxError, TypeError, ValueError, LookupError, OSError) as error:
        kind = type(error).__name__
        raise ConfigError(f"TextArena: {game} does not work here: {kind}: {str(error).strip()[:300]}") from error
    while isinstance(env, textarena.Wrapper):  # pyright: ignore
        env = env.env
    return env


def _source_of(module: str) -> str:
    """Return the source of a game without importing it, as importing one may start a download."""
    package = importlib.util.find_spec("textarena")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return path.read_text(encoding="utf-8") if path.is_file() else ""
