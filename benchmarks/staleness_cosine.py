"""The direction of old data on the smallest demo: which tokens of old batches point against the exact gradient.

Run: `python -m benchmarks.staleness_cosine` (`--seeds 1` alone takes half of the time). It prints a table in Markdown and
writes benchmarks/results/staleness_cosine.json.

Decoupled PPO trains the demo with `max_staleness: 8` at the rate 4e-4, 24 steps. At some versions this file takes the three
batches that come next, which older policies sampled, and computes their gradient under the present weights: of all trained
tokens, and of some. The exact gradient is that of 256 fresh episodes. Both are sums over tokens of A w grad log pi; w is
current / behavior, 0 above 5, and 1 for fresh episodes. A column is the cosine of the angle between the two.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import anyio
import torch
from torch import Tensor

from agentrl.algo.loss_batch import LossBatch, importance_ratio
from agentrl.algo.packing import DealtPass
from agentrl.config import RunConfig
from agentrl.support.files import write_json
from agentrl.trainer.base import StepReport, TrainBatch
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.passes import forward_pass, loss_totals
from agentrl.weights.disk import publish
from benchmarks.machine import describe_machine
from benchmarks.one_process import TrainerHere, smoke_run, train_here
from benchmarks.staleness_demo import PATIENCE_S, make_warm_start

RESULTS = Path(__file__).parent / "results" / "staleness_cosine.json"
LAG, RATE, STEPS, FALL, CAP = 8, 4e-4, 24, 0.2, 5.0
VERSIONS = (4, 8, 12, 16, 18, 20)
OLD_BATCHES, FRESH_GROUPS, MEMBERS, TOGETHER = 3, 32, 8, 16


def everything(batch: LossBatch, fall: Tensor) -> Tensor:
    return torch.ones_like(fall, dtype=torch.bool)


COLUMNS: Mapping[str, Callable[[LossBatch, Tensor], Tensor]] = {
    "all": everything,
    "A > 0": lambda batch, fall: batch.advantages > 0,
    "A < 0": lambda batch, fall: batch.advantages < 0,
    "A < 0, fell by more than 0.2": lambda batch, fall: (batch.advantages < 0) & (fall > FALL),
    "all but those": lambda batch, fall: (batch.advantages >= 0) | (fall <= FALL),
}


@dataclass(frozen=True, slots=True)
class Arrived:
    """A batch, and the weights before its step."""

    batch: TrainBatch
    weights: Mapping[str, Tensor]


class Recorder(TrainerHere):
    """Keeps every batch with the weights that it met."""

    def __init__(self, run: RunConfig) -> None:
        super().__init__(run)
        self.arrived: list[Arrived] = []

    async def step(self, batch: TrainBatch) -> StepReport:
        weights = {name: each.detach().clone() for name, each in self.model.parameters.items()}
        self.arrived.append(Arrived(batch, weights))
        return await super().step(batch)


def gradients(model: PolicyModel, batches: Sequence[TrainBatch], *, corrected: bool) -> dict[str, Tensor]:
    """Return, for each column, the gradient of the sum over tokens of A w log pi, flat; without `corrected`, w is 1."""
    parameters = list(model.parameters.values())
    sums = {name: torch.zeros(sum(each.numel() for each in parameters)) for name in COLUMNS}
    for batch in batches:
        places = [at for at, item in enumerate(batch.samples) if item.sample.loss_mask.any()]
        lengths = [len(batch.samples[at].sample.token_ids) for at in places]
        totals = loss_totals(batch, places)
        for first in range(0, len(places), TOGETHER):
            chosen = list(range(first, min(first + TOGETHER, len(places))))
            dealt = DealtPass(samples=chosen, is_filler=False)
            each = forward_pass(model, batch, places, lengths, dealt, totals, entropy=False)
            loss_batch = each.loss_batch(model.outputs(each.batch))
            current = loss_batch.current_logprobs
            fall = loss_batch.behavior_logprobs.exp() - current.detach().exp()
            weight = importance_ratio(current.detach(), loss_batch.behavior_logprobs)
            weight = weight.masked_fill(weight > CAP, 0.0) if corrected else torch.ones_like(weight)
            for name, keep in COLUMNS.items():
                objective = (loss_batch.advantages * weight * keep(loss_batch, fall) * current).sum()
                parts = torch.autograd.grad(objective, parameters, retain_graph=True)
                sums[name] += torch.cat([part.flatten() for part in parts])
    return sums


def settings(seed: int, steps: int, rate: float) -> dict[str, object]:
    """Return the fields of a run of the demo as the staleness benchmark has them."""
    return {
        "seed": seed,
        "tasks.factory_args.seed": seed,
        "trainer.lr": rate,
        "trainer.schedule": "constant",
        "trainer.minibatches": 4,
        "engine.steps": steps,
        "engine.save_trajectories": "false",
        "engine.stall_timeout_s": 2 * PATIENCE_S,
        "rollout.max_concurrent_episodes": 64,
        "rollout.episode_timeout_s": PATIENCE_S,
    }


def record(student: Path, algorithm: Mapping[str, object], flags: Mapping[str, object]) -> Recorder:
    """Train the demo, and return its trainer with what arrived."""
    with tempfile.TemporaryDirectory() as folder:
        run = smoke_run(student, Path(folder), algorithm, flags)
        trainer, _ = anyio.run(lambda: train_here(run, trainer=Recorder(run)))
    assert isinstance(trainer, Recorder)
    return trainer


def fresh_batch(run: Recorder, student: Path, seed: int, version: int) -> TrainBatch:
    """Return 256 episodes that the weights before the step after `version` others sample."""
    load(run.model, run.arrived[version].weights)
    with tempfile.TemporaryDirectory() as folder:
        published = publish(run.model.export(), version=1, directory=Path(folder), source=student)
        algorithm = {"group_size": MEMBERS, "groups_per_step": FRESH_GROUPS, "max_staleness": 0, "keep": "all"}
        return record(Path(published.path), algorithm, settings(1000 * seed + version, 1, 1e-12)).arrived[0].batch


def load(model: PolicyModel, weights: Mapping[str, Tensor]) -> None:
    """Put `weights` into `model`."""
    with torch.no_grad():
        for name, parameter in model.parameters.items():
            parameter.copy_(weights[name])


def rows_of(seed: int, students: Path) -> list[dict[str, float]]:
    """Return a row for each version: the cosine of each column with the exact gradient, and how exact that one is."""
    student = make_warm_start(students, seed)
    algorithm = {"group_size": MEMBERS, "groups_per_step": 6, "max_staleness": LAG}
    run = record(student, algorithm, settings(seed, STEPS, RATE))
    rows: list[dict[str, float]] = []
    for version in VERSIONS:
        fresh = fresh_batch(run, student, seed, version)
        load(run.model, run.arrived[version].weights)
        halves = [gradients(run.model, [half], corrected=False)["all"] for half in halved(fresh)]
        exact = halves[0] + halves[1]
        old = gradients(run.model, [each.batch for each in run.arrived[version : version + OLD_BATCHES]], corrected=True)
        row = {"seed": float(seed), "version": float(version)}
        row |= {name: cosine(gradient, exact) for name, gradient in old.items()}
        row["exact: half against half"] = cosine(*halves)
        rows.append(row)
        print(line(row), flush=True)
    return rows


def halved(batch: TrainBatch) -> list[TrainBatch]:
    """Return the batch in two halves of whole groups."""
    groups = sorted({item.group for item in batch.samples})
    first = set(groups[: len(groups) // 2])
    parts = [tuple(item for item in batch.samples if (item.group in first) == half) for half in (True, False)]
    return [TrainBatch(samples=part, policy_version=batch.policy_version) for part in parts]


def cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine of the angle between two flat gradients; 0 if one is 0."""
    return float(torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=0))


def line(row: Mapping[str, float]) -> str:
    """Return a row of the table in Markdown."""
    head = f"| {row['seed']:g} | {row['version']:g} | "
    return head + " | ".join(f"{value:+.2f}" for name, value in row.items() if name not in ("seed", "version")) + " |"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1))
    parser.add_argument("--students", type=Path, default=Path("runs/staleness"), help="folder for warm starts of the demo")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| seed | version | " + " | ".join([*COLUMNS, "exact: half against half"]) + " |")
    print("|---" * (len(COLUMNS) + 3) + "|")
    rows = [row for seed in arguments.seeds for row in rows_of(seed, arguments.students)]
    write_json(arguments.output, {"machine": describe_machine("torch"), "rows": rows})


if __name__ == "__main__":
    main()
