"""What stale data do to eleven losses: on small policies, and on the smallest demo with a real model.

Run: `python -m benchmarks.staleness` (`--tiers table` about ten minutes of one core, the demo tier 20 CPU seconds a
run). It prints its progress and tables, and writes benchmarks/results/staleness.json, from which
`python -m docs.figures.staleness` draws. What this file has is not measured again; `--again` measures all.

The second tier is `benchmarks.staleness_demo`. In the first one, all seeds, lags and learning rates are one tensor. The
task: 8 tokens in two turns, of 8 kinds each. A state is one of 4 tasks, the place and the last token; 3 of the 8 tokens
are good in each, and an episode succeeds (reward 1) with at least 6 good ones. The policy `table` has logits for each state;
`shared` adds a table by task and place to one by place and last token, so that what is learned in a state moves others. A
step trains 4 groups of 8 episodes that the policy of `lag` steps ago sampled; advantage `episode`, Adam, gradients clipped
to norm 1, as in a run.
Success is exact: a sum over all episodes. The losses and corrections are those of agentrl.

  naive       PPO around the policy that sampled (`correction: {proximal: behavior}`)
  decoupled   PPO around the policy before the step, w with a cap of 5 (the default of a run)
  none        the same without w
  tis         the same with w cut at 2
  dppo_tv     the loss `dppo_tv`
  guard       decoupled, and the learning rate times sqrt(effective sample size / episodes), over weights of episodes (VCPO)
  anchored    the loss `anchored`: decoupled, but a token with A < 0 falls by 0.2 since it was sampled, and no further
  plateau     anchored, where a negative advantage counts in full up to a fall of 0.1
  by_age      anchored, with an allowed fall of 0.05 (1 + age), at most 0.2
  dppo_falls  `dppo_tv` with its bound on falls alone
  topr        the loss `topr`: no w where A > 0, else min(w, 1)
  anchored_guard   anchored with the guard

`python -m benchmarks.staleness_regret` compares the arms: regret to the best one of each cell, and alarms before a fall.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from agentrl.algo.corrections import CapOptions, behavior, clamp, forward, mask, none
from agentrl.algo.guard import learning_rate_factor
from agentrl.algo.loss_batch import LossBatch, LossTotals, TokenLoss, Weights
from agentrl.algo.losses import AnchoredOptions, DppoTvOptions, PpoOptions, anchored, dppo_tv, ppo, topr
from agentrl.algo.slots import NoOptions
from agentrl.support.files import write_json
from benchmarks.machine import describe_machine
from benchmarks.staleness_demo import DEMO_ARMS, DEMO_RATES, DemoRow, demo_cells, demo_table, measured

RESULTS = Path(__file__).parent / "results" / "staleness.json"
TASKS, LENGTH, TOKENS, GOOD, NEEDED = 4, 8, 8, 3, 6
TURN_LENGTH, MEMBERS = 4, 8
EPISODES = TASKS * MEMBERS
LAGS, RATES, MINIBATCHES = (0, 2, 4, 8, 16), (0.1, 0.5), (1, 4)
POLICIES = ("table", "shared")
EVALUATE_EVERY = 5


@dataclass(frozen=True, slots=True)
class Arm:
    """A loss with its correction, as the run file would name them."""

    loss: Callable[[LossBatch], TokenLoss]
    correction: Callable[[LossBatch], Weights]
    proximal: Callable[[LossBatch], Tensor] = forward
    guarded: bool = False


def clipped(batch: LossBatch) -> TokenLoss:
    return ppo(batch, PpoOptions())


def uncorrected(batch: LossBatch) -> Weights:
    return none(batch, NoOptions())


def anchoring(*, guarded: bool = False, **options: float | bool) -> Arm:
    given = AnchoredOptions.model_validate(options)
    return Arm(lambda batch: anchored(batch, given), lambda batch: mask(batch, CapOptions(cap=5.0)), guarded=guarded)


ARMS = {
    "naive": Arm(clipped, uncorrected, proximal=behavior),
    "decoupled": Arm(clipped, lambda batch: mask(batch, CapOptions(cap=5.0))),
    "none": Arm(clipped, uncorrected),
    "tis": Arm(clipped, lambda batch: clamp(batch, CapOptions(cap=2.0))),
    "dppo_tv": Arm(lambda batch: dppo_tv(batch, DppoTvOptions()), uncorrected),
    "guard": Arm(clipped, lambda batch: mask(batch, CapOptions(cap=5.0)), guarded=True),
    "anchored": anchoring(),
    "plateau": anchoring(plateau=True),
    "by_age": anchoring(low_per_version=0.05),
    "dppo_falls": Arm(lambda batch: dppo_tv(batch, DppoTvOptions(high=1.0)), uncorrected),
    "topr": Arm(lambda batch: topr(batch, NoOptions()), uncorrected),
    "anchored_guard": anchoring(guarded=True),
}


@dataclass(frozen=True, slots=True)
class Replicas:
    """The settings of R runs, [R] each: every lag and learning rate with every seed."""

    lag: Tensor
    rate: Tensor
    seed: Tensor
    good: Tensor
    """[R, TASKS, LENGTH, TOKENS (last), TOKENS] bool, the same for one seed."""


def replicas(lags: Sequence[int], seeds: int) -> Replicas:
    """Return all `lags` and rates with `seeds` seeds."""
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(seeds, TASKS, LENGTH, TOKENS, TOKENS, generator=generator).argsort(-1)
    grid = torch.cartesian_prod(torch.tensor(lags), torch.arange(len(RATES)), torch.arange(seeds))
    return Replicas(grid[:, 0], torch.tensor(RATES)[grid[:, 1]], grid[:, 2], (order < GOOD)[grid[:, 2]])


def success(logits: Tensor, good: Tensor) -> Tensor:
    """Return the exact chance of a success, [R], mean over tasks."""
    chances = logits.softmax(-1)
    reached = logits.new_zeros(*logits.shape[:2], TOKENS, LENGTH + 1)
    reached[:, :, 0, 0] = 1.0
    for place in range(LENGTH):
        step = torch.einsum("rtlg,rtlk->rtlkg", reached, chances[:, :, place])
        right = good[:, :, place, :, :, None]
        moved = torch.where(right, step.roll(1, -1), step)
        reached = moved.sum(2)
    return reached[..., NEEDED:].sum((-1, -2)).mean(1)


def play(logits: Tensor, good: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states, [R, EPISODES, LENGTH, 3] (task, last token, token), and the rewards, [R, EPISODES]."""
    count = len(logits)
    rows = torch.arange(count)[:, None]
    task = torch.arange(TASKS).repeat_interleave(MEMBERS).expand(count, -1)
    last = torch.zeros(count, EPISODES, dtype=torch.long)
    steps: list[Tensor] = []
    right = torch.zeros(count, EPISODES)
    for place in range(LENGTH):
        token = (logits[rows, task, place, last] + noise[:, :, place]).argmax(-1)
        right += good[rows, task, place, last, token]
        steps.append(torch.stack([task, last, token], -1))
        last = token
    return torch.stack(steps, 2), (right >= NEEDED).float()


