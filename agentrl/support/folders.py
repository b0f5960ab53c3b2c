"""Directories of prompts, answers and weights.

Invariant: a directory that agentrl makes is its owner's alone. One that is there keeps its mode, and files in it follow the
umask, so that `chmod` on the directory alone shares all of it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def make_private(folder: Path) -> None:
    """Make a directory of mode 0700, and those above it as usual; do nothing where it is there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError as error:  # a file stands where a directory should
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from error
