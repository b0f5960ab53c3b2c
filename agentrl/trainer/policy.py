"""One training step: proximal log-probs, the loss of the run's slots over microbatches, gradient clipping, AdamW.

Invariant: the gradient of a minibatch is that of its whole loss, however forward passes cut it. A step whose loss or
gradient is not finite never changes the weights. No token over the staleness bound is trained. The proximal log-probs are
those before the first optimizer step; the first minibatch gets them from its training pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.loss_metrics import COUNTS, SAMPLE_WEIGHTS, SUMS, LossMetrics, added, combine, ess_ratio, over_ranks
from agentrl.algo.objective import Objective
from agentrl.algo.packing import DealtPass, deal, sorted_microbatches, split_minibatches
from agentrl.algo.prefixes import PassPlan, plan_passes
from agentrl.errors import ConfigError, InvariantError, TrainError
from agentrl.trainer.base import StepReport, TrainBatch
from agentrl.trainer.checkpoints.format import TrainerState
from agentrl.trainer.checkpoints.read import Checkpoint
from agentrl.trainer.checkpoints.write import StagedParts, stage_adapter, stage_parts, stage_weights, take_state
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.critic import Critic
from agentrl.trainer.model import Microbatch, PolicyModel
from agentrl.trainer.optimizer import adamw, clip_gradients, schedule_factor, set_learning_rate, update_to_weight_ratio
from agentrl.trainer.parallel.snapshot import torch_tensor
from agentrl.trainer.parallel.tensor import replicas_agree, sum_partial_gradients
from agentrl.trainer.passes import ForwardPass, check_batch, check_first_tokens, forward_pass, is_computed, loss_totals
from agentrl.trainer.reference import Reference
from agentrl.types import Float32Array, Int32Array
from agentrl.weights.tensors import StoredTensor

_RNG = "random_state"


@dataclass(slots=True, kw_only=True)
class _Done:
    """What a step has done so far."""

    lr: float
    """Learning rate of the last optimizer step."""
    factors: list[float] = field(default_factory=list[float])
    """What the guard multiplied the learning rate by, in each minibatch."""
    applied: list[LossMetrics] = field(default_factory=list[LossMetrics])
    first_pass: list[LossMetrics] = field(default_factory=list[LossMetrics])
    """Those of `applied` that the first pass over the batch has measured."""
    norms: dict[int, float] = field(default_factory=dict[int, float])
    """Gradient norm by the number of the minibatch, from 1."""
    critic_norms: list[float] = field(default_factory=list[float])
    bad: list[str] = field(default_factory=list[str])
    """Why a minibatch left the weights as they were."""
    own_tokens: int = 0
    shared_tokens: int = 0
    """Tokens of this rank's forward and backward passes."""
    seconds_proximal: float = 0.0
    seconds_forward_backward: float = 0.0
    seconds_optimizer: float = 0.0

    def summary(self) -> Mapping[str, float]:
        combined = combine(self.applied)
        if len(self.first_pass) < len(self.applied):  # several passes: a token counts once
            once = combine(self.first_pass)
            combined |= {name: once.get(name, 0.0) for name in combined if name.startswith(COUNTS)}
        if self.norms:
            combined["loss"] /= len(self.norms)
            combined["grad_norm"] = sum(self.norms.values()) / len(self.norms)
            combined["guard_factor"] = sum(self.factors) / len(self.factors)
            combined |= {f"grad_norm_by_minibatch.{number}": norm for number, norm in self.norms.items()}
        if self.critic_norms:
            combined["by_slot.value.grad_norm"] = sum(self.critic_norms) / len(self.critic_norms)
        return combined | {
            "lr": self.lr,
            "optimizer_steps": float(len(self.norms)),
            "bad_minibatches": float(len(self.bad)),
            "seconds_proximal": self.seconds_proximal,
            "seconds_forward_backward": self.seconds_forward_backward,
            "seconds_optimizer": self.seconds_optimizer,
        }


