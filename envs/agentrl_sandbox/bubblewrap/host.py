"""The programs, the Python and the unprivileged user that bubblewrap needs of the machine.

Invariant: bubblewrap never starts as root, whose sandbox can write the machine's own settings.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from agentrl.errors import ConfigError
from agentrl_sandbox.kernel_limits import SYSTEM_PATH, find_prlimit

_MIN_VERSION: Final = (0, 8, 0)
"""The first version with `--disable-userns`."""
FIRST_UID: Final = 65_000
"""The first of the users that root becomes; the range is reserved on Debian, and below 65,536 it exists in containers."""
NUM_UIDS: Final = 500
_OWN: Final = ("/work", "/dev", "/proc", "/run/agentrl")
_INSTALL: Final = "install bubblewrap 0.8 or newer (`apt-get install bubblewrap`, `dnf install bubblewrap`)"


@dataclass(frozen=True, slots=True)
class Host:
    """The programs of this machine that start a sandbox, and the trees that it shows."""

    bwrap: str
    setpriv: str | None
    """Makes root an unprivileged user; None where this process is not root."""
    prlimit: str
    shell: str
    """Process 1 of each sandbox."""
    python: str
    """The Python of the sandbox, which may be another than this process's own."""
    readable: tuple[str, ...]
    """Directories and files that are shown read-only."""

    @property
    def search_path(self) -> str:
        """The PATH of sandboxed programs."""
        return ":".join(dict.fromkeys((str(Path(self.python).parent), "/usr/local/bin", "/usr/bin", "/bin")))

    def entry(self, uid: int) -> tuple[str, ...]:
        """Return the words before `bwrap` that make root the user `uid`; none for a process that is not root."""
        if self.setpriv is None:
            return ()
        return (self.setpriv, f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all", "--")


def find_host(*, bwrap: str | None = None, python: str | None = None, readable: Sequence[str] = ()) -> Host:
    """Return the programs that a sandbox needs; the arguments are those of `open_bubblewrap`.

    Raises:
        ConfigError: a program or directory is missing or too old; the message has the fix.
    """
    if platform.system() != "Linux":
        raise ConfigError(f"sandbox: bubblewrap runs on Linux, not on {platform.system()}; use the docker or remote backend")
    found = bwrap or shutil.which("bwrap", path=SYSTEM_PATH)
    if found is None or not os.access(found, os.X_OK):
        raise ConfigError(f"sandbox: cannot find {bwrap or 'bwrap'}; {_INSTALL}, or use the docker or remote backend")
    _check_version(found)
    prlimit, setpriv = find_prlimit(), shutil.which("setpriv", path=SYSTEM_PATH)
    if setpriv is None and os.geteuid() == 0:
        raise ConfigError(
            "sandbox: cannot find setpriv, by which root becomes an ordinary user; install util-linux 2.34 or newer"
        )
    chosen = python or shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    if chosen is None:
        raise ConfigError("sandbox: the system has no python3; install one, or set `python`, and its tree in `readable`")
    for path in (chosen, *readable):
        if not os.path.isabs(path) or not os.path.exists(path):
            raise ConfigError(f"sandbox: expected an absolute path that exists, got {path!r}")
        if any(_is_under(path, own) for own in _OWN):
            raise ConfigError(
                f"sandbox: {path} is below a directory of which a sandbox has its own ({', '.join(_OWN)}); move it"
            )
    if not any(_is_under(chosen, tree) for tree in ("/usr", "/bin", *readable)):
        raise ConfigError(
            f"sandbox: {chosen} is not in /usr; add its tree to `readable`, such as {str(Path(chosen).parents[1])!r}"
        )
    return Host(found, setpriv if os.geteuid() == 0 else None, prlimit, "/bin/sh", chosen, tuple(readable))


def _is_under(path: str, tree: str) -> bool:
    return Path(path).is_relative_to(tree)


def _check_version(bwrap: str) -> None:
    said = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=60, check=False, env={}).stdout
    match = re.search(r"(\d+)\.(\d+)\.(\d+)", said)
    if match is None or tuple(int(part) for part in match.groups()) < _MIN_VERSION:
        raise ConfigError(
            f"sandbox: {bwrap} is {said.strip() or 'no bubblewrap'}, 0.8.0 is the oldest that works; {_INSTALL}"
        )


class Ended(Protocol):
    """A sandbox that was killed."""

    def has_ended(self) -> bool:
        """Return whether no process of it is alive."""
        ...

    def close(self) -> None:
        """Close its descriptors."""
        ...


class UserIds:
    """Gives each sandbox of this process a user of its own, when root starts them, until its last process has ended."""

    def __init__(self) -> None:
        self._free = list(reversed(range(FIRST_UID, FIRST_UID + NUM_UIDS)))
        self._ending: list[tuple[int, Ended]] = []

    def take(self) -> int:
        """Return a user id that no running sandbox of this process has; a ConfigError if all are taken."""
        if not self._free:
            raise ConfigError(f"sandbox: {NUM_UIDS} sandboxes are running; run fewer at a time")
        return self._free.pop()

    def give_back(self, uid: int, sandbox: Ended) -> None:
        """Let another sandbox have `uid` when no process of the killed `sandbox` is alive, which is closed then."""
        self._ending.append((uid, sandbox))
        self.num_ending()

    def give_back_unused(self, uid: int) -> None:
        """Let another sandbox have `uid`, as which nothing was started."""
        self._free.append(uid)

    def num_ending(self) -> int:
        """Return how many killed sandboxes have processes that the kernel has not ended yet."""
        ended = [(uid, sandbox) for uid, sandbox in self._ending if sandbox.has_ended()]
        self._ending = [one for one in self._ending if one not in ended]
        for uid, sandbox in ended:
            sandbox.close()
            self._free.append(uid)
        return len(self._ending)
