"""The protocol between a run and the hosts of its containers. `agentrl_sandbox.hosts.container_server` is its server.

Bodies are JSON; contents are base64. Where the host has a key, requests carry `Authorization: Bearer KEY`.

| request | body | answer |
|---|---|---|
| POST /state | `StateBody` | 200 `HostState`; the benches of the client live on |
| POST /benches | `BenchBody` | 200 `Opened` |
| DELETE /benches/ID | - | 200 `HostState`, when nothing of it is left; also for one that is gone |
| POST /benches/ID/add, /keep, /restore | `AddBody`, `KeepBody`, `SnapshotBody` | 200 |
| POST /benches/ID/changed, /read, /snapshot | -, `ReadBody`, - | 200 `Names`, `Content`, `SnapshotBody` |
| POST /benches/ID/runs | `RunBody` | 200 `Opened` |
| POST /benches/ID/runs/ID | `agentrl_sandbox.remote.CallBody` | 200 the supervisor's answer; 410: it has ended |
| GET /benches/ID/runs/ID/port | - | a web socket with the bytes of one connection that the container made to its port |
| DELETE /benches/ID/runs/ID | - | 200, when its processes have ended and its layer stands |

Other answers are `{"error": TEXT}` with the statuses of `agentrl_sandbox.remote`; 422 carries an `OSError` of a file,
and 429 says that the host has no room.
"""

from __future__ import annotations

from hashlib import sha256

import anyio.to_thread
import msgspec


class StateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A sign of life."""

    client: str
    """Names the run; what it opened is closed when no sign came for a while."""


class HostState(msgspec.Struct, kw_only=True):
    """What a host has."""

    name: str
    """Of its backend."""
    instance: str
    """Of this process: another one has none of the benches of the one before."""
    free_mb: int
    """Memory for further environments, in MiB."""
    share: float
    """The part of its memory limit for which an environment counts."""
    num_open: int
    max_open: int
    images: tuple[str, ...] = ()
    maxima: dict[str, float | int | None] = {}
    """Fields of `Limits`: the most that the host gives."""


def host_option(name: str, value: float) -> str:
    """Return the option of `agentrl sandbox-host` that allows a limit; empty: it has none."""
    return f"--memory-mb {value:.0f}" if name == "memory_mb" else ""


class BenchBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A workbench to open."""

    client: str
    image: str | None
    limits: dict[str, float | int | None]


class Opened(msgspec.Struct, kw_only=True):
    """The name of what was opened."""

    name: str
    state: HostState | None = None


class FileBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A file of a layer."""

    content: bytes
    can_run: bool = False


class AddBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Files of a layer, by absolute path."""

    files: dict[str, FileBody]


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
    limits: dict[str, float | int | None]
    port: int | None = None
    """Of the container's loopback, whose connections the run takes."""


class SnapshotBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Layers, or the digest of layers that the host may have kept."""

    digest: str = ""
    content: bytes = b""


async def digest_of(snapshot: bytes) -> str:
    """Return the name of a snapshot at hosts; hashing it holds up no other episode."""
    return await anyio.to_thread.run_sync(lambda: sha256(snapshot).hexdigest())


class Names(msgspec.Struct, kw_only=True):
    """Absolute paths."""

    names: list[str]


class Content(msgspec.Struct, kw_only=True):
    """The content of a file."""

    content: bytes


class FileError(msgspec.Struct, kw_only=True):
    """An `OSError`."""

    number: int
    error: str
    path: str = ""