class PolicyTrainer:
    """The model, its optimizer and the counters of a run; not thread-safe."""

    def __init__(
        self, model: PolicyModel, config: TrainerConfig, algorithm: AlgorithmConfig, *, total_steps: int, seed: int = 0
    ) -> None:
        """Train `model`; the schedule ends after `total_steps` batches, and `seed` shuffles samples into minibatches."""
        self.model = model
        self._config = config
        self._max_staleness = algorithm.max_staleness
        self._objective = Objective(algorithm)
        self._slots = self._objective.slots
        self._seed = seed
        self._total_optimizer_steps = total_steps * config.minibatches * config.epochs
        self._optimizer = adamw(model.trained.values(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
        self._critic = None if algorithm.critic is None else Critic(model, algorithm.critic, config)
        self._reference = None if algorithm.reference is None else Reference(model, algorithm.reference, config)
        self._state = TrainerState(policy_version=0, steps=0, optimizer_steps=0, bad_steps=0)

    @property
    def state(self) -> TrainerState:
        return self._state

    def step(self, batch: TrainBatch) -> StepReport:
        """Train on `batch`.

        A sample whose advantages are all 0 has no gradient, unless a slot is dense: it counts in the totals and in the
        staleness metrics, but gets no forward pass, so the log-prob metrics do not cover it.

        Raises:
            InvariantError: the batch contradicts itself, or ranks have come to hold different weights.
            StaleDataError: a trained token is over the staleness bound; the weights are unchanged.
            ConfigError: a function of a slot fails; the weights are those before its minibatch.
            TrainError: the loss or gradient of `max_bad_steps` steps in a row was not finite.
        """
        started, processor_began = time.perf_counter(), time.process_time()
        metrics = check_batch(batch, self._max_staleness)
        # Before anything is computed: an error that only one rank met would leave the others in a collective.
        self.model.check_ids([item.sample.token_ids for item in batch.samples])
        check_first_tokens(batch)
        done = _Done(lr=self._config.lr)
        proximal: dict[int, Float32Array] = {}
        for epoch in range(self._config.epochs):
            proximal_of_pass = self._epoch(batch, epoch, proximal, done)
            if not epoch:
                done.first_pass = list(done.applied)
                proximal = self._merged(batch, proximal_of_pass)
        self._advance(batch.policy_version, bad=bool(done.bad), applied=bool(done.norms))
        if self._reference is not None:
            self._reference.after_step(self._state.steps)
        metrics |= done.summary()
        if done.norms:
            metrics["update_to_weight_ratio"] = update_to_weight_ratio(self._optimizer)
        metrics["computed_tokens"] = self._total_tokens(done.own_tokens)
        metrics["shared_tokens"] = self._total_tokens(done.shared_tokens)
        metrics["seconds"] = time.perf_counter() - started
        metrics["seconds_processor"] = time.process_time() - processor_began
        self._raise_if_hopeless(done.bad)
        self._check_replicas()
        skipped = None if done.norms else _why_skipped(batch, done.bad)
        return StepReport(metrics=metrics, skipped=skipped, proximal_logprobs=proximal)

    def _epoch(
        self, batch: TrainBatch, epoch: int, known: Mapping[int, Float32Array], done: _Done
    ) -> dict[int, Float32Array]:
        """Train on the whole batch once; return this rank's proximal log-probs, if it is the first time."""
        minibatches = self._split(batch, epoch)
        passes = [self._passes(batch, minibatch) for minibatch in minibatches]
        used: dict[int, Float32Array] = {}
        proximal = self._known(passes, known) if epoch else self._proximal(passes, done)
        for number, some in enumerate(passes):
            if some:
                place = epoch * self._config.minibatches + number
                lr = self._config.lr * self._schedule(self._state.optimizer_steps + place)
                self._minibatch(some, proximal[number], lr, place + 1, done, used)
                done.own_tokens += sum(each.tokens for each in some if not each.is_filler)
                done.shared_tokens += sum(each.shared_tokens for each in some if not each.is_filler)
        return used

    def logprobs(
        self, sequences: Sequence[Int32Array], temperatures: Sequence[float] | Sequence[Float32Array] | None = None
    ) -> list[Float32Array]:
        """Return [L-1] float32 log-probs of tokens 1.. of each [L] int32 sequence.

        `temperatures` are above 0, one or [L] for each sequence; None: 1.
        """
        divisors = temperatures or [1.0] * len(sequences)
        by_token = [np.full(len(ids), divisor, np.float32) for ids, divisor in zip(sequences, divisors, strict=True)]
        return self._by_token(sequences, by_token, self.model.logprobs)

    def values(self, sequences: Sequence[Int32Array]) -> list[Float32Array]:
        """Return [L-1] float32 values of the critic before tokens 1.. of each [L] int32 sequence; ConfigError: none."""
        if self._critic is None:
            raise ConfigError("values were asked for, but the trainer has no critic; set algorithm.critic")
        return self._by_token(sequences, [np.ones(len(ids), np.float32) for ids in sequences], self._critic.values)

    def numbers(
        self,
        of: Literal["policy", "critic", "reference"],
        sequences: Sequence[Int32Array],
        temperatures: Sequence[Float32Array],
    ) -> list[Float32Array]:
        """Return `logprobs`, `values`, or the log-probs of the reference; ConfigError: there is no such model."""
        if of == "critic":
            return self.values(sequences)
        if of == "policy":
            return self.logprobs(sequences, temperatures)
        if self._reference is None:
            raise ConfigError(
                "reference log-probs were asked for, but the trainer has no reference; set algorithm.reference"
            )
        return self._by_token(sequences, temperatures, self._reference.logprobs)

    def _by_token(
        self, sequences: Sequence[Int32Array], temperatures: Sequence[Float32Array], compute: Callable[[Microbatch], Tensor]
    ) -> list[Float32Array]:
        """Return what `compute` gives for tokens 1.. of each [L] sequence, [L-1] float32, packed and dealt to the ranks."""
        self.model.check_ids(sequences)
        ranks = self.model.ranks
        starts = np.cumsum([0, *(max(0, len(ids) - 1) for ids in sequences)])
        values = np.zeros(int(starts[-1]), np.float32)
        wanted = [index for index, ids in enumerate(sequences) if len(ids) > 1]
        lengths = [len(sequences[index]) for index in wanted]
        whole = [sequences[index] for index in wanted]
        plan = self._plan(whole)
        with torch.no_grad():
            for chosen, is_filler in deal(plan.passes, lengths, ranks.data_rank, ranks.data_world):
                group = [sequences[wanted[at]] for at in chosen]
                masks = [np.arange(len(ids)) > 0 for ids in group]
                divisors = [temperatures[wanted[at]] for at in chosen]
                computed = compute(self.model.microbatch(group, masks, divisors, share=plan.shared)).cpu().numpy()
                ends = np.cumsum([len(ids) - 1 for ids in group])
                for at, part in zip(chosen if not is_filler else [], np.split(computed, ends[:-1]), strict=False):
                    values[starts[wanted[at]] : starts[wanted[at] + 1]] = part
        if ranks.world > 1:
            values = ranks.merge(values)
        return np.split(values, starts[1:-1]) if sequences else []

    def published(self, version: int) -> None:
        """Record `version` as the policy version of the present weights."""
        self._state = msgspec.structs.replace(self._state, policy_version=version)

    def stage(self) -> StagedParts:
        """Return copies of this rank's part of a checkpoint; every rank must call it."""
        optimizer = stage_parts(self.optimizer_tensors(), self.model.ranks)
        if self.model.adapter is not None:
            return stage_adapter(self.model, self.model.adapter, optimizer)
        return StagedParts(weights=stage_weights(self.model), optimizer=optimizer)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the state of the optimizer and of this rank's random generators by name; nothing is copied."""
        tensors = {f"{_RNG}.{self.model.ranks.rank}": torch.get_rng_state()}
        if self.model.device.type == "cuda":
            tensors[f"{_RNG}_cuda.{self.model.ranks.rank}"] = torch.cuda.get_rng_state(self.model.device)
        for name, parameter in self.model.trained.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
        for beside in (self._critic, self._reference):
            tensors |= {} if beside is None else beside.tensors()
        return tensors

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue exactly where `checkpoint` was written; each rank reads the parts that it holds.

        Under another number of ranks, rank r continues with the random state of rank r modulo the number that wrote it.
        """
        # Before the policy: a checkpoint of another kind must change nothing.
        if self._reference is not None:
            self._reference.check(checkpoint)
        if self._critic is not None:
            self._critic.restore(checkpoint)
        if self._reference is not None:
            self._reference.restore(checkpoint)
        self.model.restore(checkpoint.weights, checkpoint.path)
        by_parameter: dict[str, dict[str, StoredTensor]] = {}
        for full_name, stored in checkpoint.optimizer.items():
            key, _, name = full_name.partition(".")
            by_parameter.setdefault(name, {})[key] = stored
        self._optimizer.state.clear()
        for name, parameter in self.model.trained.items():
            if name in by_parameter:
                state = by_parameter[name]
                self._optimizer.state[parameter] = {key: take_state(parameter, stored) for key, stored in state.items()}
        torch.set_rng_state(self._random_state(checkpoint, _RNG))
        if self.model.device.type == "cuda" and any(name.startswith(f"{_RNG}_cuda") for name in checkpoint.optimizer):
            torch.cuda.set_rng_state(self._random_state(checkpoint, f"{_RNG}_cuda"), self.model.device)
        self._state = checkpoint.state

    def _random_state(self, checkpoint: Checkpoint, name: str) -> Tensor:
        rank = self.model.ranks.rank % checkpoint.world
        # Version 1 has the one of rank 0 under the bare name.
        stored = checkpoint.optimizer.get(f"{name}.{rank}") or checkpoint.optimizer[name]
        return torch_tensor(stored.whole())

    def _split(self, batch: TrainBatch, epoch: int) -> list[list[int]]:
        loss_tokens = [int(item.sample.loss_mask.sum()) for item in batch.samples]
        seed = (self._seed, self._state.steps, epoch) if epoch else (self._seed, self._state.steps)
        return split_minibatches(loss_tokens, self._config.minibatches, seed=seed)

    def _passes(self, batch: TrainBatch, minibatch: Sequence[int]) -> list[ForwardPass]:
        places = [at for at in minibatch if is_computed(batch.samples[at], dense=self._slots.dense)]
        items = [batch.samples[at] for at in places]
        # Tokens after the last trained one do not affect it, so they are cut off.
        lengths = [int(np.flatnonzero(item.sample.loss_mask)[-1]) + 1 for item in items]
        ids = [item.sample.token_ids[:length] for item, length in zip(items, lengths, strict=True)]
        plan = self._plan(ids)
        dealt = deal(plan.passes, lengths, self.model.ranks.data_rank, self.model.ranks.data_world)
        totals, entropy = loss_totals(batch, minibatch), "entropy" in self._slots.needs
        values = self._critic is not None and self._critic.shares_pass

        def of(mine: DealtPass) -> ForwardPass:
            return forward_pass(
                self.model, batch, places, lengths, mine, totals, entropy=entropy, values=values, share=plan.shared
            )

        return [of(mine) for mine in dealt]

    def _plan(self, sequences: Sequence[Int32Array]) -> PassPlan:
        """Return which of the [L] int32 sequences share a forward pass, as trees where the model can."""
        most = self._config.microbatch_tokens
        if self.model.shares_prefixes and len(sequences) > 1:
            return plan_passes(sequences, most, share=True)
        return PassPlan(sorted_microbatches([len(ids) for ids in sequences], most) if sequences else [], shared=False)

    def _proximal(self, passes: Sequence[Sequence[ForwardPass]], done: _Done) -> list[list[Tensor] | None]:
        """Return the log-probs under the weights of now; None for the first minibatch, whose training pass computes them."""
        started = time.perf_counter()
        trained = [number for number, some in enumerate(passes) if some] if self._slots.recomputes_proximal else []
        with torch.no_grad():
            computed = {number: [self.model.logprobs(each.batch) for each in passes[number]] for number in trained[1:]}
        done.seconds_proximal += time.perf_counter() - started
        return [computed.get(number) for number in range(len(passes))]

    def _known(
        self, passes: Sequence[Sequence[ForwardPass]], known: Mapping[int, Float32Array]
    ) -> list[list[Tensor] | None]:
        if not self._slots.recomputes_proximal:
            return [None] * len(passes)

        def of(each: ForwardPass) -> Tensor:
            return torch.from_numpy(np.concatenate([known[at] for at in each.samples])).to(self.model.device)

        return [[of(each) for each in some] for some in passes]

    def _minibatch(
        self,
        passes: Sequence[ForwardPass],
        proximal: Sequence[Tensor] | None,
        lr: float,
        number: int,
        done: _Done,
        used: dict[int, Float32Array],
    ) -> None:
        """Take one optimizer step; put the proximal log-probs of each sample into `used`."""
        started = time.perf_counter()
        measured: list[LossMetrics] = []
        compared: list[Tensor] = []
        for place, each in enumerate(passes):
            outputs = self.model.outputs(each.batch)
            if self._critic is not None and not self._critic.shares_pass:
                outputs = replace(outputs, values=self._critic.values(each.batch))
            center = None if proximal is None else proximal[place]
            loss_batch = each.loss_batch(outputs)
            if self._reference is not None and "reference" in self._slots.needs:
                loss_batch = replace(loss_batch, reference_logprobs=self._reference.logprobs(each.batch))
            result = self._objective(
                loss_batch,
                step=self._state.steps,
                marks=each.marks(compared=self._slots.recomputes_proximal),
                proximal=center,
            )
            compared.append(result.proximal)
            # FSDP averages the gradients of the ranks, and the loss is their sum.
            (result.loss * (self.model.ranks.averaged * each.weight)).backward()
            measured.append(result.metrics.zeroed() if each.is_filler else result.metrics)
        total = added(measured)
        if self.model.ranks.world > 1:
            total = over_ranks(total, self.model.ranks.add, self.model.ranks.maximum)
        loss, ratio, faults = _step_numbers(total)
        for each, values in zip(passes, compared, strict=True):  # after the loss, so that no copy waits for a forward pass
            if not each.is_filler:
                used |= dict(zip(each.samples, np.split(values.cpu().numpy(), each.ends[:-1]), strict=True))
        done.seconds_forward_backward += time.perf_counter() - started
        try:
            self._objective.check(faults)
            # A ratio that is no number has its cause in the loss or in the data, which `_update` names.
            factor = self._objective.rate_factor(ratio) if math.isfinite(ratio) else math.nan
        except ConfigError:
            self._forget_gradients()
            raise
        self._update(total, loss, lr, factor, number, done)

    def _update(self, measured: LossMetrics, loss: float, lr: float, factor: float, number: int, done: _Done) -> None:
        started = time.perf_counter()
        if self.model.tensor_group is not None:
            sum_partial_gradients(self.model.trained, self.model.tensor_group)
        norm = clip_gradients(self.model.trained.values(), self._config.max_grad_norm)
        problem = f"the loss is {loss}" if not math.isfinite(loss) else None
        if problem is None and not math.isfinite(norm):
            problem = f"the gradient norm is {norm}" + _may_be_of_user(self._objective.suspects)
        if problem is None and not math.isfinite(factor):
            problem = "the effective sample size is no number"
        warming = False
        if self._critic is not None:
            warming = self._state.steps < self._critic.warmup_steps
            critic_norm = self._critic.update(self._critic.lr * lr / self._config.lr, apply=problem is None)
            if problem is None and not math.isfinite(critic_norm):
                problem = f"the gradient norm of the critic is {critic_norm}"
            done.critic_norms.append(critic_norm)
        if problem is not None:
            done.bad.append(problem)
        else:
            lr *= factor
            set_learning_rate(self._optimizer, lr)
            if not warming:
                self._optimizer.step()
            done.applied.append(measured)
            done.factors.append(factor)
            done.norms[number] = norm
        done.lr = 0.0 if warming else lr
        self._forget_gradients()
        done.seconds_optimizer += time.perf_counter() - started

    def _forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        if self._critic is not None:
            self._critic.forget_gradients()

    def _merged(self, batch: TrainBatch, own: Mapping[int, Float32Array]) -> dict[int, Float32Array]:
        computed = [at for at, item in enumerate(batch.samples) if is_computed(item, dense=self._slots.dense)]
        sizes = [int(batch.samples[at].sample.loss_mask.sum()) for at in computed]
        parts = [own.get(at, np.zeros(size, np.float32)) for at, size in zip(computed, sizes, strict=True)]
        if not parts or self.model.ranks.world == 1:
            return dict(own)
        together = self.model.ranks.merge(np.concatenate(parts))
        return dict(zip(computed, np.split(together, np.cumsum(sizes)[:-1]), strict=True))

    def _total_tokens(self, own: int) -> float:
        return float(own if self.model.ranks.world == 1 else self.model.ranks.add(torch.tensor(own)))

    def _schedule(self, optimizer_step: int) -> float:
        return schedule_factor(
            optimizer_step,
            schedule=self._config.schedule,
            warmup_steps=self._config.warmup_steps,
            total_steps=self._total_optimizer_steps,
        )

    def _advance(self, policy_version: int, *, bad: bool, applied: bool) -> None:
        self._state = TrainerState(
            policy_version=policy_version + 1,
            steps=self._state.steps + 1,
            optimizer_steps=self._state.optimizer_steps + self._config.minibatches * self._config.epochs,
            bad_steps=self._state.bad_steps + 1 if bad else 0 if applied else self._state.bad_steps,
        )

    def _check_replicas(self) -> None:
        if self.model.tensor_group is None:
            return
        agrees = replicas_agree(self.model.trained, self.model.tensor_group)
        worst = self.model.ranks.maximum(torch.tensor(0.0 if agrees else 1.0))  # all ranks raise, so that none waits
        if worst:
            raise InvariantError(
                "trainer.parallel.tp: the weights that tensor parallel ranks hold in common differ between them after "
                f"step {self._state.steps}; restart from the newest checkpoint, and report the model's architecture"
            )

    def _raise_if_hopeless(self, bad: Sequence[str]) -> None:
        if self._state.bad_steps >= self._config.max_bad_steps:
            raise TrainError(
                f"{self._state.bad_steps} training steps in a row were not finite, the last because {bad[-1]}; none of them "
                "changed the weights. Lower trainer.lr, or look for a reward or log-prob that is out of range"
            )


def _step_numbers(total: LossMetrics) -> tuple[float, float, list[float]]:
    """Return the loss, the ratio of effective samples and the faults; one transfer from the device."""
    faults = total.sums.new_zeros(0) if total.faults is None else total.faults
    numbers: list[float] = torch.cat([total.sums, faults]).tolist()
    sums = dict(zip(SUMS, numbers, strict=False))
    return sums["loss"], ess_ratio(*(sums[name] for name in SAMPLE_WEIGHTS)), numbers[len(SUMS) :]


def _may_be_of_user(suspects: str) -> str:
    if not suspects:
        return ""
    return (
        f" although the loss is finite ({suspects} may make it so, such as by a root or a division at 0; test it with "
        "agentrl_testing.check_policy_loss)"
    )


def _why_skipped(batch: TrainBatch, bad: Sequence[str]) -> str:
    if bad:
        return f"{bad[-1]}: not finite"
    if not any(item.sample.loss_mask.any() for item in batch.samples):
        return "no token is in the loss"
    return "every advantage is 0"
