"""The servers' end of a sender's groups, in threads of the test's own process."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
from torch import Tensor

from agentrl.weights.process_group import ProcessGroup, join
from agentrl.weights.types import Bucket, GroupAddress, Manifest

PATIENCE = timedelta(seconds=60)


class Receiver:
    """Joins a group and takes what is sent, in a thread."""

    def __init__(self, address: GroupAddress, *, flat: bool = True, rank: int = 1, timeout: timedelta = PATIENCE) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.error: RuntimeError | None = None
        self.buckets = 0
        self._flat = flat
        self._group: ProcessGroup | None = None
        self._thread = threading.Thread(target=self._join, args=(address, rank, timeout), daemon=True)
        self._thread.start()

    def joined(self) -> Receiver:
        """Wait until it is in the group."""
        self.wait()
        assert self._group is not None, self.error
        return self

    def take(self, manifest: Manifest, *, stop_after: int | None = None) -> None:
        """Begin to take the buckets, all or the first few, after which it leaves the group."""
        self._thread = threading.Thread(target=self._take, args=(manifest, stop_after), daemon=True)
        self._thread.start()

    def wait(self) -> Receiver:
        """Wait for the end of what it does."""
        self._thread.join(PATIENCE.total_seconds() + 10)
        assert not self._thread.is_alive()
        return self

    @property
    def waits(self) -> bool:
        """Whether it is still at it."""
        return self._thread.is_alive()

    def leave(self) -> None:
        """Forget the group, as a process that dies does."""
        self._group = None

    def _join(self, address: GroupAddress, rank: int, timeout: timedelta) -> None:
        try:
            self._group = join(address, rank, timeout)
        except RuntimeError as error:
            self.error = error

    def _take(self, manifest: Manifest, stop_after: int | None) -> None:
        assert self._group is not None
        try:
            for bucket in manifest.buckets[:stop_after]:
                if self._flat:
                    self._take_flat(self._group, bucket)
                else:
                    apart = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in bucket]
                    self._group.wait(self._group.broadcast(apart))
                    self.tensors.update(zip([spec.name for spec in bucket], apart, strict=True))
                self.buckets += 1
        except RuntimeError as error:
            self.error = error
        if stop_after is not None:
            self._group = None

    def _take_flat(self, group: ProcessGroup, bucket: Bucket) -> None:
        whole = torch.empty(sum(spec.num_bytes for spec in bucket), dtype=torch.uint8)
        group.wait(group.broadcast([whole]))
        at = 0
        for spec in bucket:
            piece = whole[at : at + spec.num_bytes]
            self.tensors[spec.name] = piece.view(getattr(torch, spec.dtype)).reshape(spec.shape)
            at += spec.num_bytes
