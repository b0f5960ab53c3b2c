"""One training step: proximal log-probs, the decoupled PPO loss over microbatches, gradient clipping, AdamW.

Invariant: the gradient of a minibatch is that of its whole loss, however forward passes cut it. A step whose loss or
gradient is not finite never changes the weights. No token over the staleness bound is trained. The proximal log-probs are
those before the first optimizer step; the first minibatch gets them from its training pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.loss import MAXIMA, SUMS, LossMetrics, combine, decoupled_ppo_loss
from agentrl.algo.packing import DealtPass, deal, sorted_microbatches, split_minibatches
from agentrl.errors import InvariantError, StaleDataError, TrainError
from agentrl.trainer.base import StepReport, TrainBatch, TrainSample
from agentrl.trainer.checkpoints.format import TrainerState
from agentrl.trainer.checkpoints.read import Checkpoint
from agentrl.trainer.checkpoints.write import StagedParts, stage_parts, stage_weights, take_state
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import Microbatch, PolicyModel
from agentrl.trainer.optimizer import adamw, clip_gradients, schedule_factor, set_learning_rate, update_to_weight_ratio
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.parallel.snapshot import torch_tensor
from agentrl.trainer.parallel.tensor import replicas_agree, sum_partial_gradients
from agentrl.types import BoolArray, Float32Array, Int32Array, Sample
from agentrl.weights.tensors import StoredTensor

_RNG = "random_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One forward pass of a minibatch; every tensor is [n], one value for each trained token."""

    batch: Microbatch
    behavior_logprobs: Tensor
    advantages: Tensor
    ages: Tensor
    turns: Tensor
    interrupted: Tensor
    tokens: int
    """Real tokens, padding not counted."""
    samples: tuple[int, ...]
    """Places of its samples in the batch."""
    ends: tuple[int, ...]
    """Ends of the trained tokens of each sample among the n."""
    is_filler: bool
    """Whether another rank trains these samples; this rank only keeps step."""


@dataclass(slots=True, kw_only=True)
class _Seconds:
    proximal: float = 0.0
    forward_backward: float = 0.0
    optimizer: float = 0.0


