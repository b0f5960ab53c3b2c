"""A function of the user that fails in the process of the trainer: its slot is named, and the checkpoint stays whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.trainer.checkpoints.read import latest_checkpoint
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.policy import PolicyTrainer
from agentrl.trainer.worker.client import launch_trainer
from tests.trainer.helpers import random_batch

LATE = """
from agentrl.algo.loss_batch import TokenLoss

def late(batch):
    scale = float("nan") if batch.advantages.abs().max() > 50 else 1.0
    return TokenLoss(loss=-scale * batch.advantages * batch.current_logprobs)
"""
CONFIG = TrainerConfig(lr=1e-3, minibatches=1, call_timeout_s=300)
IDS = [np.arange(30, dtype=np.int32)]

pytestmark = [pytest.mark.parametrize("anyio_backend", ["asyncio"])]


def launch(checkpoint: Path, folder: Path, policy_loss: str) -> Any:  # noqa: ANN401 - a context manager
    algorithm = AlgorithmConfig(policy_loss=policy_loss, correction="none")
    log = folder / "logs" / "trainer.log"
    return launch_trainer(CONFIG, algorithm, model_path=checkpoint, total_steps=10, seed=0, log_path=log)


@pytest.mark.starts
async def test_a_loss_that_fails_later_ends_the_step_by_name_and_leaves_weights_and_checkpoint(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_late_losses.py").write_text(LATE)
    monkeypatch.chdir(tmp_path)
    bad = random_batch(version=4, seed=1)
    bad = replace(bad, samples=tuple(replace(item, advantages=item.advantages * 1000) for item in bad.samples))
    async with launch(checkpoint, tmp_path, "my_late_losses:late") as trainer:
        await trainer.step(random_batch(version=3))
        await trainer.save(str(tmp_path / "checkpoints" / "step-00000001"), "after one step")
        await trainer.finish_save(wait=True)
        before = await trainer.logprobs(IDS)
        with pytest.raises(
            ConfigError, match=r"algorithm\.policy_loss: my_late_losses:late returned NaN or .*Bound its exp"
        ):
            await trainer.step(bad)
        np.testing.assert_array_equal(await trainer.logprobs(IDS), before)
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None
    model = PolicyModel(checkpoint, device=torch.device("cpu"))
    restored = PolicyTrainer(model, CONFIG, AlgorithmConfig(), total_steps=10)
    restored.restore(newest)
    assert restored.state.steps == 1
    np.testing.assert_array_equal(restored.logprobs(IDS), before)


@pytest.mark.starts
async def test_a_loss_that_only_the_driver_can_import_is_named_when_the_trainer_starts(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_the_driver_has_it.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)
    expected = (
        r"algorithm\.policy_loss: there is no module 'only_the_driver_has_it'.* only_the_driver_has_it:late is imported "
        r"where it runs, a loss in the process of the trainer: put its module into the directory"
    )
    with pytest.raises(ConfigError, match=expected):
        async with launch(checkpoint, tmp_path, "only_the_driver_has_it:late"):
            pass
