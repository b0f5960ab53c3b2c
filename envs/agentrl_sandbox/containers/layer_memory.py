"""The memory that holds the layers of one episode: a process that waits in a mount namespace of its own.

Invariant: the mounts are seen in that namespace alone, and the kernel undoes them when its last process ends. The process
waits for the end of its input, which this process holds, so it ends with this process, however that ends.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox.box import KILL_S, wait_until_ready
from agentrl_sandbox.bubblewrap.host import Host
from agentrl_sandbox.kernel_limits import SYSTEM_PATH
from agentrl_sandbox.pipes import PipedProcess

_HOLD: Final = '"$1" -t tmpfs -o mode=755,size=1024m layers "$2" && echo ready >&2 && exec cat'


@dataclass(frozen=True, slots=True)
class LayerTools:
    """Programs of util-linux."""

    unshare: str
    nsenter: str
    mount: str


def find_layer_tools() -> LayerTools:
    """Return the programs that layers need; one that is missing is a ConfigError."""
    found = {name: shutil.which(name, path=SYSTEM_PATH) for name in ("unshare", "nsenter", "mount")}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise ConfigError(f"containers: cannot find {', '.join(missing)}; install util-linux 2.34 or newer")
    return LayerTools(**{name: str(path) for name, path in found.items()})


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """A directory in memory that exists in one namespace."""

    pid: int
    """Of the process that waits in the namespace."""
    inside: str
    """The directory, as that process sees it."""

    @property
    def outside(self) -> Path:
        """The directory, as this process reaches it."""
        return Path(f"/proc/{self.pid}/root{self.inside}")


@asynccontextmanager
async def hold_memory(host: Host, tools: LayerTools, uid: int, folder: Path) -> AsyncGenerator[LayerMemory]:
    """Yield a directory in memory over the empty `folder`; no other process sees it."""
    entry = host.entry(uid)
    wait = [host.shell, "-c", _HOLD, "sh", tools.mount, str(folder)]
    try:
        process = PipedProcess(
            [*entry, tools.unshare, "--user", "--map-root-user", "--mount", "--", *wait],
            environment={"PATH": SYSTEM_PATH},
            directory="/",
        )
    except OSError as error:
        raise EnvironmentFault(f"containers: cannot start {tools.unshare}: {error}") from error
    try:
        await wait_until_ready(process.stderr)
        yield LayerMemory(process.pid, str(folder))
    finally:
        process.kill()
        with anyio.move_on_after(KILL_S, shield=True):
            await process.wait()
        process.close()
