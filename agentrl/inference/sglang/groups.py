"""A server's part in taking weights from the trainer's memory: join a group, receive buckets, leave.

Invariant: only the last bucket carries the version, so that the server names its weights anew when it has all of them, and
only the last one flushes the prefix cache; what the server broadcasts is exactly what the manifest says, in its order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol
from uuid import uuid4

from agentrl.concurrency import Deadline
from agentrl.errors import ConfigError, WeightSyncError
from agentrl.inference.sglang.control import Control
from agentrl.inference.sglang.dialect import Dialect
from agentrl.inference.sglang.wire import ServerInfo
from agentrl.weights.types import Bucket, GroupAddress, GroupRequest, Manifest


class Receiver(Protocol):
    """What the pool asks of a server that takes weights from the trainer's memory."""

    def request(self) -> GroupRequest:
        """Return what the trainer is to listen for; `ConfigError` when the server cannot take weights this way."""
        ...

    async def join(self, address: GroupAddress) -> None:
        """Join a group."""
        ...

    async def leave(self, name: str) -> None:
        """Forget a group, if it is known."""
        ...

    async def receive(self, manifest: Manifest, group: str) -> None:
        """Take weights while paused, and check the version the server then reports."""
        ...


class Has(Protocol):
    """Takes note of the weights a server has."""

    def __call__(self, version: int, unique: str, *, flush: bool) -> Awaitable[None]:
        """Check that the server reports `version`."""
        ...


class GroupCalls:
    """The calls to one server over HTTP; a `Receiver`."""

    def __init__(
        self, control: Control, server: Callable[[], tuple[Dialect, ServerInfo]], *, flush: Callable[[], bool], has: Has
    ) -> None:
        """Call by `control`.

        Args:
            control: reaches the server.
            server: returns what it is; asked anew, as it may have been restarted as another version.
            flush: whether the prefix cache goes with the weights; raises unless the server is paused.
            has: is told what it has been given.
        """
        self._control, self._server, self._flush, self._has = control, server, flush, has

    def request(self) -> GroupRequest:
        """Return what the trainer is to listen for.

        Raises:
            ConfigError: the server is too old, or runs with data or pipeline parallelism.
        """
        (dialect, info), url = self._server(), self._control.url
        if not dialect.groups:
            raise ConfigError(
                f"sync.method: distributed needs SGLang 0.5.6 or newer, {url} is {dialect.version}; set sync: disk"
            )
        if info.dp_size != 1 or info.pp_size != 1:
            raise ConfigError(
                f"sync.method: SGLang joins groups with tensor parallelism only, {url} runs with --dp-size {info.dp_size} "
                f"--pp-size {info.pp_size}; launch more servers instead, or set sync: disk"
            )
        nccl = dialect.engine == "sglang" and (info.device or "").startswith("cuda")
        return GroupRequest(f"agentrl-{uuid4().hex}", info.tp_size, nccl, dialect.flat_buckets)

    async def join(self, address: GroupAddress) -> None:
        """Have the server join a group.

        Raises:
            WeightSyncError: it did not.
            ServerError: no answer; it may join later.

        Cancellation: as after no answer.
        """
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
        """Have the server forget a group, if it knows it.

        Raises:
            ServerError: no answer.

        Cancellation: it has or it has not.
        """
        with suppress(WeightSyncError):  # restarted since: it does not know the group
            await self._control.weights("/destroy_weights_update_group", {"group_name": name}, "leave a group")

    async def receive(self, manifest: Manifest, group: str) -> None:
        """Have the server take every bucket, and call the result the manifest's version. `pause` comes first.

        Raises:
            WeightSyncError: the server refused, or reports another version; it may have any part of the weights.
            ServerError: no answer, or not all of them within the deadline of a control call, as the other servers wait for
                it, paused; as above.

        Cancellation: as above.
        """
        flush, control = self._flush(), self._control
        with Deadline(control.timeout_s, lambda: f"{control.url}: waited for it to take all weights", control.url):
            await self._take(manifest, group, flush=flush)
        await self._has(manifest.version, group, flush=flush)

    async def _take(self, manifest: Manifest, group: str, *, flush: bool) -> None:
        dialect, _ = self._server()
        if dialect.sessions:
            await self._begin()
        for number, bucket in enumerate(manifest.buckets, start=1):
            body = _bucket_body(bucket, group, flat=dialect.flat_buckets)
            if number == len(manifest.buckets):
                body |= {"weight_version": str(manifest.version), "flush_cache": flush}
            what = f"take bucket {number} of {len(manifest.buckets)} of version {manifest.version}"
            await self._control.weights("/update_weights_from_distributed", body, what)
        if dialect.sessions:
            await self._control.weights("/end_weight_update", {}, "end the update")

    async def _begin(self) -> None:
        try:
            await self._control.weights("/begin_weight_update", {}, "begin an update")
        except WeightSyncError:
            # An update that was cut off left its session open. What it left in the weights is overwritten now.
            await self._control.weights("/end_weight_update", {}, "end an update that was cut off")
            await self._control.weights("/begin_weight_update", {}, "begin an update")


def _bucket_body(bucket: Bucket, group: str, *, flat: bool) -> dict[str, object]:
    return {
        "names": [spec.name for spec in bucket],
        "dtypes": [spec.dtype for spec in bucket],
        "shapes": [spec.shape for spec in bucket],
        "group_name": group,
        "flush_cache": False,
        "abort_all_requests": False,
        **({"load_format": "flattened_bucket"} if flat else {}),
    }
