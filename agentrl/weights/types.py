"""What trainer and servers agree on when weights go from memory to memory, without a file between them. No torch.

Invariant: the specs of a bucket fix every byte sent for it: its tensors in this order, row-major in their dtype, without
gaps. One process group connects the trainer, its rank 0, with one server, its other ranks: no server waits for another.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

WIRE_DTYPES: Mapping[str, tuple[str, int]] = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
"""Types weights are sent in, by torch's name: safetensors' name and the bytes of an element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Weights of one policy version, written where servers can read them."""

    version: int
    path: str
    """Directory of a HF-format checkpoint; complete when it is visible under this name."""
    checksum: str
    """Digest over all tensors; `agentrl.weights.tensors` makes it."""
    tensor_checksums: Mapping[str, str]
    """Digest of each tensor, by HF parameter name."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor on the wire.

    Example:
        >>> TensorSpec("model.norm.weight", "bfloat16", (128,)).num_bytes
        256
    """

    name: str
    """HF parameter name."""
    dtype: str
    """A key of `WIRE_DTYPES`."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * WIRE_DTYPES[self.dtype][1]


Bucket = tuple[TensorSpec, ...]
"""Tensors that are sent together."""


class Manifest(msgspec.Struct, frozen=True):
    """Everything one version sends, bucket by bucket, in the order of the wire."""

    version: int
    buckets: tuple[Bucket, ...]
    tensor_checksums: dict[str, str]
    """Digest of each tensor as it is sent, by HF name; empty when none were asked for."""

    @property
    def num_bytes(self) -> int:
        """Bytes that each server receives."""
        return sum(spec.num_bytes for bucket in self.buckets for spec in bucket)


class GroupRequest(msgspec.Struct, frozen=True):
    """A server that wants a process group."""

    name: str
    """Unique for ever: servers keep the names they have seen."""
    ranks: int
    """Its ranks; it is ranks 1 to this."""
    nccl: bool
    """Whether it can receive by NCCL, on a GPU."""
    flat: bool
    """Whether it takes a bucket in one piece; otherwise each tensor is sent by itself."""


class GroupAddress(msgspec.Struct, frozen=True):
    """Where a server joins its group."""

    name: str
    host: str
    port: int
    world_size: int
    backend: Literal["gloo", "nccl"]


class Sending(Protocol):
    """One version on its way; see `WeightChannel.sending`."""

    @property
    def manifest(self) -> Manifest:
        """What is sent."""
        ...

    async def start(self, groups: Sequence[str]) -> None:
        """Send to these groups, whose servers stand still and are about to receive."""
        ...

    async def finish(self, abandoned: Collection[str]) -> Mapping[str, str]:
        """Wait until all is sent, but not to the `abandoned` groups, which are closed.

        Returns:
            What went wrong at the trainer's end, by group; those are closed too.
        """
        ...


class WeightChannel(Protocol):
    """The trainer's end of all groups."""

    async def open(self, requests: Sequence[GroupRequest], keep: Collection[str]) -> Sequence[GroupAddress]:
        """Listen for the servers of `requests`; groups neither there nor in `keep` are closed.

        Raises:
            WeightSyncError: while the trainer is in a step.
        """
        ...

    def sending(
        self, version: int, groups: Sequence[str], *, dtype: str, digests: bool, again: bool
    ) -> AbstractAsyncContextManager[Sending]:
        """Hold the weights still for the length of the block and make ready to send them as `version`.

        Args:
            version: what they are called.
            groups: whom they may be sent to.
            dtype: what they are sent in, a key of `WIRE_DTYPES`.
            digests: whether the manifest is to have checksums; they take a second for each gigabyte.
            again: the version was sent before; refused once the weights are others.

        Raises:
            WeightSyncError: `again`, and the trainer is in a step or has other weights by now.

        Cancellation: groups that were not finished are closed; the trainer can be used.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFeed:
    """Weights that the trainer hands out itself; what a `Publication` is for weights on a disk."""

    version: int
    channel: WeightChannel
    dtype: str = "float32"
    """What they are sent in, a key of `WIRE_DTYPES`: what the servers compute in, as they would cast them anyway."""


def scripted_checksums(version: int, buckets: Sequence[Bucket]) -> dict[str, str]:
    """Return the digests that scripted trainers and servers, between which nothing is sent, agree on."""
    return {spec.name: f"{version:032x}" for bucket in buckets for spec in bucket}


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`; a name other than localhost counts as reachable.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("10.0.0.1")
        (True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
