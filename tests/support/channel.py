"""A trainer's end of weight updates without a trainer process: the same channel and sender, in the test's own process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio.to_thread
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.trainer.worker.client import TrainerChannel
from agentrl.trainer.worker.protocol import (
    BeginSending,
    FinishSending,
    GroupsOpened,
    OpenGroups,
    SendingBegun,
    SendingFinished,
    SendingStarted,
    StartSending,
)
from agentrl.weights.config import SyncConfig
from agentrl.weights.sender import WeightSender


class LocalTrainer:
    """Has weights, and a channel that sends them."""

    def __init__(self, weights: Mapping[str, Tensor], **sync: object) -> None:
        """Begin with `weights`; `sync` are fields of `SyncConfig`."""
        self.weights = weights
        """What is sent next; replace it as a training step would."""
        self.sender = WeightSender(SyncConfig.model_validate({"timeout_s": 20, **sync}), torch.device("cpu"))
        self.channel = TrainerChannel(self._call)

    @classmethod
    def of(cls, checkpoint: object, **sync: object) -> LocalTrainer:
        """Return one with the weights of a checkpoint."""
        return cls(load_file(f"{checkpoint}/model.safetensors"), **sync)

    async def _call(self, request: Any, expected: type[Any], what: str) -> Any:  # noqa: ANN401 - the worker's protocol
        match request:
            case OpenGroups():
                return GroupsOpened(tuple(self.sender.open(request.requests, request.keep)))
            case BeginSending():
                return SendingBegun(self.sender.begin(request.version, self.weights, request.groups, dtype=request.dtype))
            case StartSending():
                self.sender.start(request.groups)
                return SendingStarted()
            case FinishSending():
                return SendingFinished(await anyio.to_thread.run_sync(self.sender.finish, request.abandoned))
            case _:
                raise AssertionError(f"{what}: no such request: {request}")
