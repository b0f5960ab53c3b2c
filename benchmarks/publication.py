"""Share of a step that the trainer waits for its publication: with a snapshot, beside which it steps on, and without one.

Run: `python -m benchmarks.publication` (under a minute on two idle cores; `--quick` measures less and writes nothing). It
prints a table and overwrites benchmarks/results/publication.json.

A trainer of one process, and one of two, trains a model of 0.1M parameters on batches of 5760 tokens, those of `make demo`,
and publishes each version to one embedded server, by files or from memory to memory (gloo), as the engine does:

  host     `trainer.snapshot: host` with `engine.overlap_publication`: the trainer copies its weights and begins the next
           step while the server takes them; the cycle ends when both are done
  stream   `trainer.snapshot: stream`: the step begins when the server has the weights
  hold     until the trainer may step
  cycle    one publication and one step
  share    what the publication adds to a step, as a part of the cycle: 1 - step / cycle

`step` is a step without a publication, from the same processes. Medians; the ways of sending alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import anyio
from transformers.utils import logging

from agentrl.algo.config import AlgorithmConfig
from agentrl.engine.config import EngineConfig
from agentrl.engine.publishing import WeightPublisher
from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.pool import launch_pool
from agentrl.support.concurrency import task_group
from agentrl.trainer.base import TrainBatch
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.worker.client import RemoteTrainer, launch_trainer
from benchmarks.machine import describe_machine
from benchmarks.trainer import Case, batch
from benchmarks.weight_sync import SIZES, STEP_LENGTHS, Way, checkpoint

RESULTS = Path(__file__).parent / "results" / "publication.json"
SIZE = next(size for size in SIZES if size.name == "0.1M")


async def cycle(trainer: RemoteTrainer, publisher: WeightPublisher, version: int, data: TrainBatch) -> tuple[float, float]:
    """Publish `version` and train one step, beside each other where the trainer can; return seconds to hold, and in all."""
    begin = time.perf_counter()
    held = await publisher.hold(version)
    hold_s = time.perf_counter() - begin
    async with task_group() as tasks:
        if held.stays:
            tasks.start_soon(trainer.step, data)
        await publisher.send(held, beside=held.stays)
    if not held.stays:
        hold_s = time.perf_counter() - begin
        await trainer.step(data)
    return hold_s, time.perf_counter() - begin


async def measure(path: Path, folder: Path, ranks: int, snapshot: Literal["host", "stream"], repeats: int) -> dict[str, Any]:
    """Return the times of one trainer, and of its publications by each way."""
    vocab = int(json.loads((path / "config.json").read_text())["vocab_size"])
    servers = InferenceConfig(backend="embedded", device="cpu", dtype="float32", max_context_tokens=512)
    data = batch(Case(name=SIZE.name, hidden=SIZE.hidden, layers=SIZE.layers, vocab=vocab, lengths=STEP_LENGTHS))
    config = TrainerConfig.model_validate({"device": "cpu", "parallel": {"dp": ranks}, "snapshot": snapshot})
    steps: list[float] = []
    cycles: dict[Way, list[tuple[float, float]]] = {"disk": [], "distributed": []}
    async with (
        launch_trainer(
            config, AlgorithmConfig(), model_path=path, total_steps=999, seed=0, log_path=folder / "trainer.log"
        ) as trainer,
        launch_pool(servers, model_path=path, vocab_size=vocab, log_dir=folder) as pool,
    ):
        publishers: dict[Way, WeightPublisher] = {
            way: WeightPublisher(
                trainer=trainer,
                inference=pool,
                run_dir=folder / "run",
                config=EngineConfig(probe_tolerance=1e-2),
                probe_ids=range(10, 90),
                send_dtype="float32" if way == "distributed" else None,
            )
            for way in cycles
        }
        version = 0
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            await trainer.step(data)
            steps.append(time.perf_counter() - begin)
            for way, publisher in publishers.items():
                version += 1
                cycles[way].append(await cycle(trainer, publisher, version, data))
    step_s = median(steps[1:])
    ways = {way: summary(some[1:], step_s) for way, some in cycles.items()}
    return {"ranks": ranks, "snapshot": snapshot, "step_s": round(step_s, 4), **ways}


def summary(cycles: list[tuple[float, float]], step_s: float) -> dict[str, float]:
    """Return the medians, and the share of the publication."""
    hold_s, cycle_s = (median(times) for times in zip(*cycles, strict=True))
    return {"hold_s": round(hold_s, 4), "cycle_s": round(cycle_s, 4), "share": round(1 - step_s / cycle_s, 4)}


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table, times in milliseconds."""
    print(f"{'ranks':<6}{'snapshot':>9}{'step':>9}{'way':>13}{'hold':>9}{'cycle':>9}{'share':>8}")
    for row in rows:
        for way in ("disk", "distributed"):
            some = row[way]
            times = f"{some['hold_s'] * 1e3:>9.0f}{some['cycle_s'] * 1e3:>9.0f}{some['share']:>8.1%}"
            print(f"{row['ranks']:<6}{row['snapshot']:>9}{row['step_s'] * 1e3:>9.0f}{way:>13}{times}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick: bool = parser.parse_args().quick
    logging.disable_progress_bar()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        path = checkpoint(SIZE, Path(name))
        for ranks in (1, 2):
            for snapshot in ("host", "stream"):
                folder = Path(name) / f"{ranks}-{snapshot}"
                rows.append(anyio.run(measure, path, folder, ranks, snapshot, 1 if quick else 6))
    show(rows)
    if not quick:
        about = {"machine": describe_machine("torch", "agentrl"), "model": SIZE.name, "step_tokens": sum(STEP_LENGTHS)}
        RESULTS.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
