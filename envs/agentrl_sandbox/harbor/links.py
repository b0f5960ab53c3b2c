"""Links in the folder of a task: one that leads out of it would show files of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from agentrl.errors import ConfigError


def refuse_links_out(tree: Path, top: Path, where: str = "") -> None:
    """Refuse a link at or below `tree` that leads out of `top`: whatever reads the files would read those of this machine.

    Raises:
        ConfigError: there is one; the message begins with `where`, and names the link.
    """
    for path in (tree, *sorted(tree.rglob("*"))):
        refuse_link_out(path, top, where)


def refuse_link_out(path: Path, top: Path, where: str = "") -> None:
    """Refuse a path that is a link out of `top`, as `refuse_links_out` does."""
    if not path.is_symlink():
        return
    target = os.path.realpath(path)
    if not Path(target).is_relative_to(os.path.realpath(top)):
        raise ConfigError(f"{where}{path} is a link, and leads to {target}, out of {top}; put a copy in its place")
