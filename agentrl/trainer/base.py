"""The seam between the engine and a trainer: batches and versions in, reports and weights out.

Invariant: weights change only in `step`; a version that leaves the trainer has exactly the weights that `hold` took as that
version, or, where `hold` was not called, those after the last step.

A caller that trains the next batch while servers load a version calls `hold` first, reads `steps_while_sending`, and only
then begins the step.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The samples of one training step."""

    samples: tuple[TrainSample, ...]
    policy_version: int
    """Version of the weights before the step; the proximal policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one training step."""

    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Loss, gradient norm, KLs, effective sample size, clip and mask fractions, log-prob difference, seconds, tokens."""
    skipped: str | None = None
    """Why the step left the weights as they were; None when it changed them."""
    proximal_logprobs: Mapping[int, Float32Array] = field(default_factory=dict[int, Float32Array])
    """By place in `TrainBatch.samples`: log-probs of the tokens in the loss under the weights before the step, nats, [loss
    tokens of the sample] float32. A sample that got no forward pass has none."""


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
        """Whether the weights held last are a copy, so that `step` may run while they are sent or written.

        False before the first `hold`. Files that `publish` has written do not change in any case.
        """
        ...

    async def step(self, batch: TrainBatch) -> StepReport:
        """Train on `batch` and return the metrics of the step.

        Where `steps_while_sending` is true, the step runs beside the sending or writing of what is held. Where it is false,
        the step waits until a sending or writing in progress has ended; one that begins after the step is refused.

        Raises:
            TrainError: when the worker fails, or after too many non-finite steps in a row.

        Cancellation: the worker finishes the step or dies with the run; its weights cannot be used again.
        """
        ...

    async def hold(self, version: int, *, dtype: str | None) -> None:
        """Take the present weights as `version`: the next `publish` or `channel.sending` of that version has exactly these.

        Args:
            version: policy version of the weights.
            dtype: type in which they are sent, a key of `WIRE_DTYPES`; None: they are written as they are trained.

        Raises:
            InvariantError: when the trainer is in a step.
            TrainError: when the worker fails.

        Cancellation: the weights are held or not; the trainer cannot be used again.
        """
        ...

    async def publish(self, version: int, directory: str) -> Publication:
        """Write weights under `directory` as `version`, atomically, in HF format with safetensors.

        They are those that `hold` took as `version` to be written, or else the present ones.

        Raises:
            InvariantError: when the trainer is in a step, and `hold` took no copy.
            UpdatePending: when the trainer has stepped since `hold`, which took no copy.
            TrainError: when the files cannot be written.
        """
        ...

    async def logprobs(
        self, sequences: Sequence[Int32Array], temperatures: Sequence[float] | None = None
    ) -> list[Float32Array]:
        """Return, for each [L] int32 sequence, [L-1] float32 log-probs of tokens 1.. under the current weights.

        `temperatures` has one above 0 for each sequence; None: 1 for all.
        """
        ...

    async def save(self, directory: str, note: str = "") -> None:
        """Begin to write a checkpoint (HF model, optimizer, schedule, random state) that appears whole or not at all.

        Returns when the state is copied; steps that follow do not change the checkpoint. One that is still being written
        is waited for first. A restored trainer returns `note`.

        Raises:
            TrainError: the checkpoint before could not be written, and `finish_save` has not reported it.
        """
        ...

    async def finish_save(self, *, wait: bool) -> SaveReport | None:
        """Return the checkpoint that `save` began, once it is on the disk; each is returned once.

        Args:
            wait: until it is; otherwise None is returned while it is being written.

        Raises:
            TrainError: naming the path and the cause, such as a full disk; the previous checkpoint is untouched.
        """
        ...
