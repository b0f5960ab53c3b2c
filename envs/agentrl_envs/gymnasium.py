"""Any Gymnasium environment as a chat: observations and action spaces become text, an `<action>` of the answer is played.

Invariant: whatever the policy writes is an action or a message that says what an action is; only the environment's own
errors are faults. An answer without an action costs a turn; `max_invalid` of them in a row truncate the episode. A call that
hangs is abandoned with its instance, which nothing uses again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar, cast

import anyio

from agentrl.env import ChatStart, ChatStep, EpisodeEnd, call_in_thread
from agentrl.errors import ConfigError
from agentrl.types import Message, Task
from agentrl_envs.minigrid import describe_view, is_view

Result = TypeVar("Result")
GAME_INSTRUCTIONS: Mapping[str, str] = {
    "FrozenLake": (
        "Cross a frozen lake from S to G without falling into a hole H; you stand in brackets. Actions: 0 left, 1 down, 2 "
        "right, 3 up. The ice may be slippery, so that you slide sideways."
    ),
    "Blackjack": (
        "Beat the dealer without going over 21. You see your sum, the dealer's card, and whether you have a usable ace, 1 "
        "or 0. Actions: 0 stick, 1 take another card."
    ),
    "Taxi": (
        "Take the passenger to the destination and drop them there. The taxi is in [brackets], the passenger waits at the "
        "letter in (parentheses), or is in the taxi if there is none, and the destination is the letter in <angle "
        "brackets>. You cannot pass | walls. Actions: 0 south, 1 north, 2 east, 3 west, 4 pick up, 5 drop off."
    ),
}
"""What these environments are about, by the first part of their id."""
_ACTION = re.compile(r"<action>([^<]{1,2000})</action>")
_COLOR = re.compile(r"\x1b\[([0-9;]*)m")
_MAX_PRINTED = 2_000


class GymEnvironment:
    """A Gymnasium environment, played in a thread beside the event loop.

    Args:
        id: its registered name, such as `FrozenLake-v1`; a task may name another one in its field `env_id`.
        make_args: further arguments of `gymnasium.make`.
        instructions: the first message to the policy; None: what `GAME_INSTRUCTIONS` has, or nothing.
        observe: makes text of an observation; None: the environment's own drawing (`ansi`) if it has one, else the values.
        invalid_reward: of a turn without an action; None: it has no reward of its own.
        max_invalid: turns without an action in a row that end the episode.

    Raises:
        ConfigError: Gymnasium is not installed, or has no such environment.
    """

    extra = "agentrl[gym]"
    needs_packages = ("gymnasium",)

    def __init__(
        self,
        id: str,
        *,
        make_args: Mapping[str, Any] | None = None,
        instructions: str | None = None,
        observe: Callable[[Any], str] | None = None,
        invalid_reward: float | None = None,
        max_invalid: int = 3,
    ) -> None:
        self._id = id
        self._make_args = dict(make_args or {})
        self._instructions = instructions
        self._observe = observe
        self._invalid_reward, self._max_invalid = invalid_reward, max_invalid
        self._num_invalid = 0
        self._is_abandoned = False
        self._made_id = id
        self._env = _make(id, self._make_args, drawn=observe is None)

    @classmethod
    def check_arguments(cls, id: str, **options: Any) -> None:  # noqa: ANN401 - those of the class
        """Make one copy, before anything else starts.

        Raises:
            ConfigError: as the class.
        """
        cls(id, **options)._env.close()

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        """Begin an episode; the task's field `options` is passed on.

        Cancellation: abandons the instance in its thread.
        """
        wanted = str(task.data.get("env_id", self._id))
        options: object = task.data.get("options")

        def begin() -> str:
            if wanted != self._made_id:
                self._env.close()
                self._env, self._made_id = _make(wanted, self._make_args, drawn=self._observe is None), wanted
            observation, _ = self._env.reset(seed=seed, options=options)
            return self._text(observation)

        seen = await self._in_thread(begin)
        self._num_invalid = 0
        instructions = GAME_INSTRUCTIONS.get(wanted.split("-")[0].split("/")[-1].rstrip("0123456789"), "")
        told = instructions if self._instructions is None else self._instructions
        action = f"Think, then end your answer with <action>...</action>; an action is {describe_actions(self._env)}."
        parts = [part for part in (told, action, seen) if part]
        return ChatStart(messages=[{"role": "user", "content": "\n\n".join(parts)}])

    async def step(self, message: Message) -> ChatStep:
        """Play the action of an answer.

        Cancellation: as `reset`.
        """
        action = read_action(str(message.get("content") or ""), self._env.action_space, action_names(self._env))
        if action is None:
            return self._refuse(describe_actions(self._env))
        self._num_invalid = 0

        def play() -> tuple[str, object, bool, bool]:
            observation, reward, terminated, truncated, _ = self._env.step(action[0])
            return self._text(observation), reward, bool(terminated), bool(truncated)

        seen, reward, terminated, truncated = await self._in_thread(play)
        end = EpisodeEnd.TERMINATED if terminated else EpisodeEnd.TRUNCATED if truncated else None
        return ChatStep(messages=[{"role": "user", "content": seen}], reward=cast("float", reward), end=end)

    async def close(self) -> None:
        """Close the environment, unless a call of it still runs."""
        if not self._is_abandoned:
            await self._in_thread(self._env.close)

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        try:
            return await call_in_thread(call, f"environment {self._made_id}")
        except anyio.get_cancelled_exc_class():
            self._is_abandoned = True
            raise

    def _refuse(self, description: str) -> ChatStep:
        self._num_invalid += 1
        end = EpisodeEnd.TRUNCATED if self._num_invalid >= self._max_invalid else None
        text = f"That has no valid action. End your answer with <action>...</action>; an action is {description}."
        return ChatStep(messages=[{"role": "user", "content": text}], reward=self._invalid_reward, end=end)

    def _text(self, observation: object) -> str:
        if self._observe is not None:
            return self._observe(observation)
        if self._env.render_mode == "ansi":
            drawing = self._env.render()
            if isinstance(drawing, str):
                return _plain_drawing(drawing)
        return describe_view(cast("Mapping[str, Any]", observation)) if is_view(observation) else _printed(observation)


def action_names(env: Any) -> Mapping[str, int]:  # noqa: ANN401 - Gymnasium is imported only where it is used
    """Return the names that an environment gives its numbered actions, as MiniGrid and Atari do; empty for others."""
    env = env.unwrapped
    if type(env.action_space).__name__ != "Discrete":
        return {}
    actions: object = getattr(env, "actions", None)
    meanings: Callable[[], Sequence[str]] | None = getattr(env, "get_action_meanings", None)
    named: dict[str, int] = {}
    if isinstance(actions, type) and issubclass(actions, IntEnum):
        named = {action.name.lower(): int(action) for action in actions}
    elif meanings is not None:
        named = {name.lower(): number for number, name in enumerate(meanings())}
    return {name: number for name, number in named.items() if env.action_space.contains(number)}


def describe_actions(env: Any) -> str:  # noqa: ANN401 - as above
    """Return what an action of an environment is, in words: its space, or the names of its actions."""
    names = action_names(env)
    if not names:
        return describe_space(env.action_space)
    return f"one of: {', '.join(names)} (or its number: {', '.join(f'{at} {name}' for name, at in names.items())})"


def describe_space(space: Any) -> str:  # noqa: ANN401 - as above
    """Describe the members of a Gymnasium space in words."""
    kind = type(space).__name__
    if kind == "Discrete":
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    if kind == "MultiBinary":
        return f"a JSON list of {space.n} numbers 0 or 1"
    if kind == "MultiDiscrete":
        return f"a JSON list of whole numbers, each from 0 to below {_listed(space.nvec)}"
    if kind == "Box":
        low, high = float(space.low.min()), float(space.high.max())
        return f"a JSON list of numbers in the shape {list(space.shape)}, from {low:g} to {high:g}"
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    if kind == "Tuple":
        return "a JSON list of: " + "; ".join(describe_space(part) for part in space.spaces)
    if kind == "Dict":
        return "a JSON object with " + "; ".join(f"{name}: {describe_space(part)}" for name, part in space.spaces.items())
    return f"a member of {str(space)[:_MAX_PRINTED]}"


def read_action(answer: str, space: Any, names: Mapping[str, int] | None = None) -> tuple[Any] | None:  # noqa: ANN401 - as above
    """Return the action in the last `<action>` of an answer, in a tuple; None if there is none or it is not in the space."""
    actions = _ACTION.findall(answer)
    if not actions:
        return None
    text = actions[-1].strip()
    if names and text.lower() in names:
        return (names[text.lower()],)
    try:
        value: object = text if type(space).__name__ == "Text" else json.loads(text)
        action = _member(value, space)
        return (action,) if space.contains(action) else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _member(value: Any, space: Any) -> Any:  # noqa: ANN401 - as above
    """Return a JSON value in the types of a space."""
    kind = type(space).__name__
    if kind in ("Box", "MultiBinary", "MultiDiscrete"):
        import numpy as np

        if kind != "Box" and not all(isinstance(item, int) for item in value):
            raise ValueError("not whole numbers")
        return np.array(value, dtype=space.dtype)
    if kind == "Tuple":
        if len(value) != len(space.spaces):
            raise ValueError("another length")
        return tuple(_member(item, part) for item, part in zip(value, space.spaces, strict=True))
    if kind == "Dict":
        return {name: _member(value[name], part) for name, part in space.spaces.items()}
    if kind == "Discrete" and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError("not a whole number")
    return value


def _make(id: str, args: Mapping[str, Any], *, drawn: bool) -> Any:  # noqa: ANN401 - as above
    try:
        import gymnasium
        from gymnasium.envs.registration import load_env_creator
    except ImportError as error:
        raise ConfigError(
            "GymEnvironment needs Gymnasium, which is not installed; run `pip install 'agentrl[gym]'`"
        ) from error
    try:
        spec = gymnasium.spec(id)
        entry = cast("Any", spec.entry_point)  # a class or function, or its name
        kind = cast("Any", entry if callable(entry) else load_env_creator(entry))
        modes: Sequence[str] = getattr(kind, "metadata", {}).get("render_modes", ())
        ansi = {"render_mode": "ansi"} if drawn and "ansi" in modes and "render_mode" not in args else {}
        return cast("Any", gymnasium.make(id, **ansi, **args))
    except gymnasium.error.Error as error:
        raise ConfigError(f"GymEnvironment: {id}: {error}") from error


def _plain_drawing(drawing: str) -> str:
    """Return a drawing with marks for colors: [the player's ground], (blue) and <magenta>."""
    for color, mark in ((r"4[0-9]", r"[\1]"), (r"34(?:;1)?", r"(\1)"), (r"35(?:;1)?", r"<\1>")):
        drawing = re.sub(rf"\x1b\[{color}m(.{{0,8}}?)\x1b\[0m", mark, drawing)
    return _COLOR.sub("", drawing).strip("\n")


def _printed(observation: object) -> str:
    """Return an observation as JSON; texts come first in an object, so that no cut hides them."""
    listed = _listed(observation)
    if isinstance(listed, dict):
        parts = cast("dict[str, object]", listed)
        listed = dict(sorted(parts.items(), key=lambda part: not isinstance(part[1], str)))
    return json.dumps(listed)[:_MAX_PRINTED]


def _listed(value: Any) -> Any:  # noqa: ANN401 - as above
    """Return an observation as JSON can write it."""
    if isinstance(value, Mapping):
        return {str(name): _listed(part) for name, part in cast("Mapping[object, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_listed(part) for part in cast("Sequence[object]", value)]
    return value.tolist() if hasattr(value, "tolist") else value
