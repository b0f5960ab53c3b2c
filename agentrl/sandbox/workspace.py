"""The files of a session at two moments, and what changed between them.

Invariant: a snapshot holds contents of regular files only; what else the folder held is named in `left_out`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceSnapshot:
    """The working directory of a session at one moment."""

    files: Mapping[str, bytes]
    """Contents by path relative to the working directory."""
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why a path is not in `files`: a link, a pipe, a file that is too large or cannot be read."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """SHA-256 by path, by which the next snapshot is sent in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceDiff:
    """The difference of two snapshots, each part in order of the paths."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    text: str
    """A unified diff; of files that are not UTF-8 it says only that they differ."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing changed."""
        return not (self.added or self.removed or self.changed)


def diff_snapshots(before: WorkspaceSnapshot, after: WorkspaceSnapshot) -> WorkspaceDiff:
    """Return what changed from `before` to `after`.

    Example:
        >>> found = diff_snapshots(WorkspaceSnapshot(files={"a": b"1"}), WorkspaceSnapshot(files={"a": b"2", "b": b""}))
        >>> found.added, found.changed
        (('b',), ('a',))
        >>> print(found.text)
        --- a
        +++ a
        @@ -1 +1 @@
        -1
        +2
    """
    names = sorted(before.files.keys() | after.files.keys())
    pieces = [_file_diff(name, before.files.get(name), after.files.get(name)) for name in names]
    return WorkspaceDiff(
        added=tuple(name for name in names if name not in before.files),
        removed=tuple(name for name in names if name not in after.files),
        changed=tuple(
            name
            for name in names
            if name in before.files and before.files[name] != after.files.get(name, before.files[name])
        ),
        text="\n".join(piece for piece in pieces if piece),
    )


def _file_diff(name: str, before: bytes | None, after: bytes | None) -> str:
    if before == after:
        return ""
    try:
        lines = [(data or b"").decode().splitlines() for data in (before, after)]
    except UnicodeDecodeError:
        return f"Binary files {name} differ"
    source, target = (name if data is not None else "/dev/null" for data in (before, after))
    return "\n".join(difflib.unified_diff(lines[0], lines[1], source, target, lineterm=""))
