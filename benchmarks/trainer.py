"""Tokens per CPU-second of a whole training step, beside two hand-written steps and beside trainers of 1 and 2 processes.

Run: `python -m benchmarks.trainer` (about four minutes). It prints two tables and writes benchmarks/results/trainer.json.

  ours            PolicyTrainer.step: checks, packing, forward, loss with diagnostics, backward, clipping, AdamW
  one at a time   a loop over sequences without padding, logits at trained positions only, plain PPO loss, clipping, AdamW
  padded          all sequences in one right-padded batch with an attention mask, logits everywhere, the same loss

The three take turns, so that a busy machine disturbs them alike; a row shows medians. Before timing, the three gradient
norms are compared. Tokens are those of the samples, padding not counted.

In the second table, a trainer of one process and one of two (`trainer.parallel.dp`) take turns on the same batch. CPU time
is that of all processes of a trainer, and includes what the frames between driver and trainer take; wall time needs as many
free cores as there are processes.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import cast

import anyio
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.utils import logging

from agentrl.algo.config import AlgorithmConfig
from agentrl.trainer.base import TrainBatch, TrainSample
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.policy import PolicyTrainer
from agentrl.trainer.worker.client import RemoteTrainer, launch_trainer
from agentrl.types import Sample
from benchmarks.machine import cpu_seconds_of

RESULTS = Path(__file__).parent / "results" / "trainer.json"
TARGETS = {"against_one_at_a_time": 0.9, "against_padded": 2.0}
CAP, CLIP, LR = 5.0, 0.2, 1e-5
TRAINED_FRACTION = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model shape and the lengths of a batch."""

    name: str
    hidden: int
    layers: int
    vocab: int
    lengths: tuple[int, ...]
    positions: int = 4096


def lognormal(mean_log: float, sigma: float, total: int, longest: int) -> tuple[int, ...]:
    """Return lengths that add up to about `total`, many short and a few long, as multi-turn episodes are."""
    lengths = np.random.default_rng(0).lognormal(mean_log, sigma, 10_000).astype(int).clip(16, longest)
    return tuple(lengths[lengths.cumsum() <= total].tolist())


def cases() -> list[Case]:
    """Return the demo's batch, 10k tokens with a wide spread of lengths on two model sizes, and a large vocabulary."""
    spread = lognormal(5.3, 1.0, 10_000, 3000)
    demo = tuple(np.random.default_rng(1).integers(60, 150, 128).tolist())
    return [
        Case(name="0.1M demo batch", hidden=64, layers=2, vocab=373, lengths=demo),
        Case(name="0.1M 10k spread", hidden=64, layers=2, vocab=373, lengths=spread),
        Case(name="1.4M 10k spread", hidden=128, layers=4, vocab=4096, lengths=spread),
        Case(name="4.9M 32k words", hidden=128, layers=4, vocab=32_768, lengths=demo[:32]),
    ]


