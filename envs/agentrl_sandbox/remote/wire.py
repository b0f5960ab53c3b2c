"""The protocol of sandboxes and containers on other machines. `agentrl_sandbox.hosts.server` is its server.

Bodies are JSON; contents and outputs are base64. Where the host has a key, requests carry `Authorization: Bearer KEY`.

| request | body | answer |
|---|---|---|
| GET /state | - | 200 `HostState` |
| POST /state | `StateBody` | 200 `HostState`; the benches of the client live on |
| POST /run | `ProgramBody` | 200 `agentrl_sandbox.Result` |
| POST /sessions | `SessionBody` | 200 `Opened` |
| POST /sessions/ID | `CallBody` | 200 what the supervisor answers; 410 `EndedBody`: its sandbox has ended |
| GET /sessions/ID/port | - | a web socket with the bytes of one connection that the container made to its port |
| DELETE /sessions/ID | - | 200, when its processes have ended and its layer stands; also for one that is gone |
| POST /benches | `BenchBody` | 200 `Opened` |
| DELETE /benches/ID | - | 200 `HostState`, when nothing of it is left; also for one that is gone |
| POST /benches/ID/add, /keep, /restore | `AddBody`, `KeepBody`, `SnapshotBody` | 200 |
| POST /benches/ID/changed, /read, /snapshot | -, `ReadBody`, - | 200 paths, a content, all layers |
| POST /benches/ID/sessions | `RunBody` | 200 `Opened`: the session of a container |

Other answers are `{"error": TEXT}`: 400 for a bad request or a limit over the host's maximum, 401 for a wrong key, 403 for
what a web page could have sent, 404 for what is gone, 408 for a late body, 415 for a compressed one, 422 for an `OSError` of
a file (`FileError`), 429 where the host has no room, 503 when it could not do its part. A client that closes the connection
ends its program, or the session of its call.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Literal

import anyio.to_thread
import msgspec

from agentrl_sandbox.types import Ending, FileContents, Limits

GivenLimits = dict[str, float | int | None]
"""Fields of `Limits`."""


class ProgramBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A program to run."""

    argv: tuple[str, ...]
    files: dict[str, bytes] = {}
    stdin: bytes = b""
    environment: dict[str, str] = {}
    limits: GivenLimits | None = None
    """None: the host's."""


class SessionBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A session of a sandbox to open."""

    files: dict[str, bytes] = {}
    limits: GivenLimits | None = None
    forks: bool = False
    """Whether it is to fork a warm Python, as `Sandbox.forks` does, and nothing else; such a session has no files."""


class CallBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A request to the supervisor of a session."""

    request: msgspec.Raw
    timeout_s: float


class EndedBody(msgspec.Struct):
    """The end of a session."""

    ended: Ending = Ending.KILLED


class StateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A sign of life."""

    client: str
    """Names the run; what it opened is closed when no sign came for a while."""


class HostState(msgspec.Struct, kw_only=True):
    """What a host has."""

    name: str
    """Of its backend."""
    is_isolated: bool = True
    """Whether programs are kept from the host."""
    instance: str
    """Of this process: another one has none of the benches of the one before."""
    max_sessions: int
    """Sessions of the sandbox at a time; 0: it runs no programs without a container."""
    free_mb: int
    """Memory for further environments, in MiB."""
    share: float
    """The part of its memory limit for which an environment counts."""
    num_open: int
    max_open: int
    """Environments at a time; 0: it gives no containers."""
    images: tuple[str, ...] = ()
    maxima: GivenLimits = {}
    """The most that the host gives; empty where it does not say."""
    memory_mb: int = 0
    """For all environments together, in MiB; 0 where the host does not say."""
    num_seconds: int = 0
    """Environments that are the second one of their episode."""
    seconds_mb: float = 0.0
    """For which they count, in MiB."""
    spare_mb: float = 0.0
    """For which the largest environment counts whose episode opens a second one, in MiB; 0: there is none."""


class BenchBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A workbench to open."""

    client: str
    image: str | None
    limits: GivenLimits
    role: Literal["alone", "first", "second"] = "alone"
    """A `BenchRole`."""


class Opened(msgspec.Struct, kw_only=True):
    """The name of what was opened."""

    name: str
    state: HostState | None = None


class AddBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Files of a layer, by absolute path."""

    files: dict[str, FileContents]


class KeepBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The parts of a layer that are kept."""

    paths: list[str]
    homes: list[str] = []


class ReadBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A file of the newest layer."""

    path: str
    max_bytes: int


class RunBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A container to start."""

    directory: str
    environment: dict[str, str]
    limits: GivenLimits
    port: int | None = None
    """Of the container's loopback, whose connections the run takes."""


class SnapshotBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Layers, or the digest of layers that the host may have kept."""

    digest: str = ""
    content: bytes = b""


class FileError(msgspec.Struct, kw_only=True):
    """An `OSError`."""

    number: int
    error: str
    path: str = ""


async def digest_of(snapshot: bytes) -> str:
    """Return the name of a snapshot at hosts; hashing it holds up no other episode."""
    return await anyio.to_thread.run_sync(lambda: sha256(snapshot).hexdigest())


def exceeded(limits: Limits, maxima: Limits) -> str | None:
    """Return which of `limits` is over the host's; None: none is.

    Example:
        >>> exceeded(Limits(wall_s=60), Limits(wall_s=10))
        'limits.wall_s: expected at most 10, the most of this host (--max wall_s=60), got 60'
    """
    for (name, value), (_, most) in zip(limits, maxima, strict=True):
        if value is not None and most is not None and value > most:
            option = f"--max {name}={value:.10g}"
            return f"limits.{name}: expected at most {most:g}, the most of this host ({option}), got {value:g}"
    return None
