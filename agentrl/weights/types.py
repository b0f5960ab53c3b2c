"""The records and protocols of a weight transfer between trainer and servers. No torch.

Invariant: the specs of a bucket fix every byte sent for it: its tensors in this order, row-major in their dtype, without
gaps. One process group connects the trainer, its rank 0, with one server, its other ranks: no server waits for another.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import numpy as np

from agentrl.types import Float32Array, Int32Array

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
    """Digest of each tensor, by HF parameter name; of an adapter, by PEFT's."""
    adapter: bool = False
    """Whether it is a LoRA adapter, which servers take beside their weights and under a name of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedWeights:
    """The weights that servers must hold after a transfer."""

    version: int
    tensor_checksums: Mapping[str, str]
    """By HF name, in the type in which they were published or sent."""
    origin: str
    """Origin of the weights, for messages."""
    directory: str | None = None
    """Of the published files; None: the weights come from the trainer's memory, in the type of the servers."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor on the wire."""

    name: str
    """HF parameter name."""
    dtype: str
    """A key of `WIRE_DTYPES`."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * WIRE_DTYPES[self.dtype][1]


Bucket = tuple[TensorSpec, ...]
"""Tensors that are sent together."""


class Manifest(msgspec.Struct, frozen=True):
    """The tensors that are sent for one version, bucket by bucket, in the order of the wire."""

    version: int
    buckets: tuple[Bucket, ...]
    tensor_checksums: dict[str, str]
    """Digest of each tensor as it is sent, by HF name."""

    @property
    def num_bytes(self) -> int:
        """Bytes that each server receives."""
        return sum(spec.num_bytes for bucket in self.buckets for spec in bucket)


class GroupRequest(msgspec.Struct, frozen=True):
    """A server that wants a process group."""

    name: str
    """Never used again, because servers keep the names they have seen."""
    ranks: int
    """Number of ranks of the server, which is ranks 1 to this number."""
    nccl: bool
    """Whether the server can receive by NCCL, on a GPU."""
    flat: bool
    """Whether the server receives a bucket as one tensor; otherwise each tensor is sent by itself."""


class GroupAddress(msgspec.Struct, frozen=True):
    """The address at which a server joins its group."""

    name: str
    host: str
    port: int
    world_size: int
    backend: Literal["gloo", "nccl"]


class Sending(Protocol):
    """The sending of one version; `WeightChannel.sending` yields it."""

    @property
    def manifest(self) -> Manifest: ...

    async def start(self, groups: Sequence[str]) -> None:
        """Send to these groups, whose servers are paused and about to receive."""
        ...

    async def finish(self, abandoned: Collection[str]) -> Mapping[str, str]:
        """Close the `abandoned` groups, wait until the others have everything, and return the errors by group."""
        ...


class WeightChannel(Protocol):
    """The trainer's end of all groups."""

    async def open(self, requests: Sequence[GroupRequest], close: Collection[str]) -> Sequence[GroupAddress]:
        """Close the groups in `close`, open one for each of `requests`, and return where the servers join."""
        ...

    def sending(
        self, version: int, groups: Sequence[str], *, dtype: str, again: bool
    ) -> AbstractAsyncContextManager[Sending]:
        """Prepare to send weights as `version`: what was held as that version, or else the present weights, held still.

        `dtype` is a key of `WIRE_DTYPES`; with `again`, `version` was sent before.

        Raises:
            UpdatePending: the version was held or sent before, no copy was kept, and the trainer has stepped or steps.

        Cancellation: unfinished groups are closed; the trainer stays usable.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFeed:
    """Weights of one policy version that the trainer sends from its memory, as a `Publication` is weights on a disk."""

    version: int
    channel: WeightChannel
    dtype: str = "float32"
    """Type on the wire, a key of `WIRE_DTYPES`: the type that the servers compute in, to which they would cast anyway."""


def scripted_checksums(version: int, buckets: Sequence[Bucket]) -> dict[str, str]:
    """Return the digests that scripted trainers and servers, between which nothing is sent, agree on."""
    return {spec.name: f"{version:032x}" for bucket in buckets for spec in bucket}


def scripted_logprobs(ids: Int32Array, version: int) -> Float32Array:
    """Return log-probs of `ids[1:]`, [L-1] float32 nats: a fixed function of the id, its predecessor and the version."""
    mixed = (ids[:-1].astype(np.int64) * 31 + ids[1:].astype(np.int64) * 17 + version * 7) % 97
    return (-0.01 - mixed / 25).astype(np.float32)
