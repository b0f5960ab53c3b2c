"""Tokens per CPU-second of a training step whose samples begin alike, with and without shared prefixes.

Run: `python -m benchmarks.shared_prefixes` (eleven minutes beside other work). It prints a table and writes
benchmarks/results/shared_prefixes.json.

  group      8 episodes of one task with a common prompt, which is the given part of their tokens
  forks      an episode whose agent forks: 12 branches that leave a common history at different turns
  linear     8 episodes that have nothing in common, which must lose nothing

Both settings take turns on the same batch, so that a busy machine disturbs them alike; a row shows medians. Before timing,
the two gradient norms are compared. `ideal` is the number of all tokens over those that are computed once. Peak memory is
that of a process that takes two steps, over one that only loads the model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import torch
from transformers.utils import logging

from agentrl.algo.config import AlgorithmConfig
from agentrl.trainer.base import TrainBatch, TrainSample
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.policy import PolicyTrainer
from agentrl.types import Int32Array, Sample
from benchmarks.trainer import LR, Case, checkpoint, cpu_seconds

RESULTS = Path(__file__).parent / "results" / "shared_prefixes.json"
SETTINGS: tuple[Literal["off", "auto"], ...] = ("off", "auto")
MODELS = (
    Case(name="0.1M", hidden=64, layers=2, vocab=373, lengths=()),
    Case(name="5M", hidden=256, layers=6, vocab=4096, lengths=()),
)
MICROBATCH_TOKENS: int = TrainerConfig.model_fields["microbatch_tokens"].default
EPISODE_TOKENS = 1000
TRAINED_TURN = 40


def group(part: float, vocab: int) -> list[tuple[Int32Array, int]]:
    """Return 8 sequences of a common prompt, `part` of each, and where its own tokens begin."""
    random, common = np.random.default_rng(0), int(part * EPISODE_TOKENS)
    prompt = random.integers(0, vocab, common).astype(np.int32)
    rest = random.integers(0, vocab, (8, EPISODE_TOKENS - common)).astype(np.int32)
    return [(np.concatenate([prompt, own]), max(common, 1)) for own in rest]


def forks(vocab: int) -> list[tuple[Int32Array, int]]:
    """Return a history of 1,500 tokens and 11 branches of 150 that leave it at different tokens."""
    random = np.random.default_rng(1)
    history = random.integers(0, vocab, 1500).astype(np.int32)
    leaves = np.sort(random.integers(200, 1500, 11)).tolist()
    tails = random.integers(0, vocab, (11, 150)).astype(np.int32)
    return [(history, 200), *((np.concatenate([history[:at], tail]), at) for at, tail in zip(leaves, tails, strict=True))]


def batch(sequences: Sequence[tuple[Int32Array, int]], vocab: int) -> TrainBatch:
    """Return samples whose own tokens are trained in turns of `TRAINED_TURN`, with as many tokens between them."""
    random = np.random.default_rng(2)
    samples: list[TrainSample] = []
    for ids, own in sequences:
        places = np.arange(len(ids))
        mask = (places >= own) & ((places - own) // TRAINED_TURN % 2 == 0)
        behavior = np.where(mask, -np.log(vocab) + 0.1 * random.normal(size=len(ids)), 0)
        sample = Sample(
            token_ids=ids,
            loss_mask=mask,
            behavior_logprobs=behavior.astype(np.float32),
            token_versions=np.where(mask, 1, -1).astype(np.int32),
            turn_index=np.zeros(len(ids), np.int32),
            temperatures=np.ones(len(ids), np.float32),
        )
        samples.append(TrainSample(sample=sample, advantages=np.where(mask, random.normal(), 0).astype(np.float32)))
    return TrainBatch(samples=tuple(samples), policy_version=1)


def trainer(path: Path, setting: Literal["off", "auto"], microbatch_tokens: int) -> PolicyTrainer:
    model = PolicyModel(path, device=torch.device("cpu"), share=setting == "auto")
    config = TrainerConfig(lr=LR, minibatches=1, shared_prefixes=setting, microbatch_tokens=microbatch_tokens)
    return PolicyTrainer(model, config, AlgorithmConfig(), total_steps=1)


def measure(path: Path, data: TrainBatch, repeats: int, *, microbatch_tokens: int = MICROBATCH_TOKENS) -> dict[str, float]:
    """Return the figures of one row."""
    both = {setting: trainer(path, setting, microbatch_tokens) for setting in SETTINGS}
    metrics = {setting: one.step(data).metrics for setting, one in both.items()}
    np.testing.assert_allclose(metrics["auto"]["grad_norm"], metrics["off"]["grad_norm"], rtol=1e-4)
    times: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    for _ in range(repeats):
        for setting, one in both.items():
            times[setting].append(cpu_seconds(lambda one=one: one.step(data)))
    off, auto = (metrics["off"]["computed_tokens"] / median(times[setting]) for setting in SETTINGS)
    memory = {setting: peak_mib(path, data, setting, microbatch_tokens) for setting in SETTINGS}
    return {
        "tokens": metrics["off"]["computed_tokens"],
        "shared_tokens": metrics["auto"]["shared_tokens"],
        "off_tokens_per_cpu_s": round(off),
        "auto_tokens_per_cpu_s": round(auto),
        "speedup": round(auto / off, 2),
        "ideal": round(metrics["off"]["computed_tokens"] / metrics["auto"]["computed_tokens"], 2),
        "off_peak_mib": round(memory["off"]),
        "auto_peak_mib": round(memory["auto"]),
    }


def peak_mib(path: Path, data: TrainBatch, setting: Literal["off", "auto"], microbatch_tokens: int) -> float:
    """Return the MiB that two steps take over the loaded model, in a process of their own."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_report_peak, args=(sending, path, data, setting, microbatch_tokens))
    process.start()
    peak: float = receiving.recv()
    process.join()
    return peak


def _report_peak(
    sending: Connection, path: Path, data: TrainBatch, setting: Literal["off", "auto"], microbatch_tokens: int
) -> None:
    torch.set_num_threads(1)
    one = trainer(path, setting, microbatch_tokens)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _peak_kib()
    one.step(data)
    one.step(data)
    sending.send((_peak_kib() - before) / 1024)


def _peak_kib() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    rows: dict[str, dict[str, float]] = {}
    columns = (
        "tokens",
        "off_tokens_per_cpu_s",
        "auto_tokens_per_cpu_s",
        "speedup",
        "ideal",
        "off_peak_mib",
        "auto_peak_mib",
    )
    print(f"{'case':<18}" + "".join(f"{name:>23}" for name in columns))
    with tempfile.TemporaryDirectory() as folder:
        for case in MODELS:
            path = checkpoint(case, Path(folder))
            shapes = {f"group {part:.0%}": group(part, case.vocab) for part in (0.25, 0.5, 0.75, 0.9)}
            shapes |= {"forks": forks(case.vocab), "linear": group(0, case.vocab)}
            for name, sequences in shapes.items():
                row = measure(path, batch(sequences, case.vocab), arguments.repeats)
                rows[f"{case.name} {name}"] = row
                print(f"{case.name + ' ' + name:<18}" + "".join(f"{row[column]:>23g}" for column in columns), flush=True)
    machine = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    record = {"date": datetime.now(UTC).date().isoformat(), **machine, "threads": 1, "cases": rows}
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
