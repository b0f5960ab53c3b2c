"""Settings of the trainer worker and of the supervised warm start."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, cast, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from agentrl.config.base import Config, Device, Seed
from agentrl.errors import ConfigError
from agentrl.trainer.parallel.shape import MeshShape

_Decay = Annotated[float, Field(ge=0, lt=1)]


_MOST_WAYS = 4096
AUTO_SHARE: Final = 3
"""With `trainer.snapshot: auto`, a snapshot takes at most the free memory divided by this."""


def _ways(given: object) -> object:
    if given == "auto" or (isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= _MOST_WAYS):
        return given
    raise ValueError(f"expected auto or a number from 1 to {_MOST_WAYS}")


Ways = Annotated[int | Literal["auto"], BeforeValidator(_ways)]
"""Ways of an axis of the mesh; `auto` is resolved before anything starts."""


class ParallelConfig(Config):
    """How many processes train one model: the product of the four numbers."""

    dp: Ways = 1
    """Ways in which samples, weights, gradients and optimizer state are split (FSDP); `auto`: as many as have room."""
    tp: Ways = 1
    """Ways in which each matrix product is split (tensor parallelism); it divides the heads and the vocabulary."""
    cp: Ways = 1
    """Ways in which each sequence is cut (context parallelism, for long ones); it divides the query heads."""
    replicate: Ways = 1
    """Copies of the weights that dp, cp and tp split, each for its own samples (HSDP)."""

    @property
    def shape(self) -> MeshShape:
        """The mesh.

        Raises:
            ConfigError: an axis is still `auto`.
        """
        ways = {"replicate": self.replicate, "dp": self.dp, "cp": self.cp, "tp": self.tp}
        numbers = {name: number for name, number in ways.items() if isinstance(number, int)}
        if len(numbers) < len(ways):
            fields = ", ".join(f"trainer.parallel.{name}" for name in ways if name not in numbers)
            raise ConfigError(f"{fields}: auto is resolved by agentrl.plan.plan.plan_run; call it, or give a number")
        return MeshShape(**numbers)


_SevenTargets = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_ALL_TARGETS: Final[tuple[_SevenTargets, ...]] = get_args(_SevenTargets)
LoraTarget = _SevenTargets | Literal["qkv_proj", "gate_up_proj"]
"""A linear layer of each block: seven of most families, and those that Phi-3 and GLM-4 have in place of some of them."""


def _targets(given: object) -> object:
    return _ALL_TARGETS if given in ("all", "all-linear") else given


class LoraConfig(Config):
    """An adapter of low rank is trained, and the model below it stays as it is (Hu et al., arXiv 2106.09685)."""

    rank: int = Field(default=16, ge=1, le=512)
    """Rows of A and columns of B in `W + (alpha / rank) B A`."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapter, before it is divided by the rank."""
    targets: Annotated[tuple[LoraTarget, ...], BeforeValidator(_targets), Field(min_length=1)] = _ALL_TARGETS
    """Linear layers that get an adapter, in every block; `all-linear`: the seven of most families."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_dropout(cls, given: object) -> object:
        fields = cast("dict[str, object]", given)
        if not isinstance(given, dict) or "dropout" not in fields:
            return given
        if fields["dropout"] != 0:
            raise ValueError(
                "dropout: servers sample without it, so log-probs with dropout are those of another policy; remove it, and "
                "use trainer.weight_decay, a smaller rank or a smaller trainer.lr against overfitting"
            )
        return {name: value for name, value in fields.items() if name != "dropout"}


class TrainerConfig(Config):
    """One optimizer over one HF model, in processes of its own."""

    device: Device = "auto"
    """`auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:N`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the forward and backward pass; trained weights and optimizer state stay float32."""
    lora: LoraConfig | None = None
    """Train an adapter of low rank and keep the base, in `dtype`, as it is; None: train all weights."""
    trainable: str | None = Field(default=None, min_length=1)
    """Regular expression; only weights whose name in the HF checkpoint contains a match are trained. None: all."""
    parallel: ParallelConfig = ParallelConfig()
    collective_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that a trainer process waits for another one within a step; then the step fails."""
    snapshot: Literal["auto", "host", "stream"] = "auto"
    """`host`: a copy of the published weights stays in host memory, so a server that comes back gets them at any time, also
    during a step. `stream`: no copy takes memory; split weights pass through a file in TMPDIR, and whole ones are sent in
    place, so steps wait. `auto`: `host`, unless it would take over a third of the free memory."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of the worker."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    """AdamW moment decay rates, in [0, 1)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW decoupled weight decay, on matrices only."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up; a training step takes `minibatches` times `epochs` of them."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate from warm-up to the last step; `linear` and `cosine` end at 0."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""
    minibatches: int = Field(default=2, ge=1)
    """Optimizer steps per batch, each on samples drawn by the seed; the proximal log-probs are those before the first. With
    1, the ratio is always 1 and clipping never acts."""
    epochs: int = Field(default=1, ge=1, le=64)
    """Passes over a batch; each splits it into minibatches anew, and all clip around the weights before the first."""
    microbatch_tokens: int = Field(default=4096, ge=1)
    """Tokens, padding included, of one forward pass; affects memory, and the result within rounding."""
    shared_prefixes: Literal["auto", "off"] = "auto"
    """`auto`: a pass computes what its sequences have in common once, where that saves tokens; the
    result is the same within rounding."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third slower."""
    max_bad_steps: int = Field(default=3, ge=1)
    """Number of steps in a row with a non-finite loss or gradient that stops the run; each is skipped and reported."""
    call_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one call to the worker, seconds; a worker that is late, such as a stopped one, is killed."""
    restarts: int = Field(default=3, ge=0)
    """How often within an hour a run whose trainer worker died continues from its newest checkpoint, as `--resume` does."""

    @field_validator("trainable")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"expected a regular expression, got {pattern!r}: {error}; give such as layers\\.0\\."
            ) from None
        return pattern


def snapshot_kind(setting: Literal["auto", "host", "stream"], num_bytes: int, free: int | None) -> Literal["host", "stream"]:
    """Return what `trainer.snapshot` takes for weights of `num_bytes`, where `free` bytes are free; None: not known.

    Example:
        >>> snapshot_kind("auto", 100, 300), snapshot_kind("auto", 101, 300), snapshot_kind("host", 101, 300)
        ('host', 'stream', 'host')
    """
    if setting != "auto":
        return setting
    return "stream" if free is not None and num_bytes * AUTO_SHARE > free else "host"


class SftConfig(Config):
    """Supervised training on conversations: cross-entropy on assistant tokens only."""

    data: str
    """JSONL file; each line `{"messages": [...], "tools": [...]}`, tools optional."""
    steps: int = Field(default=1600, ge=1)
    """Optimizer steps."""
    conversations_per_step: int = Field(default=12, ge=1)
    """Conversations in one step."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` (Newton-Schulz orthogonalized momentum) for matrices, with AdamW for embeddings and norms."""
    lr: float = Field(default=1e-5, gt=0)
    """AdamW learning rate."""
    muon_lr: float = Field(default=0.02, gt=0)
    """Muon learning rate for matrices."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of linear warm-up."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""
    device: Device = "auto"
    """As `trainer.device`."""
    threads: int = Field(default=2, ge=1, le=1024)
    """CPU threads; the warm start runs alone on the machine."""
    seed: Seed = 0
    """Order of the conversations."""
