"""What a player of MiniGrid sees, in words: the mission, its view as a drawing, and the things in it by their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

OBJECT_KINDS: Final = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
"""The package's numbers of kinds of things, colors, doors and directions, which its environments write into `image`."""
COLORS: Final = ("red", "green", "blue", "purple", "yellow", "grey")
DOORS: Final = ("open", "closed", "locked")
_DIRECTIONS: Final = ("east", "south", "west", "north")
_MARKS: Final = ("?", ".", "#", ".", "D", "K", "B", "X", "G", "~", "^")
_PLAIN: Final = frozenset({"unseen", "empty", "wall", "floor", "agent"})
LEGEND: Final = (
    "Your view, with you at ^ looking up: . free, # wall, ? not seen, D door, K key, B ball, X box, G goal, ~ lava."
)


def is_view(observation: object) -> bool:
    """Return whether an observation is the usual one of MiniGrid."""
    return isinstance(observation, Mapping) and {"image", "direction", "mission"} <= set(observation)


def describe_view(observation: Mapping[str, Any]) -> str:
    """Return the mission, the direction, what the player carries, its view, and the things in it.

    Example:
        >>> empty, key = [1, 0, 0], [5, 4, 0]
        >>> view = {"image": [[empty, empty], [key, empty], [empty, empty]], "direction": 3, "mission": "get the key"}
        >>> print(describe_view(view))
        Mission: get the key. You look north.
        Your view, with you at ^ looking up: . free, # wall, ? not seen, D door, K key, B ball, X box, G goal, ~ lava.
        . K .
        . ^ .
        You see: a yellow key, 1 ahead.
    """
    columns: Sequence[Sequence[Sequence[int]]] = [
        [[int(number) for number in cell] for cell in column] for column in observation["image"]
    ]
    middle, bottom = len(columns) // 2, len(columns[0]) - 1
    rows = [[_MARKS[columns[x][y][0]] for x in range(len(columns))] for y in range(bottom + 1)]
    rows[bottom][middle] = "^"
    carried = columns[middle][bottom]
    holds = "" if OBJECT_KINDS[carried[0]] in _PLAIN else f" You carry {_thing_name(carried)}."
    things = [
        f"{_thing_name(cell)}, {_relative_place(bottom - y, x - middle)}"
        for y in range(bottom, -1, -1)
        for x in range(len(columns))
        if OBJECT_KINDS[(cell := columns[x][y])[0]] not in _PLAIN and (x, y) != (middle, bottom)
    ]
    seen = f"You see: {'; '.join(things)}." if things else "You see nothing but floor and walls."
    mission = str(observation["mission"]).rstrip(".")
    looks = f"Mission: {mission}. You look {_DIRECTIONS[int(observation['direction'])]}.{holds}"
    return "\n".join([looks, LEGEND, *(" ".join(row) for row in rows), seen])


def _thing_name(cell: Sequence[int]) -> str:
    kind, color, state = cell
    if OBJECT_KINDS[kind] == "lava":
        return "lava"
    if OBJECT_KINDS[kind] == "goal":
        return f"the {COLORS[color]} goal"
    door = f"{DOORS[state]} " if OBJECT_KINDS[kind] == "door" else ""
    words = f"{door}{COLORS[color]} {OBJECT_KINDS[kind]}"
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _relative_place(ahead: int, right: int) -> str:
    parts = [f"{ahead} ahead"] if ahead else []
    parts += [f"{abs(right)} {'right' if right > 0 else 'left'}"] if right else []
    return ", ".join(parts)
