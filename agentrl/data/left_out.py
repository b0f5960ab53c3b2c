"""Tasks that a source leaves out (`tasks.unreadable: skip`), since they cannot be read or played: reasons with their counts.

Invariant: every task that is left out has a name and a reason, and no reason names a single task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeAlias

_NAMES: Final = 3


class LeftOutTask(NamedTuple):
    """A task that cannot be read, or that the workflow refuses."""

    source: str
    """The section of the run file that names its source, such as `tasks.eval`."""
    name: str
    """Of its folder, below the path of the source."""
    reason: str
    """Why it is left out, in words that fit other tasks with the same fault."""


LeaveOut: TypeAlias = Callable[[str, str], None]
"""Takes the name and the reason of each task that a format leaves out."""


def reason_rows(found: Iterable[tuple[str, str]]) -> list[str]:
    """Return the reasons of pairs of a name and a reason, the most frequent first, with their counts and a few names.

    Example:
        >>> reason_rows([("a", "no tests"), ("b", "no tests"), ("c", "no image")])
        ['2 x no tests (a, b)', '1 x no image (c)']
    """
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in found:
        names[reason].append(name)
    ordered = sorted(names.items(), key=lambda item: -len(item[1]))
    return [f"{len(some)} x {reason} ({_few(some)})" for reason, some in ordered]


def left_out_rows(left_out: Iterable[LeftOutTask]) -> list[str]:
    """Return for each source how many tasks it leaves out, and then a row for each reason.

    Example:
        >>> left_out_rows([LeftOutTask("tasks", "a", "no tests")])
        ['1 of tasks cannot be used (tasks.unreadable: skip)', '1 x no tests (a)']
    """
    by_source: defaultdict[str, list[LeftOutTask]] = defaultdict(list)
    for task in left_out:
        by_source[task.source].append(task)
    rows: list[str] = []
    for source, tasks in by_source.items():
        rows.append(f"{len(tasks)} of {source} cannot be used ({source}.unreadable: skip)")
        rows += reason_rows((task.name, task.reason) for task in tasks)
    return rows


def _few(names: list[str]) -> str:
    rest = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {rest} more" if rest > 0 else "")
