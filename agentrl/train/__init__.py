"""The trainer: one optimizer over one model, in a process of its own. Importing this package does not import torch."""

from agentrl.train.base import StepReport, TrainBatch, Trainer, TrainSample
from agentrl.train.checkpoint import Checkpoint, latest_checkpoint
from agentrl.train.remote import RemoteTrainer, RestoreReport, launch_trainer
from agentrl.train.scripted import ScriptedTrainer

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
