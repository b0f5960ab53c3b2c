"""Whether recorded log-probs survive weight updates in the middle of episodes: exact and fast mode, both servers.

Run: `python -m benchmarks.version_exactness` (about ten minutes on two idle cores; needs the environment that `make sglang`
builds). `--quick` takes a minute and the embedded server alone; `--backends embedded` leaves SGLang out. It prints a line
for each case and writes benchmarks/results/version_exactness.json (`--quick` writes nothing).

Each case runs multi-turn episodes of a tiny random Qwen3, 16 at once and some calls in parallel, through the client, the
pool and HTTP, and replaces the weights again and again while they run. Every sampled token is then judged by Hugging Face's
float32 forward pass on the CPU under the version it was recorded with, and, to see what a wrong label would look like, under
the version before. The run is the one the conformance suite asserts (tests/support/version_run.py).

  exact, unrelated   `pause_mode: exact`; versions are about as far apart as separate models; from disk and distributed
  fast, unrelated    `pause_mode: fast`, the same versions: an upper bound of the error that mode records
  exact, small       versions apart by a thousandth of what the weights spread, as after one step of training
  fast, small        the error fast mode records for such steps
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import anyio
import numpy as np
import torch

from benchmarks.machine import describe_machine
from tests.support.interruption import Plan
from tests.support.judge import POWER, TOLERANCE
from tests.support.servers import Launched, RunningServer, reset, running_server, tiny_checkpoints
from tests.support.version_run import Outcome, version_run
from tests.support.versions import SMALL_STEP, UNRELATED

RESULTS = Path(__file__).parent / "results" / "version_exactness.json"


class Case(NamedTuple):
    """One run."""

    pause: Literal["exact", "fast"]
    steps: Literal["unrelated", "small"]
    updates: int
    sync: Literal["disk", "distributed"] = "disk"


CASES = (
    Case("exact", "unrelated", 212),
    Case("exact", "unrelated", 60, "distributed"),
    Case("fast", "unrelated", 60),
    Case("exact", "small", 60),
    Case("fast", "small", 60),
)
QUICK = (Case("exact", "unrelated", 12), Case("fast", "unrelated", 12))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=("embedded", "sglang"), default=["embedded", "sglang"])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    backends: list[Launched] = ["embedded"] if options.quick else options.backends
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        for backend in backends:
            rows += run_backend(backend, QUICK if options.quick else CASES, Path(folder) / backend)
            if not options.quick:
                write(rows, backends)


def write(rows: list[dict[str, Any]], backends: Sequence[str]) -> None:
    """Write what has been measured so far."""
    report = {
        "what": "recorded log-probs against a float32 recompute under the recorded version, nats",
        "machine": describe_machine("torch", "transformers", "numpy", sglang="sglang" in backends),
        "tolerance": TOLERANCE,
        "power_threshold": POWER,
        "cases": rows,
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {RESULTS}")


def run_backend(backend: Launched, cases: tuple[Case, ...], folder: Path) -> list[dict[str, Any]]:
    """Start a server and return the rows of all cases on it."""
    folder.mkdir()
    checkpoints = tiny_checkpoints(folder / "checkpoints", count=1)
    with running_server(backend, checkpoints, folder) as server:
        return [run_case(server, case, folder / f"case-{number}") for number, case in enumerate(cases)]


def run_case(server: RunningServer, case: Case, folder: Path) -> dict[str, Any]:
    """Return the row of one case."""
    folder.mkdir()
    reset(server)
    scale = UNRELATED if case.steps == "unrelated" else SMALL_STEP
    run = partial(
        version_run,
        server.url,
        server.kind,
        server.checkpoints[0],
        Plan(updates=case.updates, deadline_s=1800.0),
        folder=folder,
        pause=case.pause,
        scale=scale,
        sync=case.sync,
    )
    begin = time.perf_counter()
    outcome = anyio.run(run)
    row = {
        "backend": server.kind,
        "pause_mode": case.pause,
        "steps": case.steps,
        "sync": case.sync,
        "wall_s": time.perf_counter() - begin,
        **measures(outcome),
    }
    print(
        f"{server.kind:9}{case.pause:6}{case.steps:10}{case.sync:12} {row['interruptions']:4d} interruptions "
        f"{row['tokens']:7d} tokens  max {row['max_difference']:.1e}  mean {row['mean_difference']:.1e}  "
        f"over 1e-5: {row['tokens_over_tolerance']}"
    )
    return row


def measures(outcome: Outcome) -> dict[str, Any]:
    """Return what a run says about exactness and about itself."""
    judged, trajectories = outcome.judged, outcome.run.trajectories
    difference, cut = judged.difference, judged.interrupted
    gap = np.abs(judged.neighbour - judged.recomputed)
    return {
        "updates": len(outcome.run.updates),
        "interruptions": outcome.interruptions,
        "episodes": len(trajectories),
        "turns": sum(len(trajectory.turns) for trajectory in trajectories),
        "turns_of_several_versions": outcome.split_turns,
        "retractions": sum(one.num_retractions for one in outcome.served),
        "calls_in_flight_at_an_update_mean": float(np.mean(outcome.run.in_flight)),
        "tokens": len(difference),
        "tokens_after_an_update_in_their_call": int(cut.sum()),
        "max_difference": float(difference.max()),
        "mean_difference": float(difference.mean()),
        "max_difference_after_an_update": float(difference[cut].max()),
        "mean_difference_after_an_update": float(difference[cut].mean()),
        "tokens_over_tolerance": int((difference > TOLERANCE).sum()),
        "tokens_over_tolerance_in_calls_of_one_version": int((difference[~cut] > TOLERANCE).sum()),
        "tokens_that_fit_the_version_before_instead": int(judged.mislabelled.sum()),
        "neighbour_mean_difference": float(gap.mean()),
        "neighbour_share_over_power_threshold": judged.power,
        "max_probe_difference": max(one.probe_difference or 0.0 for one in outcome.run.updates),
        "pause_s_median": float(np.median([one.pause_s for one in outcome.run.updates])),
    }


if __name__ == "__main__":
    main()