def checkpoint(case: Case, folder: Path) -> Path:
    """Write a random model of the case's shape and return its directory."""
    config = Qwen3Config(
        hidden_size=case.hidden,
        intermediate_size=2 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 16,
        num_key_value_heads=case.hidden // 16,
        head_dim=16,
        vocab_size=case.vocab,
        tie_word_embeddings=True,
        max_position_embeddings=case.positions,
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    path = folder / case.name.replace(" ", "-")
    model.save_pretrained(path)
    return path


def batch(case: Case) -> TrainBatch:
    """Return random samples of the case's lengths, trained in stretches of about 20 tokens."""
    random = np.random.default_rng(0)
    samples: list[TrainSample] = []
    for length in case.lengths:
        mask = np.repeat(random.random(length // 20 + 1) < TRAINED_FRACTION, 20)[:length]
        mask[0], mask[1] = False, True
        behavior = np.where(mask, -np.log(case.vocab) + 0.1 * random.normal(size=length), 0)
        sample = Sample(
            token_ids=random.integers(0, case.vocab, length).astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=behavior.astype(np.float32),
            token_versions=np.where(mask, 1, -1).astype(np.int32),
            turn_index=np.zeros(length, np.int32),
            temperatures=np.ones(length, np.float32),
        )
        samples.append(TrainSample(sample=sample, advantages=np.where(mask, random.normal(), 0).astype(np.float32)))
    return TrainBatch(samples=tuple(samples), policy_version=1)


def objective(current: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    """Return the summed decoupled PPO loss of a first minibatch, without diagnostics."""
    weight = (current.detach() - behavior).exp()
    ratio = (current - current.detach()).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -(weight * (weight <= CAP) * torch.minimum(ratio * advantages, clipped * advantages)).sum()


class HandWritten:
    """A model and an optimizer for the two hand-written steps."""

    def __init__(self, path: Path, data: TrainBatch) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
        self.head = cast("torch.nn.Module", self.model.get_output_embeddings())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95), fused=True)
        self.samples = data.samples
        self.num_loss_tokens = sum(int(item.sample.loss_mask.sum()) for item in data.samples)

    def one_at_a_time(self) -> float:
        """Step on one sequence after the other; return the gradient norm."""
        for item in self.samples:
            ids = torch.from_numpy(item.sample.token_ids).long()
            at = torch.from_numpy(np.flatnonzero(item.sample.loss_mask))
            hidden = self.model.base_model(input_ids=ids[None, :-1], use_cache=False).last_hidden_state[0, at - 1]
            logits = self.head(hidden)
            current = -torch.nn.functional.cross_entropy(logits, ids[at], reduction="none")
            behavior = torch.from_numpy(item.sample.behavior_logprobs)[at]
            loss = objective(current, behavior, torch.from_numpy(item.advantages)[at])
            (loss / self.num_loss_tokens).backward()
        return self._finish()

    def padded(self) -> float:
        """Step on one padded batch; return the gradient norm."""
        rows = [torch.from_numpy(item.sample.token_ids).long() for item in self.samples]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        mask, behavior, advantages = (
            torch.nn.utils.rnn.pad_sequence([torch.from_numpy(array) for array in arrays], batch_first=True)[:, 1:]
            for arrays in (
                [item.sample.loss_mask for item in self.samples],
                [item.sample.behavior_logprobs for item in self.samples],
                [item.advantages for item in self.samples],
            )
        )
        logits = self.model(input_ids=ids, attention_mask=real, use_cache=False).logits[:, :-1]
        current = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = objective(torch.where(mask, current, 0.0), behavior, advantages)
        (loss / self.num_loss_tokens).backward()
        return self._finish()

    def _finish(self) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU time of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(case: Case, repeats: int, folder: Path) -> dict[str, float]:
    """Return tokens per CPU-second of the three, and the two ratios."""
    path, data = checkpoint(case, folder), batch(case)
    trainer = PolicyTrainer(
        PolicyModel(path, device=torch.device("cpu")), TrainerConfig(lr=LR, minibatches=1), AlgorithmConfig(), total_steps=1
    )
    others = HandWritten(path, data), HandWritten(path, data)
    norms = [trainer.step(data).metrics["grad_norm"], others[0].one_at_a_time(), others[1].padded()]
    np.testing.assert_allclose(norms, norms[0], rtol=1e-3)
    calls: list[Callable[[], object]] = [lambda: trainer.step(data), others[0].one_at_a_time, others[1].padded]
    rounds = [[cpu_seconds(call) for call in calls] for _ in range(repeats)]
    tokens = sum(case.lengths)
    ours, one, padded = (tokens / median(times) for times in zip(*rounds, strict=True))
    return {
        "samples": len(case.lengths),
        "tokens": tokens,
        "longest": max(case.lengths),
        "loss_tokens": others[0].num_loss_tokens,
        "ours_tokens_per_cpu_s": round(ours),
        "one_at_a_time_tokens_per_cpu_s": round(one),
        "padded_tokens_per_cpu_s": round(padded),
        "against_one_at_a_time": round(ours / one, 3),
        "against_padded": round(ours / padded, 2),
    }


WORLDS = (1, 2)


async def measure_ranks(case: Case, repeats: int, folder: Path) -> dict[str, float]:
    """Return tokens per CPU-second and per second of a trainer of one process and of one of two."""
    path, data = checkpoint(case, folder), batch(case)
    cpu: dict[int, list[float]] = {world: [] for world in WORLDS}
    wall: dict[int, list[float]] = {world: [] for world in WORLDS}
    norms: list[float] = []
    async with AsyncExitStack() as stack:
        trainers = {world: await stack.enter_async_context(_ranks(world, path, folder)) for world in WORLDS}
        for number in range(repeats + 1):
            for world, trainer in trainers.items():
                used, began = cpu_seconds_of(trainer.pids), time.perf_counter()
                report = await trainer.step(data)
                if number:  # the first step allocates
                    cpu[world].append(cpu_seconds_of(trainer.pids) - used)
                    wall[world].append(time.perf_counter() - began)
                else:
                    norms.append(report.metrics["grad_norm"])
    np.testing.assert_allclose(norms, norms[0], rtol=1e-5)
    tokens = sum(case.lengths)
    row: dict[str, float] = {"tokens": tokens}
    for world in WORLDS:
        row[f"tokens_per_cpu_s_{world}"] = round(tokens / median(cpu[world]))
        row[f"tokens_per_s_{world}"] = round(tokens / median(wall[world]))
    return row


def _ranks(world: int, path: Path, folder: Path) -> AbstractAsyncContextManager[RemoteTrainer]:
    config = TrainerConfig.model_validate({"lr": LR, "minibatches": 1, "device": "cpu", "parallel": {"dp": world}})
    log = folder / f"{path.name}-{world}.log"
    return launch_trainer(config, AlgorithmConfig(), model_path=path, total_steps=100, seed=0, log_path=log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        rows = {case.name: measure(case, arguments.repeats, Path(folder)) for case in cases()}
        ranks = {case.name: anyio.run(measure_ranks, case, arguments.repeats, Path(folder)) for case in cases()[1:]}
    print(f"tokens per CPU-second of a whole step, {arguments.threads} thread(s); targets {TARGETS}")
    print(f"{'case':<18}{'ours':>9}{'one at a time':>15}{'padded':>9}{'vs one':>9}{'vs padded':>11}")
    for name, row in rows.items():
        print(
            f"{name:<18}{row['ours_tokens_per_cpu_s']:>9}{row['one_at_a_time_tokens_per_cpu_s']:>15}"
            f"{row['padded_tokens_per_cpu_s']:>9}{row['against_one_at_a_time']:>9}{row['against_padded']:>11}"
        )
    print("tokens per CPU-second of all processes, and per second, of a trainer of 1 and of 2 processes with a thread each")
    print(f"{'case':<18}{'CPU, 1':>9}{'CPU, 2':>9}{'wall, 1':>9}{'wall, 2':>9}")
    for name, row in ranks.items():
        figures = [row[f"tokens_per_{unit}_{world}"] for unit in ("cpu_s", "s") for world in WORLDS]
        print(f"{name:<18}" + "".join(f"{figure:>9.0f}" for figure in figures))
    machine = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    record = {"date": datetime.now(UTC).date().isoformat(), **machine, "threads": arguments.threads}
    arguments.output.write_text(json.dumps({**record, "targets": TARGETS, "cases": rows, "ranks": ranks}, indent=2) + "\n")


if __name__ == "__main__":
    main()