def logprobs(logits: Tensor, states: Tensor) -> Tensor:
    """Return the log-probs, [R, E, LENGTH], of the tokens in `states`."""
    rows = torch.arange(len(logits))[:, None, None]
    places = torch.arange(LENGTH)
    task, last, token = states.unbind(-1)
    return logits.log_softmax(-1)[rows, task, places, last, token]


def loss_of(arm: Arm, current: Tensor, proximal: Tensor, mu: Tensor, advantages: Tensor, lag: Tensor) -> Tensor:
    """Return the sum over replicas of the token mean of the loss; all are [R, E, LENGTH] but `lag`, [R]."""
    episodes = current.shape[1]
    token = torch.arange(current.numel())
    sample = token // LENGTH
    batch = LossBatch(
        current_logprobs=current.reshape(-1),
        proximal_logprobs=proximal.reshape(-1),
        behavior_logprobs=mu.reshape(-1),
        advantages=advantages.reshape(-1),
        ages=lag[:, None, None].expand_as(current).reshape(-1),
        turn=token // TURN_LENGTH,
        sample=sample,
        group=sample // MEMBERS,
        role=torch.zeros_like(sample),
        player=torch.zeros_like(sample),
        rewards=advantages.reshape(-1),
        totals=LossTotals(tokens=episodes * LENGTH, turns=episodes * LENGTH // TURN_LENGTH, samples=episodes),
    )
    batch = replace(batch, proximal_logprobs=arm.proximal(batch))
    weights = arm.correction(batch)
    return (arm.loss(batch).loss * weights.weight * weights.keep).sum() / batch.totals.tokens


class Adam:
    """Adam with a learning rate for each replica, and the gradient of each clipped to norm 1."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._first = [torch.zeros_like(one) for one in parameters]
        self._second = [torch.zeros_like(one) for one in parameters]
        self._steps = 0

    def step(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], rate: Tensor) -> list[Tensor]:
        """Return the parameters after a step."""
        self._steps += 1
        norm = torch.cat([one.flatten(1) for one in gradients], 1).norm(dim=1).clamp(min=1.0)
        stepped: list[Tensor] = []
        for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            clipped_gradient = gradient / norm.view(-1, 1, 1, 1, 1)
            self._first[number] = 0.9 * self._first[number] + 0.1 * clipped_gradient
            self._second[number] = 0.999 * self._second[number] + 0.001 * clipped_gradient**2
            first = self._first[number] / (1 - 0.9**self._steps)
            second = self._second[number] / (1 - 0.999**self._steps)
            stepped.append(parameter - rate.view(-1, 1, 1, 1, 1) * first / (second.sqrt() + 1e-8))
        return stepped


def start(policy: str, count: int) -> list[Tensor]:
    """Return parameters of 0 whose sum is the logits, [count, TASKS, LENGTH, TOKENS (last), TOKENS]."""
    if policy == "table":
        return [torch.zeros(count, TASKS, LENGTH, TOKENS, TOKENS)]
    return [torch.zeros(count, TASKS, LENGTH, 1, TOKENS), torch.zeros(count, 1, LENGTH, TOKENS, TOKENS)]


def train(arm: Arm, runs: Replicas, policy: str, minibatches: int, steps: int) -> tuple[Tensor, Tensor]:
    """Return the success at each evaluation, [evaluations, R], and the smallest ratio of effective samples, [R]."""
    generator = torch.Generator().manual_seed(2)
    seeds = int(runs.seed.max()) + 1
    parameters = start(policy, len(runs.seed))
    logits = sum(parameters, torch.zeros(()))
    history, optimizer = [logits], Adam(parameters)
    curve = [success(logits, runs.good)]
    smallest = torch.ones(len(logits))
    for number in range(steps):
        ages = torch.minimum(runs.lag, torch.tensor(len(history) - 1)).tolist()
        sampler = torch.stack([history[-1 - age][at] for at, age in enumerate(ages)])
        # Every arm, lag and rate of a seed draws the same numbers, so that differences between arms are paired.
        noise = torch.rand(seeds, EPISODES, LENGTH, TOKENS, generator=generator).clamp(1e-9, 1 - 1e-7)
        states, rewards = play(sampler, runs.good, -(-noise.log()).log()[runs.seed])
        by_group = rewards.view(-1, TASKS, MEMBERS)
        advantages = (by_group - by_group.mean(-1, keepdim=True)).flatten(1)[:, :, None].expand(-1, -1, LENGTH)
        mu, proximal = logprobs(sampler, states), logprobs(logits, states)
        ratio = effective(proximal - mu)
        smallest = torch.minimum(smallest, ratio)
        factors = [learning_rate_factor(min(one, 1.0)) for one in ratio.tolist()]
        rate = runs.rate * torch.tensor(factors) if arm.guarded else runs.rate
        parts = torch.randperm(EPISODES, generator=generator).chunk(minibatches)
        for part in parts:
            leaves = [one.requires_grad_() for one in parameters]
            current = logprobs(sum(leaves, torch.zeros(())), states[:, part])
            loss = loss_of(arm, current, proximal[:, part], mu[:, part], advantages[:, part], runs.lag)
            gradients = torch.autograd.grad(loss, leaves)
            parameters = optimizer.step([one.detach() for one in leaves], gradients, rate)
        logits = sum(parameters, torch.zeros(()))
        history = [*history, logits][-max(LAGS) - 1 :]
        if (number + 1) % EVALUATE_EVERY == 0:
            curve.append(success(logits, runs.good))
    return torch.stack(curve), smallest


def effective(log_weights: Tensor) -> Tensor:
    """Return (sum W)^2 / (E sum W^2) over episodes, [R]; `sequence_ess_ratio` for all replicas at once."""
    total = log_weights.sum(-1)
    weights = (total - total.amax(1, keepdim=True)).exp()
    return weights.sum(1) ** 2 / (weights.shape[1] * (weights**2).sum(1))


def collapsed_at(curve: Tensor) -> Tensor:
    """Return, for each replica, the step at which success fell below half of its best, itself above 0.2; else NaN."""
    best = curve.cummax(0).values
    fallen = (curve < best / 2) & (best > 0.2)
    first = fallen.float().argmax(0) * EVALUATE_EVERY
    return torch.where(fallen.any(0), first.float(), torch.nan)


def interval(values: Tensor) -> tuple[float, float]:
    """Return the mean of [n] `values` and half of its 95 % interval."""
    return float(values.mean()), float(1.96 * values.std() / math.sqrt(len(values)))


Row: TypeAlias = dict[str, float | str]


def measure(runs: Replicas, policy: str, minibatches: int, steps: int) -> list[Row]:
    """Return one row for each arm, lag and rate."""
    curves: dict[str, tuple[Tensor, Tensor]] = {}
    for name, arm in ARMS.items():
        started = time.perf_counter()
        curves[name] = train(arm, runs, policy, minibatches, steps)
        print(f"{policy}, {minibatches} minibatches, {name}: {time.perf_counter() - started:.0f} s", flush=True)
    rows: list[Row] = []
    for name, (curve, smallest) in curves.items():
        for lag, rate in itertools.product(runs.lag.unique().tolist(), RATES):
            at = (runs.lag == lag) & (runs.rate == torch.tensor(rate))
            final, uncorrected_final = curve[-1, at], curves["none"][0][-1, at]
            mean, half = interval(final)
            gain, gain_half = interval(final - uncorrected_final)
            fell = collapsed_at(curve[:, at])
            row: Row = {"policy": policy, "minibatches": minibatches, "arm": name, "lag": lag, "rate": rate}
            row |= {"success": mean, "half_interval": half, "over_none": gain, "over_none_half_interval": gain_half}
            row |= {"mean_success": float(curve[:, at].mean()), "smallest_ess": float(smallest[at].median())}
            row["collapsed"] = float((~fell.isnan()).float().mean())
            if not bool(fell.isnan().all()):
                row["steps_to_collapse"] = float(fell.nanmedian())
            rows.append(row)
    return rows


def show(rows: Sequence[Row]) -> str:
    """Return a table of the final success by arm and lag, for each policy, rate and number of minibatches."""
    lines: list[str] = []
    keys = ("policy", "minibatches", "rate")
    for policy, minibatches, rate in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        lags = sorted({int(row["lag"]) for row in rows if row["policy"] == policy})
        lines += ["", f"{policy}, {minibatches} minibatches, learning rate {rate}", ""]
        lines += ["| arm | " + " | ".join(f"lag {lag}" for lag in lags) + " |", "|---" * (len(lags) + 1) + "|"]
        for name in ARMS:
            key = {"policy": policy, "minibatches": minibatches, "rate": rate, "arm": name}
            cells = [f"{r['success']:.3f} ± {r['half_interval']:.3f}" for r in rows if key.items() <= r.items()]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


Results: TypeAlias = dict[str, Any]


def measure_tables(results: Results, arguments: argparse.Namespace, save: Callable[[], None]) -> None:
    """Measure the first tier: the policies and minibatches that `results` lacks."""
    about = {"seeds": arguments.seeds, "steps": arguments.steps, "lags": list(arguments.lags)}
    if any(results.get(name, value) != value for name, value in about.items()):
        results |= {"rows": []}
    results |= about
    rows: list[Row] = results.setdefault("rows", [])
    for policy, minibatches in itertools.product(arguments.policies, arguments.minibatches):
        here = [row for row in rows if (row["policy"], row["minibatches"]) == (policy, minibatches)]
        if not ARMS.keys() <= {row["arm"] for row in here}:
            # All arms again: they are compared on the same random numbers.
            rows[:] = [row for row in rows if row not in here]
            rows += measure(replicas(arguments.lags, arguments.seeds), policy, minibatches, arguments.steps)
            results["machine"] = describe_machine("torch")
            save()
    print(show(rows))


def measure_demo(results: Results, arguments: argparse.Namespace, save: Callable[[], None]) -> None:
    """Measure the second tier: the runs of the demo that `results` lacks."""
    demo: Results = results.setdefault("demo", {"rows": []})
    demo["machine"] = describe_machine("torch")

    def record(row: DemoRow) -> None:
        demo["rows"].append(row)
        save()

    rates, arms = arguments.demo_rates, arguments.demo_arms
    cells = demo_cells(
        arguments.demo_seeds, arguments.lags, arguments.demo_minibatches, arguments.demo_steps, rates=rates, arms=arms
    )
    measured(cells, arguments.students, arguments.processes, demo["rows"], record)
    print("\n".join(demo_table(demo["rows"])))


def main() -> None:
    """Measure what the result file lacks, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiers", nargs="+", choices=("table", "demo"), default=("table", "demo"))
    parser.add_argument("--again", action="store_true", help="measure what the result file already has, too")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--lags", nargs="+", type=int, choices=LAGS, default=LAGS)
    parser.add_argument("--minibatches", nargs="+", type=int, default=MINIBATCHES)
    parser.add_argument("--demo-seeds", nargs="+", type=int, default=(*range(5), *range(23, 28)))
    parser.add_argument("--demo-arms", nargs="+", choices=DEMO_ARMS, default=tuple(DEMO_ARMS))
    parser.add_argument("--demo-rates", nargs="+", type=float, default=DEMO_RATES)
    parser.add_argument("--demo-steps", type=int, default=24)
    parser.add_argument("--demo-minibatches", nargs="+", type=int, default=(4, 1))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="of the demo tier")
    parser.add_argument("--students", type=Path, default=Path("runs/staleness"), help="folder for warm starts of the demo")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are small, and threads that wait for each other cost more than they do
    kept = arguments.output.exists() and not arguments.again
    results: Results = json.loads(arguments.output.read_text()) if kept else {}

    def save() -> None:
        write_json(arguments.output, results)

    if "table" in arguments.tiers:
        measure_tables(results, arguments, save)
    if "demo" in arguments.tiers:
        measure_demo(results, arguments, save)


if __name__ == "__main__":
    main()
