"""What leaves a worker that trains an adapter: what it held, as an adapter or merged, however it steps meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from agentrl.algo.config import AlgorithmConfig
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.worker.client import launch_trainer
from agentrl.weights.config import SyncConfig
from agentrl.weights.disk import verify_directory
from agentrl.weights.peft_files import ADAPTER_BASE_FILE, ADAPTER_WEIGHTS_FILE
from agentrl.weights.tensors import read_safetensors
from tests.support.adapters import merged_logprobs
from tests.support.tiny import tiny_checkpoint
from tests.trainer.helpers import random_batch

IDS = np.arange(3, 40, dtype=np.int32)


@pytest.mark.starts
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("way", ["adapter", "merged"])
@pytest.mark.anyio
async def test_a_version_leaves_as_it_was_held_and_not_as_the_base_or_a_later_step(
    tmp_path: Path, way: Literal["adapter", "merged"]
) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    config = TrainerConfig.model_validate({"lr": 1e-2, "minibatches": 1, "lora": {"rank": 4}})
    async with launch_trainer(
        config,
        AlgorithmConfig(),
        model_path=base,
        total_steps=9,
        seed=5,
        log_path=tmp_path / "log",
        sync=SyncConfig(adapter=way),
    ) as trainer:
        await trainer.step(random_batch(version=1))
        await trainer.hold(2, dtype=None)
        assert trainer.steps_while_sending
        [held] = await trainer.logprobs([IDS])
        await trainer.step(random_batch(version=2, seed=1))
        publication = await trainer.publish(2, str(tmp_path / "weights"))

    path = Path(publication.path)
    assert publication.adapter == (way == "adapter")
    if publication.adapter:
        digests = {name: raw.checksum(name) for name, raw in read_safetensors(path / ADAPTER_WEIGHTS_FILE).items()}
        assert digests == publication.tensor_checksums
        assert (path / ADAPTER_BASE_FILE).is_file()
        found = merged_logprobs(base, path, IDS)
    else:
        assert verify_directory(path).checksum == publication.checksum
        found = merged_logprobs(path, None, IDS)
    np.testing.assert_allclose(found, held, rtol=0, atol=2e-5)
    assert np.abs(found - merged_logprobs(base, None, IDS)).max() > 1e-2
