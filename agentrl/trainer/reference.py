"""The reference policy: frozen weights, from the start of the run or from a past version.

Invariant: it changes only between batches, and to exactly the weights of the policy at that moment. It is split over ranks
like the policy.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from agentrl.algo.config import ReferenceConfig
from agentrl.errors import ConfigError
from agentrl.trainer.checkpoints.read import Checkpoint
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.critic import second_model
from agentrl.trainer.model import Microbatch, PolicyModel
from agentrl.trainer.parallel.shard import held_box
from agentrl.trainer.parallel.snapshot import torch_tensor

_NAMES: Final = "reference.weight."
"""Beginning of the names of its tensors in a checkpoint."""


class Reference:
    """The log-probs of a policy that is not trained."""

    def __init__(self, policy: PolicyModel, config: ReferenceConfig, trainer: TrainerConfig) -> None:
        """Read the checkpoint of `policy` again; every rank must call it.

        Raises:
            ConfigError: it is to follow a policy that is an adapter.
        """
        if config.refresh_every and policy.adapter is not None:
            raise ConfigError(
                "algorithm.reference.refresh_every: the reference of a run with trainer.lora is the base, which never "
                "changes; remove refresh_every"
            )
        self._policy = policy
        self._model = second_model(policy, trainer)
        self._refresh_every = config.refresh_every

    def logprobs(self, batch: Microbatch) -> Tensor:
        """Return [n] float32 log-probs of the wanted tokens, nats, without gradient."""
        with torch.no_grad():
            return self._model.logprobs(batch)

    def after_step(self, steps: int) -> None:
        """Take the policy's weights after `steps` batches, if they are due."""
        if not self._refresh_every or steps % self._refresh_every:
            return
        own = self._model.parameters
        with torch.no_grad():
            for name, parameter in self._policy.parameters.items():
                held_box(own[name].detach()).elements.copy_(held_box(parameter.detach()).elements)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by their names in a checkpoint, unless `model.path` holds them; nothing is copied."""
        if not self._refresh_every:
            return {}
        return {f"{_NAMES}{name}": parameter.detach() for name, parameter in self._model.parameters.items()}

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise ConfigError if `checkpoint` does not hold the reference of this run."""
        wanted = {name: tuple(tensor.shape) for name, tensor in self.tensors().items()}
        shapes = {name: tensor.shape for name, tensor in checkpoint.optimizer.items() if name.startswith(_NAMES)}
        if shapes != wanted:
            raise ConfigError(
                f"{checkpoint.path} holds {'another' if shapes else 'no'} reference model: continue with the "
                "algorithm.reference.refresh_every that the run began with, or start a new run with model.path set to the "
                "checkpoint"
            )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue exactly where `checkpoint`, which was checked, was written; each rank reads the parts that it holds."""
        for name, tensor in self.tensors().items():
            offset, elements = held_box(tensor)
            elements.copy_(torch_tensor(checkpoint.optimizer[name].box(offset, tuple(elements.shape))))
