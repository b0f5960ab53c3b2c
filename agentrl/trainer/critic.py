"""A critic: a linear value head on the hidden states of the policy or of a second model, with an optimizer of its own.

Invariant: the head is whole on every rank and has the same bits on all of them. A new head predicts 0. A critic that shares
the policy's forward pass trains the policy's weights only under `critic.model: trunk`, through the policy's optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.algo.config import LR_FACTOR, CriticConfig
from agentrl.errors import ConfigError
from agentrl.trainer.checkpoints.read import Checkpoint
from agentrl.trainer.checkpoints.write import take_state
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import Microbatch, PolicyModel
from agentrl.trainer.optimizer import adamw, clip_gradients, set_learning_rate
from agentrl.trainer.parallel.shard import held_box
from agentrl.trainer.parallel.snapshot import torch_tensor
from agentrl.trainer.parallel.tensor import sum_partial_gradients
from agentrl.weights.tensors import StoredTensor

PREFIX: Final = "critic."
"""Beginning of the names of its tensors in a checkpoint, which no key of the policy's optimizer has."""


class Critic:
    """Values of tokens, and the optimizer that trains them."""

    def __init__(self, policy: PolicyModel, config: CriticConfig, trainer: TrainerConfig) -> None:
        """Put a value head on `policy`, or on a second copy of its checkpoint; every rank must call it."""
        self.warmup_steps = config.warmup_steps
        self.lr = config.lr or LR_FACTOR * trainer.lr
        self._max_grad_norm = trainer.max_grad_norm
        self._shares_pass = config.model != "own"
        self._model = policy if self._shares_pass else second_model(policy, trainer)
        width = self._model.hidden_size
        self._weight = nn.Parameter(torch.zeros(width, device=policy.device))
        self._bias = nn.Parameter(torch.zeros(1, device=policy.device))
        self._stops_gradient = config.model == "head"
        self._model.value_head = self._head
        trunk = {} if self._shares_pass else self._model.parameters
        self._trunk: Mapping[str, nn.Parameter] = trunk
        self._parameters: Mapping[str, nn.Parameter] = {**trunk, "head.weight": self._weight, "head.bias": self._bias}
        # Tensors that ranks split and tensors that they hold whole do not fit into one group of an optimizer.
        self._optimizers = [
            adamw(some, lr=self.lr, betas=trainer.betas, weight_decay=trainer.weight_decay)
            for some in (list(trunk.values()), [self._weight, self._bias])
            if some
        ]

    @property
    def shares_pass(self) -> bool:
        """Whether the policy's forward pass computes its values."""
        return self._shares_pass

    def values(self, batch: Microbatch) -> Tensor:
        """Return [n] float32 values before the wanted tokens of `batch`; differentiable."""
        return self._model.values(batch)

    def update(self, lr: float, *, apply: bool) -> float:
        """Take one optimizer step, if `apply`, and return the norm of the gradient; every rank must call it."""
        self._add_gradients_of_ranks()
        norm = clip_gradients(self._parameters.values(), self._max_grad_norm)
        for optimizer in self._optimizers:
            if apply and math.isfinite(norm):
                set_learning_rate(optimizer, lr)
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

    def forget_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and optimizer state by their names in a checkpoint; nothing is copied."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            found[f"{PREFIX}weight.{name}"] = parameter.detach()
            for key, value in self._state(parameter).items():
                found[f"{PREFIX}{key}.{name}"] = value
        return found

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue exactly where `checkpoint` was written; each rank reads the parts that it holds.

        Raises:
            ConfigError: it has no critic, or another one; nothing has changed.
        """
        stored: dict[str, dict[str, StoredTensor]] = {}
        for full_name, tensor in checkpoint.optimizer.items():
            if full_name.startswith(PREFIX):
                key, _, name = full_name.removeprefix(PREFIX).partition(".")
                stored.setdefault(name, {})[key] = tensor
        wanted = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        shapes = {name: keys["weight"].shape for name, keys in stored.items() if "weight" in keys}
        if shapes != wanted:
            what = "no critic" if not shapes else "another critic"
            raise ConfigError(
                f"{checkpoint.path} holds {what}: continue with the algorithm.critic that the run began with, or start a "
                "new run with model.path set to the checkpoint"
            )
        for name, parameter in self._parameters.items():
            offset, elements = held_box(parameter.detach())
            elements.copy_(torch_tensor(stored[name]["weight"].box(offset, tuple(elements.shape))))
            state = {key: take_state(parameter, value) for key, value in stored[name].items() if key != "weight"}
            owner = next(each for each in self._optimizers if _holds(each, parameter))
            owner.state.pop(parameter, None)
            if state:
                owner.state[parameter] = state

    def _head(self, hidden: Tensor) -> Tensor:
        hidden = hidden.detach() if self._stops_gradient else hidden
        return hidden.float() @ self._weight + self._bias

    def _state(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                return optimizer.state[parameter]
        return {}

    def _add_gradients_of_ranks(self) -> None:
        """Average the head's gradients over ranks, as FSDP averages the model's gradients."""
        model = self._model
        if not self._shares_pass and model.tensor_group is not None:
            sum_partial_gradients(self._trunk, model.tensor_group)
        if model.ranks.world == 1:
            return
        gradients = [each.grad for each in (self._weight, self._bias) if each.grad is not None]
        for gradient in gradients:  # every rank has both, for each has a pass
            dist.all_reduce(gradient)
            gradient /= model.ranks.world


def second_model(policy: PolicyModel, trainer: TrainerConfig) -> PolicyModel:
    """Return another copy of the checkpoint that `policy` was read from, split like it; every rank must call it."""
    dtype: Literal["float32", "bfloat16"] = trainer.dtype
    return PolicyModel(
        policy.path,
        device=policy.device,
        dtype=dtype,
        gradient_checkpointing=trainer.gradient_checkpointing,
        ranks=policy.ranks,
        share=policy.shares_prefixes,
    )


def _holds(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    return any(parameter is each for group in optimizer.param_groups for each in group["params"])
