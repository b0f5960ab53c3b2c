"""A trainer's end of weight updates without a trainer process: the same channel and sender, in the test's own process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio.to_thread
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.trainer.worker.channel import TrainerChannel
from agentrl.trainer.worker.protocol import (
    BeginSending,
    FinishSending,
    GroupsOpened,
    HoldWeights,
    OpenGroups,
    SendingBegun,
    SendingFinished,
    SendingStarted,
    StartSending,
    WeightsHeld,
)
from agentrl.weights.config import SyncConfig
from agentrl.weights.sender import WeightSender, plan_sending
from agentrl.weights.types import Manifest


class LocalTrainer:
    """Has weights, and a channel that sends them."""

    def __init__(self, weights: Mapping[str, Tensor], **sync: object) -> None:
        """Begin with `weights`; `sync` are fields of `SyncConfig`."""
        self.weights = weights
        """What is sent next; replace it as a training step would."""
        self._config = SyncConfig.model_validate({"timeout_s": 60, **sync})
        self.sender = WeightSender(self._config, torch.device("cpu"))
        self._held: tuple[Manifest, Mapping[str, Tensor]] | None = None
        self.channel = TrainerChannel(self._call)

    @classmethod
    def of(cls, checkpoint: object, **sync: object) -> LocalTrainer:
        """Return one with the weights of a checkpoint."""
        return cls(load_file(f"{checkpoint}/model.safetensors"), **sync)

    def manifest(self, version: int, weights: Mapping[str, Tensor], *, dtype: str = "float32") -> Manifest:
        """Return what is sent for `weights`."""
        return plan_sending(version, weights, dtype=dtype, bucket_mb=self._config.bucket_mb)

    async def _call(self, request: Any, expected: type[Any], what: str) -> Any:  # noqa: ANN401 - the worker's protocol
        match request:
            case OpenGroups():
                return GroupsOpened(tuple(self.sender.open(request.requests, request.close)))
            case HoldWeights():
                assert request.dtype is not None
                manifest = self.manifest(request.version, self.weights, dtype=request.dtype)
                self._held = manifest, self.weights
                return WeightsHeld(snapshot=True, num_bytes=manifest.num_bytes, free_bytes=None)
            case BeginSending():
                assert self._held is not None
                self.sender.begin(*self._held, request.groups)
                return SendingBegun(self._held[0])
            case StartSending():
                self.sender.start(request.groups)
                return SendingStarted()
            case FinishSending():
                return SendingFinished(await anyio.to_thread.run_sync(self.sender.finish, request.groups, request.abandoned))
            case _:
                raise AssertionError(f"{what}: no such request: {request}")
