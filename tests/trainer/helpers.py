"""Random training batches and slow references for the trainer's tests."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.algo.config import AlgorithmConfig
from agentrl.trainer.base import TrainBatch, TrainSample
from agentrl.trainer.checkpoints.write import CheckpointJob, write_checkpoint
from agentrl.trainer.parallel.shard import whole
from agentrl.trainer.parallel.snapshot import raw_tensor
from agentrl.trainer.policy import PolicyTrainer
from agentrl.types import Float32Array, Sample
from tests.algo.decoupled import PpoNumbers

VOCAB = 300


def random_batch(
    *,
    samples: int = 6,
    version: int = 3,
    seed: int = 0,
    longest: int = 40,
    max_staleness: int = 2,
    temperature: float = 1.0,
    stem: int = 0,
) -> TrainBatch:
    """Return a batch with two or more trained stretches a sample, mixed versions, and advantages of both signs.

    All samples begin with the same `stem` tokens.
    """
    random = np.random.default_rng(seed)
    many = tuple(_sample(random, version, longest, max_staleness, temperature) for _ in range(samples))
    for item in many:
        item.sample.token_ids[:stem] = np.arange(1, stem + 1)
    return TrainBatch(samples=many, policy_version=version)


def _sample(random: np.random.Generator, version: int, longest: int, max_staleness: int, temperature: float) -> TrainSample:
    length = int(random.integers(6, longest + 1))
    mask = random.random(length) < 0.5
    mask[0], mask[1] = False, True
    versions = np.sort(random.integers(max(1, version - max_staleness), version + 1, length))
    advantages = np.where(mask, random.normal(size=length), 0)
    sample = Sample(
        token_ids=random.integers(0, VOCAB, length).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -6 + random.normal(size=length), 0).astype(np.float32),
        token_versions=np.where(mask, versions, -1).astype(np.int32),
        turn_index=(np.arange(length) // 8).astype(np.int32),
        temperatures=np.where(mask, temperature, 1).astype(np.float32),
    )
    return TrainSample(sample=sample, advantages=advantages.astype(np.float32))


def with_targets(batch: TrainBatch, seed: int = 0) -> TrainBatch:
    """Return `batch` with values and targets that differ from token to token."""
    random = np.random.default_rng(seed)

    def numbers(mask: np.ndarray) -> Float32Array:
        return np.where(mask, random.normal(size=len(mask)), 0).astype(np.float32)

    return replace(
        batch,
        samples=tuple(
            replace(item, values=numbers(item.sample.loss_mask), value_targets=numbers(item.sample.loss_mask))
            for item in batch.samples
        ),
    )


def without_advantages(batch: TrainBatch) -> TrainBatch:
    """Return `batch` with advantages of 0."""
    return replace(batch, samples=tuple(replace(item, advantages=item.advantages * 0) for item in batch.samples))


def save_checkpoint(trainer: PolicyTrainer, directory: Path, note: str = "") -> None:
    """Write a checkpoint of `trainer`; every rank must call it."""
    job = CheckpointJob(
        directory=directory, parts=trainer.stage(), state=trainer.state, note=note, source=trainer.model.path
    )
    write_checkpoint(trainer.model.ranks, job)


def state_bytes(trainer: PolicyTrainer) -> dict[str, bytes]:
    """Return the weights, and the optimizer's whole tensors, as bytes by name; every rank must call it."""
    tensors = {**trainer.model.parameters, **trainer.model.trained, **trainer.optimizer_tensors()}
    return {name: bytes(raw_tensor(whole(tensor.detach())).data) for name, tensor in tensors.items()}


def load_plain(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the HF model as a user would load it."""
    return AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)


def full_logprobs(model: PreTrainedModel, sample: Sample) -> Tensor:
    """Return [L-1] log-probs of tokens 1.. by a log_softmax over every position, one sequence at a time."""
    ids = torch.tensor(sample.token_ids.astype(np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    temperatures = torch.tensor(sample.temperatures[1:]).to(logits.dtype)
    return torch.log_softmax(logits / temperatures[:, None], -1).gather(1, ids[1:, None])[:, 0]


def slow_loss(model: PreTrainedModel, batch: TrainBatch, config: AlgorithmConfig) -> float:
    """Return the decoupled PPO loss of a first minibatch in double precision, token by token, from the printed formula."""
    total, count, numbers = 0.0, 0, PpoNumbers.of(config)
    for item in batch.samples:
        logprobs = full_logprobs(model, item.sample).tolist()
        for t in np.flatnonzero(item.sample.loss_mask).tolist():
            proximal = current = logprobs[t - 1]
            advantage = float(item.advantages[t])
            u = math.exp(current - proximal)
            w = math.exp(proximal - float(item.sample.behavior_logprobs[t]))
            if w > numbers.cap:
                w = numbers.cap if numbers.mode == "clamp" else 0.0
            clipped = min(max(u, 1 - numbers.clip_low), 1 + numbers.clip_high)
            total += w * min(u * advantage, clipped * advantage)
            count += 1
    return -total / count
