"""Estimates of the memory that a run takes: the trainer, each server, and copies in host memory.

Invariant: an estimate is arithmetic over settings and the shape of the model. Where the shape is unknown there is none.
Estimates are good to about a fifth, because allocators round up.

Legend for shapes: P parameters, V vocabulary, T tokens of one forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentrl.algo.config import AlgorithmConfig
from agentrl.config import RunConfig
from agentrl.inference.backend import SPARE_ROWS
from agentrl.inference.config import CPU_RUNNING_REQUESTS, InferenceConfig, runs_on_cpu, tensor_parallel
from agentrl.plan.model import ModelShape
from agentrl.trainer.config import TrainerConfig, snapshot_kind

GIB = 2**30
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
_CUDA_BYTES = GIB
"""CUDA context and library workspaces of one process on a GPU."""
_MAX_LOGITS = 1 << 27
"""The most logits that the trainer makes at once (agentrl.trainer.model)."""
_BYTES_PER_LOGIT = 20
"""The head's output, its float32 copy, the scaled one, the log-softmax and the gradient."""
_PROCESS_BYTES = int(0.28 * GIB)
"""Memory of an embedded server's process before its weights: Python, torch and the HTTP server."""
_CHECKPOINT_BYTES = 12
"""Bytes of a checkpoint for each parameter: the float32 weight and two moments of AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes that the trainer holds at its peak, in the backward pass of a full microbatch."""

    weights: int
    gradients: int
    optimizer: int
    copies: int
    """Weights gathered for the forward pass: embeddings, head and two layers, in its type."""
    reduced: int
    """Gradients before they are split: of embeddings and head in the type of the pass, of a layer in float32 too."""
    activations: int
    logits: int
    beside: int = 0
    """A critic and a reference of their own: weights, and what the critic's training takes."""

    @property
    def total(self) -> int:
        """The sum, with the CUDA context."""
        states, passing = self.weights + self.gradients + self.optimizer, self.activations + self.logits
        return states + self.copies + self.reduced + passing + self.beside + _CUDA_BYTES


def longest_pass(trainer: TrainerConfig, context_limit: int | None) -> int:
    """Return the most tokens of one forward pass: a microbatch, or one sample that is longer than a microbatch."""
    return max(trainer.microbatch_tokens, context_limit or 0)


def owns_critic(algorithm: AlgorithmConfig) -> bool:
    """Return whether the critic is a model of its own."""
    return algorithm.critic is not None and algorithm.critic.model == "own"


