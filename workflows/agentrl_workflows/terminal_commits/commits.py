"""What a git repository holds at a commit, and what changed between two.

Invariant: the repository is read by git's plumbing alone: nothing is checked out, and no hook, filter or setting of it runs.
"""

from __future__ import annotations

import posixpath
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from agentrl.errors import ConfigError

_SAFE: Final = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "safe.directory=*")
_LINK, _MODULE, _RUNNABLE = "120000", "160000", "100755"
MAX_COMMIT_BYTES: Final = 64 * 2**20
"""Of all files of a commit."""


class CommitFile(NamedTuple):
    """A file of a commit."""

    data: bytes
    can_run: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit with its files, by path."""

    name: str
    """Its full hash."""
    files: dict[str, CommitFile]


@dataclass(frozen=True, slots=True)
class History:
    """A local repository."""

    folder: Path

    def commit(self, name: str) -> Commit:
        """Return a commit; a link within it counts as a copy of its target.

        Raises:
            ConfigError: there is none, or it holds submodules, links that lead out of it, or too much.
        """
        found = self._git("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}").decode().strip()
        listed = self._git("ls-tree", "-r", "-z", "-l", "--full-tree", found).decode(errors="surrogateescape")
        entries = [entry.partition("\t") for entry in listed.split("\0") if entry]
        facts = {path: about.split() for about, _, path in entries}
        modules = [path for path, (mode, *_) in facts.items() if mode == _MODULE]
        if modules:
            raise ConfigError(f"{self.folder}: {name}: {modules[0]} is a submodule, which a task cannot hold")
        size = sum(int(about[3]) for about in facts.values())
        if size > MAX_COMMIT_BYTES:
            raise ConfigError(f"{self.folder}: {name}: its files have {size:,} bytes; expected at most {MAX_COMMIT_BYTES:,}")
        blobs = self._blobs([about[2] for about in facts.values()])
        held = {path: CommitFile(blobs[about[2]], about[0] == _RUNNABLE) for path, about in facts.items()}
        links = {path for path, about in facts.items() if about[0] == _LINK}
        files = {path: file for path, file in held.items() if path not in links}
        for path in links:
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), held[path].data.decode(errors="replace")))
            if target not in files:
                raise ConfigError(f"{self.folder}: {name}: {path} links to {target!r}, which is no file of the commit")
            files[path] = files[target]
        return Commit(found, files)

    def messages(self, before: Commit, after: Commit) -> str:
        """Return the messages of the commits between two, the oldest first."""
        said = self._git("log", "--reverse", "--format=%B", f"{before.name}..{after.name}")
        return said.decode(errors="replace").strip()

    def patch(self, before: Commit, after: Commit, paths: Sequence[str]) -> bytes:
        """Return what changes these paths of one commit into those of another, for `git apply`."""
        plain = ("--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color")
        return self._git("--literal-pathspecs", "diff", *plain, before.name, after.name, "--", *paths) if paths else b""

    def _blobs(self, hashes: Sequence[str]) -> dict[str, bytes]:
        said = self._git("cat-file", "--batch", stdin="".join(f"{each}\n" for each in hashes).encode())
        found: dict[str, bytes] = {}
        at = 0
        for each in hashes:
            end = said.index(b"\n", at)
            size = int(said[at:end].split()[2])
            found[each] = said[end + 1 : end + 1 + size]
            at = end + size + 2
        return found

    def _git(self, *words: str, stdin: bytes = b"") -> bytes:
        command = ["git", "--no-replace-objects", *_SAFE, "-C", str(self.folder), *words]
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{self.folder}: git {words[0]}: {error}") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise ConfigError(f"{self.folder}: git {words[0]}: {said or done.returncode}; expected a local git repository")
        return done.stdout
