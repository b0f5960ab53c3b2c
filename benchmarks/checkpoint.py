"""Seconds that a save holds the trainer: written before the next step, and written while training continues.

Run: `python -m benchmarks.checkpoint` (about two minutes; `--repeats 3` for less). It prints a table and writes
benchmarks/results/checkpoint.json. The model has 30M parameters, so a checkpoint has 360 MB. A trainer of one and one of two
processes run as in `agentrl train`. Both ways take turns after each step:

  synchronous   `save`, then `finish_save(wait=True)`: the weights and moments are copied, and the files are on the disk
  asynchronous  `save` alone, as a run calls it: they are copied. The benchmark waits for the files before the next save

The figures are wall time: medians, and the writing that the asynchronous save leaves to a thread (`written`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from statistics import median

import anyio
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging

from agentrl.algo.config import AlgorithmConfig
from agentrl.trainer.base import TrainBatch, TrainSample
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.worker.client import RemoteTrainer, launch_trainer
from agentrl.types import Sample
from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results" / "checkpoint.json"
WORLDS = (1, 2)
VOCABULARY = 1024
TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_parameters = build(folder / "model")
        rows = [anyio.run(_measure, world, options.repeats, folder) for world in WORLDS]
    print(f"seconds that a save of {num_parameters / 1e6:.1f}M parameters holds the trainer, medians of {options.repeats}")
    print("ranks     MB  synchronous  asynchronous  ratio  written")
    for row in rows:
        print(
            f"{row['ranks']:>5}{row['megabytes']:>7.0f}{row['synchronous_s']:>13.3f}{row['asynchronous_s']:>14.3f}"
            f"{row['ratio']:>7.1f}{row['written_s']:>9.3f}"
        )
    record = {"machine": describe_machine("torch"), "repeats": options.repeats, "parameters": num_parameters, "rows": rows}
    options.output.write_text(json.dumps(record, indent=1) + "\n")


def build(path: Path) -> int:
    """Write a random model of 30M parameters; return their exact number."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=9,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return model.num_parameters()


def batch(version: int) -> TrainBatch:
    """Return one sample; how long a step takes is not measured."""
    mask = np.arange(TOKENS) > 0
    sample = Sample(
        token_ids=np.random.default_rng(version).integers(0, VOCABULARY, TOKENS).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -7.0, 0.0).astype(np.float32),
        token_versions=np.where(mask, version, -1).astype(np.int32),
        turn_index=np.zeros(TOKENS, np.int32),
        temperatures=np.ones(TOKENS, np.float32),
    )
    advantages = mask.astype(np.float32)
    return TrainBatch(samples=(TrainSample(sample=sample, advantages=advantages),) * 2, policy_version=version)


async def _measure(world: int, repeats: int, folder: Path) -> dict[str, float]:
    synchronous: list[float] = []
    asynchronous: list[float] = []
    written: list[float] = []
    target = folder / f"saved-{world}"
    async with _trainer(world, folder) as trainer:
        for number in range(2 * repeats + 2):  # the first save of each way allocates
            await trainer.step(batch(number + 1))
            begin = time.perf_counter()
            await trainer.save(str(target))
            held = time.perf_counter() - begin
            report = await trainer.finish_save(wait=True)
            assert report is not None
            if number < 2:
                continue
            if number % 2:
                asynchronous.append(held)
                written.append(report.seconds)
            else:
                synchronous.append(time.perf_counter() - begin)
    size = sum(path.stat().st_size for path in target.iterdir())
    return {
        "ranks": world,
        "megabytes": size / 1e6,
        "synchronous_s": median(synchronous),
        "asynchronous_s": median(asynchronous),
        "ratio": median(synchronous) / median(asynchronous),
        "written_s": median(written),
    }


def _trainer(world: int, folder: Path) -> AbstractAsyncContextManager[RemoteTrainer]:
    config = TrainerConfig.model_validate({"lr": 1e-6, "device": "cpu", "parallel": {"dp": world}})
    log = folder / f"trainer-{world}.log"
    return launch_trainer(config, AlgorithmConfig(), model_path=folder / "model", total_steps=100, seed=0, log_path=log)


if __name__ == "__main__":
    main()