def trainer_memory(
    trainer: TrainerConfig, shape: ModelShape, context_limit: int | None, algorithm: AlgorithmConfig | None = None
) -> TrainerMemory:
    """Return the memory of one trainer process: its share of float32 weights, gradients and AdamW moments, and a microbatch.

    With `trainer.lora` gradients and moments are those of the adapter, and the base has the type of the forward pass.
    `trainer.trainable` is not looked at: an estimate is that of training all weights.

    dp, cp and tp split weights, gradients and optimizer state; copies (`replicate`) do not. Several processes gather one
    layer at a time over dp and cp, in the type of the forward pass, so tp splits what they gather. cp splits the tokens of a
    microbatch, and tp the logits of each token.
    """
    mesh, size = trainer.parallel.shape, ELEMENT_BYTES[trainer.dtype]
    ways = mesh.shards * mesh.tp
    count, outside, layer = shape.num_parameters // ways, shape.outside, shape.layer
    weights = 4 * count
    if trainer.lora is not None:  # gradients and moments of the adapter only, and a base in the type of the pass
        layer = shape.adapter_layer(trainer.lora.rank, trainer.lora.targets)
        count, outside = shape.layers * layer // ways, 0
        weights = size * (shape.num_parameters // ways) + 4 * count
    tokens = -(-longest_pass(trainer, context_limit) // mesh.cp)
    logits = min(tokens * shape.vocabulary, _MAX_LOGITS) // mesh.tp
    saved = shape.saved_bytes(trainer.dtype, checkpointing=trainer.gradient_checkpointing, tp=mesh.tp)
    whole = is_whole(trainer)
    extra_bytes = 0
    if algorithm is not None and owns_critic(algorithm):
        extra_bytes += 16 * (shape.num_parameters // ways) + saved * tokens
    if algorithm is not None and algorithm.reference is not None:
        extra_bytes += 4 * (shape.num_parameters // ways)
    return TrainerMemory(
        weights=weights,
        gradients=4 * count,
        optimizer=8 * count,
        copies=0 if whole or is_frozen(trainer) else (shape.outside + 2 * shape.layer) * size // mesh.tp,
        reduced=0 if whole else (size * outside + (size + 4) * layer) // mesh.tp,
        activations=saved * tokens,
        logits=logits * _BYTES_PER_LOGIT,
        beside=extra_bytes,
    )


def is_frozen(trainer: TrainerConfig) -> bool:
    """Return whether passes use the base below an adapter in place, as a single process does."""
    return trainer.lora is not None and trainer.parallel.shape.world == 1


def trained_parameters(trainer: TrainerConfig, shape: ModelShape) -> int:
    """Return the number of trained parameters: of the adapter, or of the model, whatever `trainer.trainable` selects."""
    if trainer.lora is None:
        return shape.num_parameters
    return shape.layers * shape.adapter_layer(trainer.lora.rank, trainer.lora.targets)


def adapter_problems(trainer: TrainerConfig, shape: ModelShape | None) -> list[str]:
    """Return an error where a target names no layer, or the rank of the adapter is above the size of one."""
    if trainer.lora is None or shape is None:
        return []
    absent = [target for target in trainer.lora.targets if target not in shape.linear_sizes]
    if absent:
        return [
            f"trainer.lora.targets: the layers of a {shape.kind} model have no {', '.join(absent)}; choose among "
            f"{', '.join(shape.linear_sizes)}"
        ]
    smallest = min(trainer.lora.targets, key=lambda target: min(shape.linear_sizes[target]))
    size = min(shape.linear_sizes[smallest])
    if trainer.lora.rank <= size:
        return []
    return [
        f"trainer.lora.rank: {trainer.lora.rank} is above the size of {smallest}, {list(shape.linear_sizes[smallest])}, "
        f"which has no larger update; at most {size}"
    ]


def is_whole(trainer: TrainerConfig) -> bool:
    """Return whether weights are used in place: those of a single process of float32."""
    return trainer.parallel.shape.world == 1 and trainer.dtype == "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """Bytes that one launched server takes on each of its GPUs, or of the machine's memory."""

    weights: int
    kv_per_token: int
    adapters: int
    """Bytes of the LoRA adapters that it holds at once."""
    kv_tokens: int
    """Tokens that its requests need together at their longest; with a smaller cache, requests wait."""
    peak: int | None = None
    """Bytes of the machine's memory that an embedded server on a CPU takes at most; None: another server."""

    @property
    def kv_wanted(self) -> int:
        """Bytes of a cache in which no request waits."""
        return self.kv_per_token * self.kv_tokens

    @property
    def fixed(self) -> int:
        """Bytes before the first token is cached."""
        return self.weights + self.adapters + _CUDA_BYTES


def running_requests(config: InferenceConfig) -> int | None:
    """Return how many sequences a launched server decodes together; None: as many as SGLang fits on its GPU."""
    on_cpu = config.backend == "embedded" or runs_on_cpu(config)
    return config.max_running_requests or (CPU_RUNNING_REQUESTS if on_cpu else None)


def server_memory(run: RunConfig, shape: ModelShape) -> ServerMemory:
    """Return the memory that a launched server takes on each of its GPUs."""
    inference = run.resolved_inference
    size = ELEMENT_BYTES[inference.dtype or "float32"]
    ways = gpus_per_server(inference)
    requests = running_requests(inference) or run.rollout.max_concurrent_episodes
    memory = ServerMemory(
        weights=shape.num_parameters * size // ways,
        adapters=run.served_adapters * size * trained_parameters(run.trainer, shape) // ways,
        kv_per_token=shape.kv_bytes(size) // min(ways, shape.kv_heads),
        kv_tokens=requests * (inference.context_limit or 4096),
    )
    if inference.backend != "embedded" or inference.device.startswith("cuda"):
        return memory
    return replace(memory, peak=_embedded_peak(run, memory, shape, requests))


def _embedded_peak(run: RunConfig, memory: ServerMemory, shape: ModelShape, requests: int) -> int:
    """Return the most bytes that an embedded server takes: with a full cache, while it reads the weights of an update.

    The cache has rows for prefixes too. Weights are read beside those that are served, and copied; an adapter is small.
    """
    arriving = ELEMENT_BYTES[run.resolved_inference.dtype or "float32"] if run.route.method == "distributed" else 4
    read = 0 if run.sync.adapter == "adapter" else shape.num_parameters * arriving + memory.weights
    rows = requests + min(requests, SPARE_ROWS)
    logits = requests * shape.vocabulary * _BYTES_PER_LOGIT
    held = memory.weights + max(shape.num_parameters * 4, memory.kv_wanted * rows // requests + logits + read)
    return _PROCESS_BYTES + memory.adapters + held


def gpus_per_server(inference: InferenceConfig) -> int:
    """Return the GPUs of one launched server; a server on the CPU counts as one."""
    return tensor_parallel(inference) if inference.backend == "sglang" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMemory:
    """Host memory for a copy of the published weights (`trainer.snapshot`), on rank 0."""

    num_bytes: int
    dtype: str
    """Type of the copy: of the wire, or, in files, of the trained weights."""
    sends: bool
    """Whether weights leave from memory; else they are written to files."""
    free: int | None
    """Bytes that are free for it here; None: not known, as on another machine."""
    adapter: bool = False
    """Whether it is of an adapter alone, which is copied whatever `trainer.snapshot` says."""

    def problems(self, trainer: TrainerConfig) -> list[str]:
        """Return an error where `trainer.snapshot: host` asks for more memory than is free."""
        needed = self.num_bytes * (2 if self.sends else 1)
        if self.adapter or trainer.snapshot != "host" or self.free is None or needed <= self.free:
            return []
        return [
            f"trainer.snapshot: host takes {gib(needed)} GiB of host memory on rank 0, and {gib(self.free)} GiB are free "
            "for it; set stream or auto"
        ]

    def row(self, trainer: TrainerConfig) -> str:
        """Return the row of the plan, with the choice that the trainer makes."""
        where, size = "host memory of rank 0 for published weights:", f"{gib(self.num_bytes)} GiB of {self.dtype}"
        setting = trainer.snapshot
        if self.adapter:
            return f"{where} {self.num_bytes / 2**20:.1f} MiB of {self.dtype}, the adapter, until it is written"
        if setting == "auto" and self.free is None:
            return f"{where} {size}; trainer.snapshot auto: rank 0 decides by the memory that is free on its machine"
        kind = snapshot_kind(setting, self.num_bytes, self.free)
        found = (
            ""
            if setting != "auto" or self.free is None
            else f" auto takes {kind}, with {gib(self.free)} GiB free for it here"
        )
        choice = f"trainer.snapshot{found or f' is {setting}'}"
        if kind == "stream" and is_whole(trainer):
            return f"{where} none, where a copy takes {size}; {choice}: steps wait until weights have left"
        if kind == "stream":
            return f"{where} none; {choice}: {size} in a file of TMPDIR"
        how_long = ", twice while a server still takes the version before" if self.sends else " until they are written"
        return f"{where} {size}{how_long}; {choice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """The memory of the parts of a run."""

    trainer: TrainerMemory
    """Of each trainer process."""
    checkpoint: int
    """Bytes of host memory that each trainer process takes for its part of a checkpoint until it is on the disk. An element
    is in the part of one process, also where several hold it."""
    server: ServerMemory
    """Of a server that the run launches."""
    snapshot: SnapshotMemory


def run_memory(run: RunConfig, shape: ModelShape, free: int | None, *, trains_on_cpu: bool, sends: bool) -> RunMemory:
    """Return the memory of a run whose mesh has numbers; `free` are the bytes of host memory that are free here, if known.

    `trains_on_cpu`: the trainer takes its share of them. `sends`: weights leave from memory.
    """
    trainer = trainer_memory(run.trainer, shape, run.inference.context_limit, run.algorithm)
    world = run.trainer.parallel.shape.world
    if run.cluster.launcher != "local":
        free = None
    elif free is not None and trains_on_cpu:
        free = max(0, free - (trainer.weights + trainer.optimizer + trainer.beside) * world)
    as_trained = "float32" if run.trainer.lora is None else run.trainer.dtype
    dtype = (run.resolved_inference.dtype or "float32") if sends else as_trained
    copy = SnapshotMemory(num_bytes=shape.num_parameters * ELEMENT_BYTES[dtype], dtype=dtype, sends=sends, free=free)
    if run.sync.adapter == "adapter":
        count = trained_parameters(run.trainer, shape)
        copy = SnapshotMemory(num_bytes=4 * count, dtype="float32", sends=False, free=free, adapter=True)
    saved = trained_parameters(run.trainer, shape) + (shape.num_parameters if owns_critic(run.algorithm) else 0)
    return RunMemory(
        trainer=trainer,
        checkpoint=(_CHECKPOINT_BYTES * saved + _reference_bytes(run.algorithm, shape)) // world,
        server=server_memory(run, shape),
        snapshot=copy,
    )


def _reference_bytes(algorithm: AlgorithmConfig, shape: ModelShape) -> int:
    """Return the bytes of a checkpoint for a reference that changes."""
    changes = algorithm.reference is not None and algorithm.reference.refresh_every > 0
    return 4 * shape.num_parameters if changes else 0


def gib(count: int) -> str:
    """Return bytes as GiB, with one decimal."""
    return f"{count / GIB:.1f}"
