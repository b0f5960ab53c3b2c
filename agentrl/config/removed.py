"""Fields that run files had once, and what to write instead; the files of earlier runs stay readable.

Invariant: a run file that names such a field either means what it meant before, or is refused with the replacement.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast

from agentrl.errors import ConfigError


class RemovedField(NamedTuple):
    """What became of a field."""

    holds: object
    """The value that every run has now."""
    now: str
    """What holds now, and what to write instead; it completes "this field is gone: "."""


REMOVED: Final[Mapping[str, RemovedField]] = {
    "engine.checkpoint_every_s": RemovedField(
        600.0, "a step is saved ten minutes after the last checkpoint; set engine.checkpoint_every to save more often"
    ),
    "engine.keep_published": RemovedField(
        2, "the two newest published versions stay on disk; set engine.publish_dir to a disk that has room for three"
    ),
    "inference.threads": RemovedField(
        None, "a server on a CPU computes with one thread; set inference.servers to use more of the CPU"
    ),
    "rollout.min_group_size": RemovedField(
        2, "incomplete_group: keep keeps what has two episodes and more; set incomplete_group: drop to train whole groups"
    ),
}
"""By the dotted path."""


def without_removed(values: Mapping[str, Any], *, source: str, recorded: bool) -> dict[str, Any]:
    """Return the values of a run file without the fields that are gone, with a warning for each.

    Args:
        values: the fields, by section.
        source: names them in messages.
        recorded: the file records an earlier run, in which the fields may have had other values.

    Raises:
        ConfigError: one line for each removed field whose value is not the one that holds now.
    """
    kept, problems = dict(values), list[str]()
    for path, gone in REMOVED.items():
        section, _, name = path.rpartition(".")
        fields: object = kept.get(section)
        if not isinstance(fields, Mapping) or name not in fields:
            continue
        given = cast("Mapping[str, Any]", fields)
        kept[section] = {key: value for key, value in given.items() if key != name}
        if given[name] == gone.holds or recorded:
            was = "" if given[name] == gone.holds else f"it was {given[name]!r} in this run; "
            warnings.warn(f"{source}: {path}: this field is gone: {was}{gone.now}; remove it", FutureWarning, stacklevel=4)
        else:
            problems.append(f"  {path}: this field is gone, got {given[name]!r}: {gone.now}; remove it")
    if problems:
        raise ConfigError(f"{source} is not a valid run:\n" + "\n".join(problems))
    return kept
