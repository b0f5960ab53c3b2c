"""Wall-clock time of GAE over packed tokens, beside a loop over time in the same run.

Run: `python -m benchmarks.gae` (about ten seconds). It prints a table and writes benchmarks/results/gae.json.

  packed          agentrl.algo.gae on [T] float32, boundaries of any length
  padded loop     the usual form: sequences padded to [B, longest], a Python loop over time with one tensor operation a term
  error           largest difference to the recurrence in float64, relative to max(1, |A|)
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from agentrl.algo.gae import gae

RESULTS = Path(__file__).parent / "results" / "gae.json"
TOKENS = 147_456
TARGET_MS = 9.0
DISCOUNT, LAM = 0.99, 0.95


def cases() -> dict[str, list[int]]:
    """Return lengths of sequences, about `TOKENS` in all, by name."""
    rng = np.random.default_rng(0)
    varied = rng.lognormal(6.0, 0.9, size=400).astype(int).clip(8, 4096)
    varied = varied[varied.cumsum() <= TOKENS]
    return {
        "36 of 4096": [4096] * 36,
        "128 of 1152": [1152] * 128,
        f"{len(varied)} varied": [*varied.tolist(), TOKENS - int(varied.sum())],
        "1 of 147456": [TOKENS],
        "18432 of 8": [8] * 18_432,
    }


def padded_loop(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return the advantages of right-padded sequences [B, L], last token first."""
    following, advantage = torch.zeros(len(rewards)), torch.zeros(len(rewards))
    reversed_columns: list[Tensor] = []
    for t in range(rewards.shape[1] - 1, -1, -1):
        here = mask[:, t]
        delta = rewards[:, t] + DISCOUNT * following - values[:, t]
        advantage = torch.where(here, delta + DISCOUNT * LAM * advantage, 0.0)
        following = torch.where(here, values[:, t], 0.0)
        reversed_columns.append(advantage)
    return torch.stack(reversed_columns[::-1], dim=1)


def recurrence(rewards: Sequence[float], values: Sequence[float], lengths: Sequence[int]) -> Tensor:
    """Return the advantages by the definition, in Python floats."""
    result = [0.0] * len(rewards)
    end = len(rewards)
    for length in reversed(lengths):
        following = advantage = 0.0
        for t in range(end - 1, end - length - 1, -1):
            advantage = rewards[t] + DISCOUNT * following - values[t] + DISCOUNT * LAM * advantage
            following = values[t]
            result[t] = advantage
        end -= length
    return torch.tensor(result, dtype=torch.float64)


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median wall-clock time of `call` after one warm-up."""
    call()
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


def measure(lengths: Sequence[int], repeats: int) -> dict[str, float]:
    """Return times in ms and the error for one case."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, sum(lengths), generator=generator)
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    padded_rewards, padded_values = torch.zeros(mask.shape), torch.zeros(mask.shape)
    padded_rewards[mask], padded_values[mask] = rewards, values
    advantages = gae(rewards, values, boundaries, DISCOUNT, LAM).advantages
    exact = recurrence(rewards.tolist(), values.tolist(), lengths)
    torch.testing.assert_close(padded_loop(padded_rewards, padded_values, mask)[mask], advantages, rtol=1e-4, atol=1e-4)
    packed_ms = milliseconds(lambda: gae(rewards, values, boundaries, DISCOUNT, LAM), repeats)
    loop_ms = milliseconds(lambda: padded_loop(padded_rewards, padded_values, mask), 1 if max(lengths) > 10_000 else 3)
    return {
        "packed_ms": round(packed_ms, 3),
        "padded_loop_ms": round(loop_ms, 1),
        "speedup": round(loop_ms / packed_ms, 1),
        "error": float(((advantages - exact).abs() / exact.abs().clamp(min=1.0)).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = {name: measure(lengths, arguments.repeats) for name, lengths in cases().items()}
    print(f"{TOKENS} tokens, {arguments.threads} thread(s); target {TARGET_MS} ms, error 1e-6")
    print(f"{'sequences':<16}{'packed ms':>11}{'padded loop ms':>16}{'speed-up':>10}{'error':>11}")
    for name, row in rows.items():
        print(f"{name:<16}{row['packed_ms']:>11}{row['padded_loop_ms']:>16}{row['speedup']:>10}{row['error']:>11.1e}")
    machine = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    record = {"date": datetime.now(UTC).date().isoformat(), **machine, "threads": arguments.threads, "tokens": TOKENS}
    arguments.output.write_text(json.dumps({**record, "target_ms": TARGET_MS, "cases": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
