"""The supervised warm start: cross-entropy on the tokens that the model should produce.

Invariant: the loss of a step is the mean over its masked tokens, however forward passes cut them. The result is written
whole or not at all, and the same seed on the same machine gives the same weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from agentrl.algo.packing import sorted_microbatches
from agentrl.errors import ConfigError, TrainError
from agentrl.trainer.config import SftConfig
from agentrl.trainer.model import PolicyModel, resolve_device
from agentrl.trainer.optimizer import Muon, adamw, set_learning_rate
from agentrl.types import BoolArray, Int32Array
from agentrl.weights.disk import atomic_directory, write_model

_BETAS = (0.9, 0.95)
_MICROBATCH_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedExample:
    """One conversation as token ids."""

    token_ids: Int32Array
    loss_mask: BoolArray
    """[L] bool, True where the token is trained; False for the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftReport:
    """The result of a warm start."""

    output_path: str
    """The HF checkpoint written."""
    steps: int
    tokens: int
    """Tokens processed, padding not counted."""
    trained_tokens: int
    first_loss: float
    """Loss of the first step, nats per token."""
    last_loss: float
    """Mean loss of the last 50 steps, nats per token."""
    seconds: float
    """Wall-clock, loading and writing included."""


def run_sft(
    model_path: str | Path,
    output_path: str | Path,
    config: SftConfig,
    examples: Sequence[EncodedExample],
    *,
    on_progress: Callable[[int, float], None] | None = None,
) -> SftReport:
    """Train the checkpoint at `model_path` on `examples` and write the result to `output_path`, replacing it.

    `muon`: matrices inside the layers by Muon (`config.muon_lr`), embeddings, output head and norms by AdamW (`config.lr`).
    Both warm up linearly over `config.warmup_steps` and fall linearly to 0 over the second half of the steps.
    `on_progress` gets the number of steps done and the last loss; `config.data` is not read.

    Raises:
        ConfigError: the model cannot be loaded, or an example is empty or trains nothing.
        TrainError: the loss is not finite, or the output cannot be written.
    """
    started = time.perf_counter()
    _check_examples(examples)
    source = Path(model_path)
    model = PolicyModel(source, device=resolve_device(config.device))
    losses: list[float] = []
    tokens = trained = 0
    with _threads(config.threads):
        for chosen, loss in _training_steps(model, config, examples):
            losses.append(loss)
            tokens += sum(len(example.token_ids) for example in chosen)
            trained += sum(int(example.loss_mask.sum()) for example in chosen)
            if on_progress is not None:
                on_progress(len(losses), loss)
    with atomic_directory(Path(output_path)) as folder:
        write_model(folder, model.export(), version=0, source=source)
    return SftReport(
        output_path=str(output_path),
        steps=config.steps,
        tokens=tokens,
        trained_tokens=trained,
        first_loss=losses[0],
        last_loss=float(np.mean(losses[-50:])),
        seconds=time.perf_counter() - started,
    )


def _training_steps(
    model: PolicyModel, config: SftConfig, examples: Sequence[EncodedExample]
) -> Iterator[tuple[list[EncodedExample], float]]:
    """Take the steps; yield the examples and the loss of each."""
    parameters = list(model.parameters.values())
    optimizers = _optimizers(model, config)
    batches = _batches(len(examples), config)
    for step in range(config.steps):
        chosen = [examples[index] for index in next(batches)]
        loss = _backward(model, chosen)
        norm = float(nn.utils.clip_grad_norm_(parameters, config.max_grad_norm))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainError(f"warm start, step {step}: loss {loss}, gradient norm {norm}; lower sft.lr or sft.muon_lr")
        factor = _factor(step, config)
        for optimizer, peak in optimizers:
            set_learning_rate(optimizer, peak * factor)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield chosen, loss


@contextmanager
def _threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _backward(model: PolicyModel, examples: Sequence[EncodedExample]) -> float:
    """Return the mean loss of the masked tokens of `examples`; leave its gradient in the parameters."""
    lengths = [int(np.flatnonzero(example.loss_mask)[-1]) + 1 for example in examples]
    count = sum(int(example.loss_mask.sum()) for example in examples)
    total = 0.0
    for chosen in sorted_microbatches(lengths, _MICROBATCH_TOKENS):
        ids = [examples[i].token_ids[: lengths[i]] for i in chosen]
        masks = [examples[i].loss_mask[: lengths[i]] for i in chosen]
        loss = -model.logprobs(model.microbatch(ids, masks)).sum() / count
        loss.backward()
        total += float(loss.detach())
    return total


def _optimizers(model: PolicyModel, config: SftConfig) -> list[tuple[torch.optim.Optimizer, float]]:
    parameters = model.parameters
    if config.optimizer == "adamw":
        return [(adamw(parameters.values(), lr=config.lr, betas=_BETAS, weight_decay=0.0), config.lr)]
    outer = model.vocabulary_parameters()
    matrices = [parameter for name, parameter in parameters.items() if parameter.ndim == 2 and name not in outer]
    others = [parameter for name, parameter in parameters.items() if parameter.ndim != 2 or name in outer]
    return [
        (Muon(matrices, lr=config.muon_lr), config.muon_lr),
        (adamw(others, lr=config.lr, betas=_BETAS, weight_decay=0.0), config.lr),
    ]


def _factor(step: int, config: SftConfig) -> float:
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    half = config.steps / 2
    return warm * min(1.0, (config.steps - step) / half)


def _batches(count: int, config: SftConfig) -> Iterator[list[int]]:
    """Yield the conversations of each step, by index, without end; each conversation at most once an epoch."""
    # A step is a plain random draw. Steps of equally long conversations would save padding, but where length depends on
    # behavior, each such step would pull the student to one behavior, and the last steps would decide which it keeps.
    size = min(config.conversations_per_step, count)
    random = np.random.default_rng(config.seed)
    while True:
        order = random.permutation(count)
        for at in range(0, count - size + 1, size):
            yield order[at : at + size].tolist()


def _check_examples(examples: Sequence[EncodedExample]) -> None:
    if not examples:
        raise ConfigError("the warm start has no conversations; expected at least one")
    for index, example in enumerate(examples):
        if len(example.token_ids) != len(example.loss_mask):
            raise ConfigError(
                f"conversation {index} has {len(example.token_ids)} tokens but {len(example.loss_mask)} mask values"
            )
        if not example.loss_mask.any() or example.loss_mask[0]:
            raise ConfigError(f"conversation {index}: expected at least one token of the assistant, after other tokens")