class PolicyTrainer:
    """The model, its optimizer and the counters of a run; not thread-safe."""

    def __init__(
        self, model: PolicyModel, config: TrainerConfig, algorithm: AlgorithmConfig, *, total_steps: int, seed: int = 0
    ) -> None:
        """Train `model`; the schedule ends after `total_steps` batches, and `seed` shuffles samples into minibatches."""
        self.model = model
        self._config = config
        self._algorithm = algorithm
        self._seed = seed
        self._total_optimizer_steps = total_steps * config.minibatches
        self._optimizer = adamw(
            model.parameters.values(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self._state = TrainerState(policy_version=0, steps=0, optimizer_steps=0, bad_steps=0)

    @property
    def state(self) -> TrainerState:
        return self._state

    def step(self, batch: TrainBatch) -> StepReport:
        """Train on `batch`.

        A sample whose advantages are all 0 has no gradient: it counts in N and in the staleness metrics, but gets no
        forward pass, so the log-prob metrics do not cover it.

        Raises:
            InvariantError: the batch contradicts itself, or ranks have come to hold different weights.
            StaleDataError: a trained token is over the staleness bound; the weights are unchanged.
            TrainError: the loss or gradient of `max_bad_steps` steps in a row was not finite.
        """
        started, processor_began = time.perf_counter(), time.process_time()
        metrics = check_batch(batch, self._algorithm.max_staleness)
        # Before anything is computed: an error that only one rank met would leave the others in a collective.
        self.model.check_ids([item.sample.token_ids for item in batch.samples])
        check_first_tokens(batch)
        minibatches = self._split(batch)
        seconds = _Seconds()
        applied: list[LossMetrics] = []
        norms: dict[int, float] = {}
        bad: list[str] = []
        used: dict[int, Float32Array] = {}
        parts = [self._parts(batch, minibatch) for minibatch in minibatches]
        lr = self._config.lr
        for number, (minibatch, proximal) in enumerate(zip(minibatches, self._proximal(parts, seconds), strict=True)):
            if not parts[number]:
                continue
            lr = self._config.lr * self._schedule(self._state.optimizer_steps + number)
            num_loss_tokens = sum(int(batch.samples[at].sample.loss_mask.sum()) for at in minibatch)
            measured, norm, problem = self._minibatch(parts[number], proximal, num_loss_tokens, lr, seconds, used)
            if problem is None:
                applied += measured
                norms[number + 1] = norm
            else:
                bad.append(problem)
        self._advance(batch.policy_version, bad=bool(bad), applied=bool(norms))
        metrics |= _summary(applied, norms, lr, bad, seconds)
        if norms:
            metrics["update_to_weight_ratio"] = update_to_weight_ratio(self._optimizer)
        metrics["computed_tokens"] = self._total_tokens(parts)
        metrics["seconds"] = time.perf_counter() - started
        metrics["seconds_processor"] = time.process_time() - processor_began
        self._raise_if_hopeless(bad)
        self._check_replicas()
        skipped = None if norms else _why_skipped(batch, bad)
        return StepReport(metrics=metrics, skipped=skipped, proximal_logprobs=self._merged(batch, used))

    def logprobs(self, sequences: Sequence[Int32Array], temperatures: Sequence[float] | None = None) -> list[Float32Array]:
        """Return [L-1] float32 log-probs of tokens 1.. of each [L] int32 sequence; `temperatures` are above 0; None: 1."""
        self.model.check_ids(sequences)
        ranks = self.model.ranks
        divisors = temperatures or [1.0] * len(sequences)
        starts = np.cumsum([0, *(max(0, len(ids) - 1) for ids in sequences)])
        values = np.zeros(int(starts[-1]), np.float32)
        wanted = [index for index, ids in enumerate(sequences) if len(ids) > 1]
        lengths = [len(sequences[index]) for index in wanted]
        plan = sorted_microbatches(lengths, self._config.microbatch_tokens) if wanted else []
        with torch.no_grad():
            for chosen, is_filler in deal(plan, lengths, ranks.data_rank, ranks.data_world):
                group = [sequences[wanted[at]] for at in chosen]
                masks = [np.arange(len(ids)) > 0 for ids in group]
                by_token = [np.full(len(sequences[wanted[at]]), divisors[wanted[at]], np.float32) for at in chosen]
                computed = self.model.logprobs(self.model.microbatch(group, masks, by_token)).cpu().numpy()
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
        """Return copies of what this rank writes into a checkpoint; every rank must call it."""
        return StagedParts(
            weights=stage_weights(self.model), optimizer=stage_parts(self.optimizer_tensors(), self.model.ranks)
        )

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the state of the optimizer and of this rank's random generators by name; nothing is copied."""
        tensors = {f"{_RNG}.{self.model.ranks.rank}": torch.get_rng_state()}
        if self.model.device.type == "cuda":
            tensors[f"{_RNG}_cuda.{self.model.ranks.rank}"] = torch.cuda.get_rng_state(self.model.device)
        for name, parameter in self.model.parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue exactly where `checkpoint` was written; each rank reads the parts that it holds.

        Under another number of ranks, rank r continues with the random state of rank r modulo the number that wrote it.
        """
        self.model.read(checkpoint.weights, checkpoint.path)
        by_parameter: dict[str, dict[str, StoredTensor]] = {}
        for full_name, stored in checkpoint.optimizer.items():
            key, _, name = full_name.partition(".")
            by_parameter.setdefault(name, {})[key] = stored
        self._optimizer.state.clear()
        for name, parameter in self.model.parameters.items():
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

    def _split(self, batch: TrainBatch) -> list[list[int]]:
        loss_tokens = [int(item.sample.loss_mask.sum()) for item in batch.samples]
        return split_minibatches(loss_tokens, self._config.minibatches, seed=(self._seed, self._state.steps))

    def _parts(self, batch: TrainBatch, minibatch: Sequence[int]) -> list[_Part]:
        places = [at for at in minibatch if has_gradient(batch.samples[at])]
        items = [batch.samples[at] for at in places]
        # Tokens after the last trained one do not affect it, so they are cut off.
        lengths = [int(np.flatnonzero(item.sample.loss_mask)[-1]) + 1 for item in items]
        plan = sorted_microbatches(lengths, self._config.microbatch_tokens) if items else []
        dealt = deal(plan, lengths, self.model.ranks.data_rank, self.model.ranks.data_world)
        return [_part(self.model, batch, places, lengths, mine) for mine in dealt]

    def _proximal(self, parts: Sequence[Sequence[_Part]], seconds: _Seconds) -> list[list[Tensor] | None]:
        started = time.perf_counter()
        trained = [number for number, some in enumerate(parts) if some]
        with torch.no_grad():
            computed = {number: [self.model.logprobs(part.batch) for part in parts[number]] for number in trained[1:]}
        seconds.proximal += time.perf_counter() - started
        return [computed.get(number) for number in range(len(parts))]

    def _minibatch(
        self,
        parts: Sequence[_Part],
        proximal: Sequence[Tensor] | None,
        num_loss_tokens: int,
        lr: float,
        seconds: _Seconds,
        used: dict[int, Float32Array],
    ) -> tuple[list[LossMetrics], float, str | None]:
        """Take one optimizer step; put the proximal log-probs of each sample into `used`."""
        started = time.perf_counter()
        measured: list[LossMetrics] = []
        compared: list[Tensor] = []
        for number, part in enumerate(parts):
            current = self.model.logprobs(part.batch)
            compared.append(current.detach() if proximal is None else proximal[number])
            output = decoupled_ppo_loss(
                current,
                compared[number],
                part.behavior_logprobs,
                part.advantages,
                torch.ones_like(current, dtype=torch.bool),
                num_loss_tokens=num_loss_tokens,
                config=self._algorithm,
                fresh=part.ages == 0,
                interrupted=part.interrupted,
                ages=part.ages,
                turns=part.turns,
            )
            # FSDP averages the gradients of the ranks, and the loss is their sum.
            (output.loss * self.model.ranks.averaged).backward()
            if not part.is_filler:
                measured.append(output.metrics)
        measured = [reduced(measured, self.model.ranks)]
        loss = float(measured[0].sums[SUMS.index("loss")])
        for part, values in zip(parts, compared, strict=True):  # after the loss, so that no copy waits for a forward pass
            if not part.is_filler:
                used |= dict(zip(part.samples, np.split(values.cpu().numpy(), part.ends[:-1]), strict=True))
        seconds.forward_backward += time.perf_counter() - started
        started = time.perf_counter()
        if self.model.tensor_group is not None:
            sum_partial_gradients(self.model.parameters, self.model.tensor_group)
        norm = clip_gradients(self.model.parameters.values(), self._config.max_grad_norm)
        problem = None
        if not math.isfinite(loss):
            problem = f"the loss is {loss}"
        elif not math.isfinite(norm):
            problem = f"the gradient norm is {norm}"
        else:
            set_learning_rate(self._optimizer, lr)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        seconds.optimizer += time.perf_counter() - started
        return measured, norm, problem

    def _merged(self, batch: TrainBatch, own: Mapping[int, Float32Array]) -> dict[int, Float32Array]:
        computed = [at for at, item in enumerate(batch.samples) if has_gradient(item)]
        sizes = [int(batch.samples[at].sample.loss_mask.sum()) for at in computed]
        parts = [own.get(at, np.zeros(size, np.float32)) for at, size in zip(computed, sizes, strict=True)]
        if not parts or self.model.ranks.world == 1:
            return dict(own)
        together = self.model.ranks.merge(np.concatenate(parts))
        return dict(zip(computed, np.split(together, np.cumsum(sizes)[:-1]), strict=True))

    def _total_tokens(self, parts: Sequence[Sequence[_Part]]) -> float:
        own = sum(part.tokens for some in parts for part in some if not part.is_filler)
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
            optimizer_steps=self._state.optimizer_steps + self._config.minibatches,
            bad_steps=self._state.bad_steps + 1 if bad else 0 if applied else self._state.bad_steps,
        )

    def _check_replicas(self) -> None:
        if self.model.tensor_group is None:
            return
        agrees = replicas_agree(self.model.parameters, self.model.tensor_group)
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


def has_gradient(item: TrainSample) -> bool:
    """Return whether a trained token of `item` has an advantage other than 0 (NaN counts)."""
    return bool((item.advantages[item.sample.loss_mask] != 0).any())


def interrupted(sample: Sample) -> BoolArray:
    """Return, [L] bool, which tokens were sampled after the weights had changed within their turn.

    Under `inference.pause_mode: fast` the server sampled them from keys and values of earlier weights, so their recorded
    log-probs are not those of the version they carry. An update between a request and its first token leaves no trace.
    """
    result = np.zeros(len(sample.token_ids), np.bool_)
    sampled = np.flatnonzero(sample.token_versions >= 0)
    if len(sampled):
        turns, versions = sample.turn_index[sampled], sample.token_versions[sampled]
        starts = np.flatnonzero(np.concatenate([[True], turns[1:] != turns[:-1]]))
        result[sampled] = versions > np.repeat(versions[starts], np.diff(starts, append=len(turns)))
    return result


def check_batch(batch: TrainBatch, max_staleness: int) -> dict[str, float]:
    """Return the staleness and the token counts of `batch`.

    Raises:
        InvariantError: a trained token has no version of the run, a later version than the batch, or temperature 0.
        StaleDataError: a trained token is more than `max_staleness` versions behind `batch.policy_version`.
    """
    versions = np.concatenate([np.empty(0, np.int32), *(i.sample.token_versions[i.sample.loss_mask] for i in batch.samples)])
    temperatures = [i.sample.temperatures[i.sample.loss_mask].min(initial=np.inf) for i in batch.samples]
    if min(temperatures, default=np.inf) <= 0:
        raise InvariantError("a trained token was sampled at temperature 0: greedy tokens have no policy gradient")
    tokens = float(sum(len(item.sample.token_ids) for item in batch.samples))
    if not len(versions):
        return {"tokens": tokens, "loss_tokens": 0.0}
    oldest, newest = int(versions.min()), int(versions.max())
    if oldest < 1 or newest > batch.policy_version:
        raise InvariantError(
            f"trained tokens have policy versions from {oldest} to {newest}; expected 1 to {batch.policy_version}, the "
            "version being trained (version 0 is the weights that a server was launched with)"
        )
    if batch.policy_version - oldest > max_staleness:
        raise StaleDataError(
            f"a token sampled by version {oldest} reached the trainer at version {batch.policy_version}; at most "
            f"{max_staleness} version(s) behind are allowed (algorithm.max_staleness)"
        )
    return {
        "tokens": tokens,
        "loss_tokens": float(len(versions)),
        "max_staleness": float(batch.policy_version - oldest),
        "mean_staleness": float(batch.policy_version - versions.mean(dtype=np.float64)),
    }


def check_first_tokens(batch: TrainBatch) -> None:
    """Raise InvariantError if a sample trains its first token, which nothing predicts."""
    for number, item in enumerate(batch.samples):
        if len(item.sample.loss_mask) and item.sample.loss_mask[0]:
            raise InvariantError(f"sample {number} trains its first token, which nothing predicts")


def reduced(measured: Sequence[LossMetrics], ranks: Ranks) -> LossMetrics:
    """Return the diagnostics of the passes of all ranks together, the same on each rank."""
    some = measured or [LossMetrics(sums=torch.zeros(len(SUMS)).double(), maxima=torch.zeros(len(MAXIMA)).double())]
    sums, maxima = torch.stack([one.sums for one in some]).sum(0), torch.stack([one.maxima for one in some]).amax(0)
    if ranks.world > 1:
        sums, maxima = ranks.add(sums), ranks.maximum(maxima)
    return LossMetrics(sums=sums, maxima=maxima)


def _part(
    model: PolicyModel, batch: TrainBatch, all_places: Sequence[int], all_lengths: Sequence[int], dealt: DealtPass
) -> _Part:
    places, lengths = [all_places[i] for i in dealt.samples], [all_lengths[i] for i in dealt.samples]
    items = [batch.samples[at] for at in places]
    samples = [item.sample for item in items]
    masks = [sample.loss_mask[:length] for sample, length in zip(samples, lengths, strict=True)]
    ids = [sample.token_ids[:length] for sample, length in zip(samples, lengths, strict=True)]
    temperatures = [sample.temperatures[:length] for sample, length in zip(samples, lengths, strict=True)]

    def wanted(arrays: Sequence[np.ndarray]) -> Tensor:
        joined = np.concatenate([array[: len(mask)][mask] for array, mask in zip(arrays, masks, strict=True)])
        return torch.from_numpy(joined).to(model.device)

    return _Part(
        batch=model.microbatch(ids, masks, temperatures),
        behavior_logprobs=wanted([sample.behavior_logprobs for sample in samples]),
        advantages=wanted([item.advantages * (not dealt.is_filler) for item in items]),
        ages=wanted([batch.policy_version - sample.token_versions for sample in samples]),
        turns=wanted([sample.turn_index for sample in samples]),
        interrupted=wanted([interrupted(sample) for sample in samples]),
        tokens=sum(lengths),
        samples=tuple(places),
        ends=tuple(np.cumsum([int(mask.sum()) for mask in masks]).tolist()),
        is_filler=dealt.is_filler,
    )


def _summary(
    applied: Sequence[LossMetrics], norms: Mapping[int, float], lr: float, bad: Sequence[str], seconds: _Seconds
) -> Mapping[str, float]:
    combined = combine(applied)
    if norms:
        combined["loss"] /= len(norms)
        combined["grad_norm"] = sum(norms.values()) / len(norms)
        combined |= {f"grad_norm_by_minibatch.{number}": norm for number, norm in norms.items()}
    return combined | {
        "lr": lr,
        "optimizer_steps": float(len(norms)),
        "bad_minibatches": float(len(bad)),
        "seconds_proximal": seconds.proximal,
        "seconds_forward_backward": seconds.forward_backward,
        "seconds_optimizer": seconds.optimizer,
    }


def _why_skipped(batch: TrainBatch, bad: Sequence[str]) -> str:
    if bad:
        return f"{bad[-1]}: not finite"
    if not any(item.sample.loss_mask.any() for item in batch.samples):
        return "no token is in the loss"
    return "every advantage is 0"
