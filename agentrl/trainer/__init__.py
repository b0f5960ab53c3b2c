"""The trainer: one optimizer over one model, in a process of its own. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.support.exports import first_use

if TYPE_CHECKING:
    from agentrl.trainer.base import StepReport, TrainBatch, Trainer, TrainSample
    from agentrl.trainer.checkpoints.read import Checkpoint, latest_checkpoint
    from agentrl.trainer.scripted import ScriptedTrainer
    from agentrl.trainer.worker.client import RemoteTrainer, RestoreReport, launch_trainer

__all__ = [
    "Checkpoint",
    "RemoteTrainer",
    "RestoreReport",
    "ScriptedTrainer",
    "StepReport",
    "TrainBatch",
    "TrainSample",
    "Trainer",
    "latest_checkpoint",
    "launch_trainer",
]

__getattr__ = first_use(
    __name__,
    {
        "Checkpoint": "agentrl.trainer.checkpoints.read",
        "RemoteTrainer": "agentrl.trainer.worker.client",
        "RestoreReport": "agentrl.trainer.worker.client",
        "ScriptedTrainer": "agentrl.trainer.scripted",
        "StepReport": "agentrl.trainer.base",
        "TrainBatch": "agentrl.trainer.base",
        "TrainSample": "agentrl.trainer.base",
        "Trainer": "agentrl.trainer.base",
        "latest_checkpoint": "agentrl.trainer.checkpoints.read",
        "launch_trainer": "agentrl.trainer.worker.client",
    },
)
