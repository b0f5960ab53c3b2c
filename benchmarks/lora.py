"""What an adapter of rank 8 costs beside full training: bytes and time of an update, time of a step, memory.

Run: `python -m benchmarks.lora` (three minutes on idle cores). `--quick` leaves the large model out and writes
nothing. It prints a table, and overwrites benchmarks/results/lora.json.

For each model size one process trains on 5760 tokens, the batch of `make demo`, and gives its weights to an embedded engine
within the same process, through files: all weights (`full`), base and adapter merged (`merged`), and the adapter alone
(`adapter`). All times are CPU seconds of this process, the median of some, so that a busy machine disturbs them little:

  step      a training step, after one that is not counted
  leave     copies of what servers get, their digests, and the files
  take      the server's reading, its digests and, for whole weights, the swap
  states    bytes of weights, gradients and AdamW moments after a step, and what the plan says
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import anyio
import torch
from transformers.utils import logging

from agentrl.algo.config import AlgorithmConfig
from agentrl.plan.memory import trainer_memory
from agentrl.plan.model import read_model
from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.parallel.snapshot import raw_tensor
from agentrl.trainer.policy import PolicyTrainer
from agentrl.weights.disk import publish, publish_adapter
from agentrl.weights.peft_files import ADAPTER_WEIGHTS_FILE
from agentrl.weights.tensors import WEIGHTS_FILE
from agentrl.weights.types import Publication
from benchmarks.machine import describe_machine
from benchmarks.trainer import Case, batch
from benchmarks.weight_sync import SIZES, STEP_LENGTHS, Size, checkpoint

RESULT = Path(__file__).parent / "results" / "lora.json"
NAMES = ("5M", "30M")
TIMES = 5
Way = Literal["full", "merged", "adapter"]


def trainer_of(path: Path, way: Way) -> PolicyTrainer:
    given: dict[str, object] = {} if way == "full" else {"lora": {"rank": 8, "alpha": 16}}
    config = TrainerConfig.model_validate({"device": "cpu", "lr": 1e-4, "minibatches": 1, **given})
    model = PolicyModel(path, device=torch.device("cpu"), lora=config.lora)
    return PolicyTrainer(model, config, AlgorithmConfig(), total_steps=100)


def leave(trainer: PolicyTrainer, version: int, folder: Path, way: Way) -> Publication:
    model = trainer.model
    if way == "adapter":
        assert model.adapter is not None
        copies = {name: raw_tensor(tensor) for name, tensor in model.adapter.copies(model.ranks).items()}
        return publish_adapter(copies, model.adapter.documents(model.base), version=version, directory=folder)
    whole = {name: raw_tensor(tensor) for name, tensor in model.weights(copied=True).items()}
    return publish(whole, version=version, directory=folder, source=model.path)


async def take(engine: EmbeddedEngine, publication: Publication) -> None:
    if publication.adapter:
        assert (await engine.adapters.load(f"v{publication.version}", publication.path)).success
        assert engine.adapters.checksums(f"v{publication.version}") == publication.tensor_checksums
        return
    done = await engine.update_weights(publication.path, weight_version="1", flush_cache=True, abort_all_requests=False)
    assert done.success, done.message
    assert engine.checksums() == publication.tensor_checksums


async def processor_seconds(action: Callable[[], Awaitable[object]]) -> float:
    begin = time.process_time()
    await action()
    return time.process_time() - begin


async def measure(size: Size, path: Path, folder: Path, way: Way) -> dict[str, Any]:
    trainer, engine = trainer_of(path, way), EmbeddedEngine(EngineOptions(model_path=str(path), device="cpu"))
    shape = read_model(str(path)).shape
    assert shape is not None
    case = Case(name=size.name, hidden=size.hidden, layers=size.layers, vocab=shape.vocabulary, lengths=STEP_LENGTHS)
    data, published = batch(case), list[Publication]()

    async def step() -> None:
        trainer.step(data)

    async def write() -> None:
        published.append(leave(trainer, len(published) + 1, folder / way, way))

    await step()
    steps = [await processor_seconds(step) for _ in range(3)]
    leaves, takes = list[float](), list[float]()
    for _ in range(TIMES):
        leaves.append(await processor_seconds(write))
        takes.append(await processor_seconds(lambda: take(engine, published[-1])))
    trained = trainer.model.trained.values()
    moments = [value for name, value in trainer.optimizer_tensors().items() if name.startswith("exp_avg")]
    held = [*trainer.model.parameters.values(), *(trained if way != "full" else ()), *trained, *moments]
    config = TrainerConfig.model_validate({} if way == "full" else {"lora": {"rank": 8, "alpha": 16}})
    planned = trainer_memory(config, shape, None)
    return {
        "size": size.name,
        "way": way,
        "trained_parameters": sum(tensor.numel() for tensor in trained),
        "step_cpu_s": median(steps),
        "tokens_per_cpu_s": sum(STEP_LENGTHS) / median(steps),
        "update_bytes": (Path(published[-1].path) / (ADAPTER_WEIGHTS_FILE if way == "adapter" else WEIGHTS_FILE))
        .stat()
        .st_size,
        "leave_cpu_s": median(leaves),
        "take_cpu_s": median(takes),
        "states_bytes": sum(tensor.numel() * tensor.element_size() for tensor in held),
        "planned_states_bytes": planned.weights + planned.gradients + planned.optimizer,
    }


async def run(*, quick: bool) -> None:
    rows: list[dict[str, Any]] = []
    titles = ("step", "tok/s", "MB", "leave", "take")
    print(f"{'size':>5} {'way':>8} {'trained':>10} {' '.join(f'{title:>8}' for title in titles)} {'states MB':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for size in (each for each in SIZES if each.name in (NAMES[:1] if quick else NAMES)):
            path = checkpoint(size, Path(folder))
            for way in ("full", "merged", "adapter"):
                row = await measure(size, path, Path(folder) / f"{size.name}-published", way)
                rows.append(row)
                print(
                    f"{row['size']:>5} {way:>8} {row['trained_parameters']:>10} {row['step_cpu_s']:>8.2f} "
                    f"{row['tokens_per_cpu_s']:>8.0f} {row['update_bytes'] / 1e6:>8.2f} {row['leave_cpu_s']:>8.3f} "
                    f"{row['take_cpu_s']:>8.3f} {row['states_bytes'] / 1e6:>10.1f}",
                    flush=True,
                )
    if not quick:
        RESULT.write_text(json.dumps({"machine": describe_machine("torch", "transformers"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    anyio.run(lambda: run(quick=parser.parse_args().quick))
