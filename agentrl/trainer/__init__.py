"""The trainer: one optimizer over one model, in a process of its own. Importing this package does not import torch."""

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
