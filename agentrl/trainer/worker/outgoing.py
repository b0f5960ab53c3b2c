"""The weights that rank 0 holds for servers: sent from memory or written to files, while the trainer works on.

Invariant: what leaves as a version is what was held as that version. A snapshot to be sent stays until the next one is held,
a snapshot to be written until the files are there; then its memory is free as soon as no sending uses it. Each request is
answered in the thread that calls `answer`, so none waits for another.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import UpdatePending
from agentrl.trainer.parallel.snapshot import raw_tensor
from agentrl.trainer.worker import protocol
from agentrl.weights.disk import publish, publish_adapter
from agentrl.weights.sender import WeightSender, plan_sending
from agentrl.weights.types import Manifest

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.weights.config import SyncConfig


@dataclass(slots=True, kw_only=True, eq=False)
class HeldWeights:
    """The weights of one version."""

    version: int
    dtype: str | None
    """Type in which they are sent; None: they are written as they are."""
    tensors: Mapping[str, Tensor]
    """By HF name."""
    snapshot: bool
    """Whether they stay as they are when the trainer steps."""
    documents: Mapping[str, bytes] | None = None
    """Settings files of an adapter, whose matrices are in `tensors` by PEFT's names; None: whole weights."""
    manifest: Manifest | None = None
    """Of the first sending, for those after it."""


class OutgoingWeights:
    """The held weights and the groups with servers."""

    def __init__(self, sender: WeightSender, sync: SyncConfig, source: Path) -> None:
        self._sender, self._sync, self._source = sender, sync, source
        self._to_send: HeldWeights | None = None
        self._to_write: HeldWeights | None = None
        self._planning = threading.Lock()

    @property
    def must_not_change(self) -> bool:
        """Whether weights without a snapshot are being sent."""
        held = self._to_send
        return held is not None and not held.snapshot and self._sender.sending

    def hold(self, held: HeldWeights) -> None:
        if held.dtype is None:
            self._to_write = held
        else:
            self._to_send = held

    def forget(self, dtype: str | None) -> None:
        """Forget the weights to be sent or, for None, to be written; their memory is free once no sending uses them."""
        if dtype is None:
            self._to_write = None
        else:
            self._to_send = None

    def forget_changed(self) -> None:
        """Forget weights that are no snapshot, because the trainer is about to change them."""
        if self._to_send is not None and not self._to_send.snapshot:
            self._to_send = None
        if self._to_write is not None and not self._to_write.snapshot:
            self._to_write = None

    def answer(self, request: protocol.SendingRequest) -> protocol.WorkerReply:
        """Answer `request`; raises UpdatePending where the version is not held any more."""
        match request:
            case protocol.OpenGroups():
                return protocol.GroupsOpened(tuple(self._sender.open(request.requests, request.close)))
            case protocol.BeginSending():
                return self._begin(request)
            case protocol.StartSending():
                self._sender.start(request.groups)
                return protocol.SendingStarted()
            case protocol.FinishSending():
                return self._finish(request)
            case protocol.Publish():
                return self._write(request)

    def close(self) -> None:
        self._sender.close()

    def _begin(self, request: protocol.BeginSending) -> protocol.SendingBegun:
        held = _expect(self._to_send, request.version)
        with self._planning:
            if held.manifest is None:
                assert held.dtype is not None
                bucket_mb = self._sync.bucket_mb
                held.manifest = plan_sending(held.version, held.tensors, dtype=held.dtype, bucket_mb=bucket_mb)
        self._sender.begin(held.manifest, held.tensors, request.groups)
        return protocol.SendingBegun(held.manifest)

    def _finish(self, request: protocol.FinishSending) -> protocol.SendingFinished:
        failures = self._sender.finish(request.groups, request.abandoned)
        self.forget_changed()
        return protocol.SendingFinished(failures)

    def _write(self, request: protocol.Publish) -> protocol.Published:
        held = _expect(self._to_write, request.version)
        tensors = {name: raw_tensor(tensor) for name, tensor in held.tensors.items()}
        directory, version = Path(request.directory), request.version
        if held.documents is None:
            done = publish(tensors, version=version, directory=directory, source=self._source)
        else:
            done = publish_adapter(tensors, held.documents, version=version, directory=directory)
        self._to_write = None  # the files have them from now on
        return protocol.Published(done.version, done.path, done.checksum, dict(done.tensor_checksums), done.adapter)


def _expect(held: HeldWeights | None, version: int) -> HeldWeights:
    if held is None or held.version != version:
        other = "no version" if held is None else f"version {held.version}"
        raise UpdatePending(
            f"the trainer holds {other} and not version {version}; the server gets weights with the next update"
        )
    return held
