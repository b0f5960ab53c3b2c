"""Steps of a trainer of one or several ranks, and what must be the same after them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from agentrl.algo.config import AlgorithmConfig
from agentrl.trainer.base import StepReport
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.policy import PolicyTrainer
from agentrl.weights.tensors import RawTensor
from tests.trainer.helpers import random_batch

IDS = [np.arange(1, 30, dtype=np.int32), np.arange(5, 9, dtype=np.int32), np.array([1], np.int32)]


class Outcome(NamedTuple):
    """What some steps left behind on one rank."""

    metrics: dict[str, float]
    logprobs: list[NDArray[np.float32]]
    weights: dict[str, NDArray[np.float32]]
    proximal: dict[int, NDArray[np.float32]]


def make_trainer(ranks: Ranks, path: Path, settings: dict[str, Any]) -> PolicyTrainer:
    rest = {name: value for name, value in settings.items() if name not in ("algorithm", "stem")}
    config = TrainerConfig.model_validate({"lr": 1e-3, "minibatches": 1, "max_grad_norm": 0.5, **rest})
    algorithm = AlgorithmConfig.model_validate(settings.get("algorithm", {}))
    model = PolicyModel(
        path,
        device=torch.device("cpu"),
        dtype=config.dtype,
        gradient_checkpointing=config.gradient_checkpointing,
        ranks=ranks,
        share=config.shared_prefixes == "auto",
        lora=config.lora,
        trainable=config.trainable,
    )
    return PolicyTrainer(model, config, algorithm, total_steps=10, seed=5)


def three_steps(ranks: Ranks, path: Path, settings: dict[str, Any]) -> Outcome:
    trainer, stem = make_trainer(ranks, path, settings), settings.get("stem", 0)
    reports = [trainer.step(random_batch(version=number + 1, seed=number, samples=9, stem=stem)) for number in range(3)]
    return outcome_of(trainer, reports[-1])


def outcome_of(trainer: PolicyTrainer, report: StepReport) -> Outcome:
    """Return what a trainer is and has after the step that `report` is of; every rank must call it."""
    timeless = {name: value for name, value in report.metrics.items() if not name.startswith("seconds")}
    proximal = dict(report.proximal_logprobs)
    return Outcome(timeless, trainer.logprobs(IDS), _arrays(trainer.model.export()), proximal)


def three_steps_each(ranks: Ranks, runs: list[tuple[Path, dict[str, Any]]]) -> list[Outcome]:
    """Take three steps of one trainer after the other, each of a model with settings of its own."""
    return [three_steps(ranks, path, settings) for path, settings in runs]


def _arrays(tensors: dict[str, RawTensor]) -> dict[str, NDArray[np.float32]]:
    return {name: np.frombuffer(raw.data, np.float32).copy() for name, raw in tensors.items()}


def assert_same(together: list[Outcome], alone: Outcome) -> None:
    """Check that all ranks report what one process does, and that rank 0 holds its weights."""
    for outcome in together:  # every rank knows the metrics and the log-probs
        # A maximum is that of one token, and a norm that of one minibatch: their rounding does not average out.
        single = {name for name in alone.metrics if name.endswith("_max") or name.startswith("grad_norm")}
        for name, value in alone.metrics.items():
            assert outcome.metrics[name] == pytest.approx(value, rel=1e-5 if name in single else 1e-6, abs=1e-6), name
        for ours, theirs in zip(outcome.logprobs, alone.logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=2e-6)  # rtol: float32 itself rounds
        assert outcome.proximal.keys() == alone.proximal.keys()
        for at, values in alone.proximal.items():
            np.testing.assert_allclose(outcome.proximal[at], values, rtol=0, atol=1e-5)
    assert together[0].weights.keys() == alone.weights.keys()
    for name, values in alone.weights.items():
        np.testing.assert_allclose(together[0].weights[name], values, rtol=0, atol=1e-6, err_msg=name)
    assert all(outcome.weights == {} for outcome in together[1:])
