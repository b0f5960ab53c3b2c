"""The seam between the engine and a trainer: batches and versions in, reports and weights out.

Invariant: weights change only in `step`; a version that leaves the trainer has exactly the weights that `hold` took as that
version, or, without `hold`, those after the last step. To train while servers load a version, call `hold`, read
`steps_while_sending`, and only then begin the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.types import Float32Array, Int32Array, Sample
from agentrl.weights.types import Publication, WeightChannel


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """A branch with the advantage of each token."""

    sample: Sample
    advantages: Float32Array
    """[L] float32; 0 where not trained."""
    group: int = 0
    """Admission number of its group."""
    episode_return: float = 0.0
    """The return of its episode."""
    roles: Int32Array | None = None
    """[L] int32: index into `TrainBatch.roles`; None: 0 everywhere."""
    players: Int32Array | None = None
    """[L] int32: index into `TrainBatch.players`; None: 0 everywhere."""
    values: Float32Array | None = None
    """[L] float32: what the critic expected before each token; 0 where not trained; None: there is no critic."""
    value_targets: Float32Array | None = None
    """[L] float32: what the values are trained towards, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The samples of one training step."""

    samples: tuple[TrainSample, ...]
    policy_version: int
    """Version of the weights before the step; the proximal policy."""
    roles: tuple[str, ...] = ("",)
    """Names of the roles of its turns, sorted."""
    players: tuple[str, ...] = ("",)
    """Names of the players of its turns, sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one training step."""

    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Loss, gradient norm, KLs, effective sample size, clip and mask fractions, log-prob difference, seconds, tokens."""
    skipped: str | None = None
    """Why the step left the weights as they were; None when it changed them."""
    proximal_logprobs: Mapping[int, Float32Array] = field(default_factory=dict[int, Float32Array])
    """By place in `TrainBatch.samples`, of samples with a forward pass: log-probs under the weights before the step, nats,
    [loss tokens of the sample] float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """A checkpoint that is on the disk."""

    directory: str
    seconds: float
    """Time that the writing took, while training continued."""


class Trainer(Protocol):
    """A worker that owns the trained weights."""

    @property
    def channel(self) -> WeightChannel:
        """The trainer's end of the process groups through which servers receive weights from its memory."""
        ...

    @property
    def steps_while_sending(self) -> bool:
        """Whether the weights held last are a copy, so `step` may run while they leave; False before the first `hold`."""
        ...

    async def step(self, batch: TrainBatch) -> StepReport:
        """Train on `batch`.

        With `steps_while_sending`, the step runs while what is held is sent or written. Without it, the step waits until a
        sending in progress has ended, and a sending that begins after the step is refused.

        Raises:
            TrainError: the worker failed, or too many steps in a row were not finite.

        Cancellation: the worker finishes the step or dies with the run; its weights cannot be used again.
        """
        ...

    async def hold(self, version: int, *, dtype: str | None) -> None:
        """Take the present weights as `version`: the next `publish` or `channel.sending` of that version has exactly these.

        They are sent as `dtype`, a key of `WIRE_DTYPES`; with None they are written as they are trained.

        Raises:
            InvariantError: the trainer is in a step.

        Cancellation: the trainer cannot be used again.
        """
        ...

    async def publish(self, version: int, directory: str) -> Publication:
        """Write the weights of `version` under `directory`, atomically, in HF format with safetensors.

        Raises:
            InvariantError: the trainer is in a step, and `hold` took no copy.
            UpdatePending: the trainer has stepped since `hold`, which took no copy.
            TrainError: the files cannot be written.
        """
        ...

    async def logprobs(
        self, sequences: Sequence[Int32Array], temperatures: Sequence[float] | None = None
    ) -> list[Float32Array]:
        """Return, for each [L] int32 sequence, [L-1] float32 log-probs of tokens 1.. under the current weights.

        `temperatures` has one above 0 for each sequence; None: 1 for all.
        """
        ...

    async def values(self, sequences: Sequence[Int32Array]) -> list[Float32Array]:
        """Return, for each [L] int32 sequence, [L-1] float32: the return that the critic expects before tokens 1..

        Raises:
            ConfigError: there is no critic (algorithm.critic).
        """
        ...

    async def reference_logprobs(
        self, sequences: Sequence[Int32Array], temperatures: Sequence[Float32Array]
    ) -> list[Float32Array]:
        """Return what `logprobs` does, under the reference model; `temperatures` has [L] for each sequence.

        Raises:
            ConfigError: there is no reference model (algorithm.reference).
        """
        ...

    async def save(self, directory: str, note: str = "") -> None:
        """Begin to write a checkpoint (HF model, optimizer, schedule, random state) that appears whole or not at all.

        Returns when the state is copied; later steps do not change the checkpoint. A checkpoint that is still being written
        is waited for first. A restored trainer returns `note`.

        Raises:
            TrainError: the checkpoint before could not be written, and `finish_save` has not reported it.
        """
        ...

    async def finish_save(self, *, wait: bool) -> SaveReport | None:
        """Return the checkpoint that `save` began, once it is on the disk and once only; without `wait`, None until then.

        Raises:
            TrainError: it cannot be written; names the path and the cause. The previous checkpoint is untouched.
        """
        ...
