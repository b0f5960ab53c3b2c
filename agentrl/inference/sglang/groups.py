"""A server's part in taking weights from the trainer's memory: join a group, receive buckets, leave.

Invariant: only the last bucket carries the version and flushes the prefix cache, so a server reports the new version only
when it has every bucket. The server receives exactly the manifest's tensors, in the manifest's order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol
from uuid import uuid4

from agentrl.concurrency import Deadline
from agentrl.errors import ConfigError, WeightSyncError
from agentrl.inference.sglang.transport import Control
from agentrl.inference.sglang.wire import ServerInfo
from agentrl.weights.types import Bucket, GroupAddress, GroupRequest, Manifest


class Receiver(Protocol):
    """The part of a server that takes weights from the trainer's memory, as the pool uses it."""

    def request(self) -> GroupRequest:
        """Return the group that the trainer must open; `ConfigError` when the server cannot take weights this way."""
        ...

    async def join(self, address: GroupAddress) -> None:
        """Join a group."""
        ...

    async def leave(self, name: str) -> None:
        """Forget a group, if the server knows it."""
        ...

    async def receive(self, manifest: Manifest, group: str) -> None:
        """Take weights during a pause, and check the version that the server then reports."""
        ...


class HasWeights(Protocol):
    """Records the weights that a server has."""

    def __call__(self, version: int, unique: str, *, flush: bool) -> Awaitable[None]: ...


class GroupCalls:
    """The calls to one server over HTTP; a `Receiver`."""

    def __init__(
        self, control: Control, info: Callable[[], ServerInfo], *, flush: Callable[[], bool], has: HasWeights
    ) -> None:
        self._control, self._info, self._flush, self._has = control, info, flush, has

    def request(self) -> GroupRequest:
        info, url = self._info(), self._control.url
        if info.dp_size != 1 or info.pp_size != 1:
            raise ConfigError(
                f"sync.method: SGLang joins groups with tensor parallelism only, {url} runs with --dp-size {info.dp_size} "
                f"--pp-size {info.pp_size}; launch more servers instead, or set sync: disk"
            )
        nccl = info.engine == "sglang" and (info.device or "").startswith("cuda")
        return GroupRequest(f"agentrl-{uuid4().hex}", info.tp_size, nccl, flat=True)

    async def join(self, address: GroupAddress) -> None:
        body = {
            "master_address": address.host,
            "master_port": address.port,
            "rank_offset": 1,
            "world_size": address.world_size,
            "group_name": address.name,
            "backend": address.backend,
        }
        await self._control.weights(
            "/init_weights_update_group", body, f"join the trainer's group at {address.host}:{address.port}"
        )

    async def leave(self, name: str) -> None:
        with suppress(WeightSyncError):  # restarted since: the server does not know the group
            await self._control.weights("/destroy_weights_update_group", {"group_name": name}, "leave a group")

    async def receive(self, manifest: Manifest, group: str) -> None:
        """Have the server take every bucket, and name the result by the manifest's version. `pause` comes first.

        One deadline covers all buckets, because the other servers stand still meanwhile.

        Raises:
            WeightSyncError, ServerError: the server refused, was late or reports another version; it may have any part.
        """
        flush, control = self._flush(), self._control
        message = f"{control.url}: agentrl waited for the server to take all weights"
        with Deadline(control.timeout_s, lambda: message, control.url):
            await self._take(manifest, group, flush=flush)
        await self._has(manifest.version, group, flush=flush)

    async def _take(self, manifest: Manifest, group: str, *, flush: bool) -> None:
        await self._begin()
        for number, bucket in enumerate(manifest.buckets, start=1):
            body = _bucket_body(bucket, group)
            if number == len(manifest.buckets):
                body |= {"weight_version": str(manifest.version), "flush_cache": flush}
            what = f"take bucket {number} of {len(manifest.buckets)} of version {manifest.version}"
            await self._control.weights("/update_weights_from_distributed", body, what)
        await self._control.weights("/end_weight_update", {}, "end the update")

    async def _begin(self) -> None:
        try:
            await self._control.weights("/begin_weight_update", {}, "begin an update")
        except WeightSyncError:
            # An interrupted update left its session open. This update overwrites everything that one changed.
            await self._control.weights("/end_weight_update", {}, "end an interrupted update")
            await self._control.weights("/begin_weight_update", {}, "begin an update")


def _bucket_body(bucket: Bucket, group: str) -> dict[str, object]:
    return {
        "names": [spec.name for spec in bucket],
        "dtypes": [spec.dtype for spec in bucket],
        "shapes": [spec.shape for spec in bucket],
        "group_name": group,
        "flush_cache": False,
        "abort_all_requests": False,
        "load_format": "flattened_bucket",
    }
