"""Estimates of the memory that a run takes: the trainer, each server, and a GPU that both share.

Invariant: an estimate is arithmetic over the run's settings and the shape of its model, from `config.json` or, for a
model that is not here, from the published Qwen3 that its path names. Where the shape is unknown there is no estimate.
Estimates are good to about a fifth, because allocators round up.

Legend for shapes: P parameters, V vocabulary, T tokens of one forward pass.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config import RunConfig
from agentrl.inference.config import CPU_RUNNING_REQUESTS, InferenceConfig
from agentrl.inference.launch.sglang import runs_on_cpu, tensor_parallel
from agentrl.plan.gpus import index_of, server_gpus

GIB = 2**30
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
_CUDA_BYTES = GIB
"""CUDA context and library workspaces of one process on a GPU."""
_MAX_LOGITS = 1 << 27
"""The most logits that the trainer makes at once (agentrl.trainer.model)."""
_BYTES_PER_LOGIT = 20
"""The head's output, its float32 copy, the scaled one, the log-softmax and the gradient."""
_CHECKPOINT_BYTES = 12
"""Bytes of a checkpoint for each parameter: the float32 weight and two moments of AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a decoder whose layers are alike: dense, or a mixture of experts in each.

    Example:
        >>> model_shape_of("/models/Qwen3-4B").num_parameters
        4022468096
    """

    hidden: int
    intermediate: int
    """Of the MLP, or of one expert."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    query_key_norm: bool = True
    attention_bias: bool = False
    experts: int = 0
    """Experts of each layer; 0: it is dense."""
    experts_per_token: int = 1
    """MLPs that a token goes through in each layer."""
    kind: str = "qwen3"
    """`model_type` of config.json."""

    @property
    def num_parameters(self) -> int:
        """P: embeddings, output head where it is not tied, attention, MLP or experts with their router, and norms."""
        return self.outside + self.layers * self.layer + self.hidden

    @property
    def outside(self) -> int:
        """Parameters of the embeddings, and of the output head where it is not tied."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys
        attention += 2 * self.head_dim * self.query_key_norm + (queries + 2 * keys) * self.attention_bias
        return attention + self.hidden * (3 * self.intermediate * max(1, self.experts) + self.experts) + 2 * self.hidden

    def kv_bytes(self, element_bytes: int) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    def saved_bytes(self, dtype: str, *, checkpointing: bool, tp: int = 1) -> int:
        """Return the bytes of activations that autograd keeps for one token, without the weights.

        The factors count the tensors that transformers' Qwen3 layer saves, for bfloat16 with float32 weights under autocast,
        which are more than with bfloat16 copies of the weights: 26 for 16 bytes, and 4 for 2 of a checkpointed input.
        A checkpointed layer keeps its float32 input only; one layer at a time is recomputed. Tensor parallelism splits what
        is within attention and MLP, not the inputs of layers and norms. A token's input is copied for each of its experts.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide = dtype == "float32"
        hidden, inner, query, key = (24, 16, 16.5, 16.25) if wide else (26, 8, 10.5, 10.25)
        copies = self.experts_per_token * (12 if wide else 6) if self.experts else 0
        within = inner * self.intermediate * self.experts_per_token + query * queries + key * keys
        layer = (hidden + copies) * self.hidden + within / tp
        return int(self.layers * 4 * self.hidden + layer) if checkpointing else int(self.layers * layer)


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = False, experts: int = 0) -> ModelShape:
    return ModelShape(
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=4 if experts else 8,
        head_dim=128,
        vocabulary=151_936,
        tied=tied,
        experts=experts,
        experts_per_token=8 if experts else 1,
        kind="qwen3_moe" if experts else "qwen3",
    )


_PUBLISHED = {
    "0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "8b": _qwen3(4096, 12_288, 36, 32),
    "14b": _qwen3(5120, 17_408, 40, 40),
    "32b": _qwen3(5120, 25_600, 64, 64),
    "30b-a3b": _qwen3(2048, 768, 48, 32, experts=128),
    "235b-a22b": _qwen3(4096, 1536, 94, 64, experts=128),
}


def model_shape_of(model_path: str) -> ModelShape | None:
    """Return the shape of a model from its config.json or, without that file, from the Qwen3 that its path names.

    None where neither gives a shape, and for models whose layers are not alike.
    """
    try:
        config: dict[str, Any] = json.loads((Path(model_path) / "config.json").read_bytes())
    except (OSError, ValueError):
        named = re.match(rf"qwen3-({'|'.join(map(re.escape, _PUBLISHED))})(?![\w.])", Path(model_path).name.lower())
        return None if named is None else _PUBLISHED[named[1]]
    try:
        return _from_config(config.get("text_config") or config)
    except KeyError:
        return None


def _from_config(config: dict[str, Any]) -> ModelShape | None:
    heads, kind = config["num_attention_heads"], config.get("model_type", "")
    mixed = kind == "qwen3_moe" and config.get("decoder_sparse_step", 1) == 1 and not config.get("mlp_only_layers")
    if not mixed and any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    return ModelShape(
        hidden=config["hidden_size"],
        intermediate=config["moe_intermediate_size" if mixed else "intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        query_key_norm=kind in ("qwen3", "qwen3_moe"),
        attention_bias=kind == "qwen2",
        experts=(config.get("num_experts") or config["num_local_experts"]) if mixed else 0,
        experts_per_token=config["num_experts_per_tok"] if mixed else 1,
        kind=kind,
    )


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

    @property
    def total(self) -> int:
        """The sum, with the CUDA context."""
        states, passing = self.weights + self.gradients + self.optimizer, self.activations + self.logits
        return states + self.copies + self.reduced + passing + _CUDA_BYTES


def _longest_pass(run: RunConfig) -> int:
    """Return the most tokens of one forward pass: a microbatch, or one sample that is longer than a microbatch."""
    return max(run.trainer.microbatch_tokens, run.inference.context_limit or 0)


def trainer_memory(run: RunConfig, shape: ModelShape) -> TrainerMemory:
    """Return the memory of one trainer process: its share of float32 weights, gradients and AdamW moments, and a microbatch.

    dp, cp and tp split weights, gradients and optimizer state; copies (`replicate`) do not. Several processes gather one
    layer at a time over dp and cp, in the type of the forward pass, so tp splits what they gather. cp splits the tokens of a
    microbatch, and tp the logits of each token.
    """
    trainer = run.trainer
    mesh = trainer.parallel.shape
    count = shape.num_parameters // (mesh.shards * mesh.tp)
    tokens = -(-_longest_pass(run) // mesh.cp)
    logits = min(tokens * shape.vocabulary, _MAX_LOGITS) // mesh.tp
    saved = shape.saved_bytes(trainer.dtype, checkpointing=trainer.gradient_checkpointing, tp=mesh.tp)
    return TrainerMemory(
        weights=4 * count,
        gradients=4 * count,
        optimizer=8 * count,
        copies=_gathered(run, shape) // mesh.tp,
        reduced=_unsplit_gradients(run, shape) // mesh.tp,
        activations=saved * tokens,
        logits=logits * _BYTES_PER_LOGIT,
    )


def checkpoint_memory(run: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of host memory that a trainer process takes for its part of a checkpoint until it is on the disk.

    Each element is in the part of one process, also where several hold it.
    """
    return _CHECKPOINT_BYTES * shape.num_parameters // run.trainer.parallel.shape.world


def _gathered(run: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of gathered weights."""
    return 0 if is_whole(run) else (shape.outside + 2 * shape.layer) * ELEMENT_BYTES[run.trainer.dtype]


def _unsplit_gradients(run: RunConfig, shape: ModelShape) -> int:
    size = ELEMENT_BYTES[run.trainer.dtype]
    return 0 if is_whole(run) else size * shape.outside + (size + 4) * shape.layer


def is_whole(run: RunConfig) -> bool:
    """Return whether weights are used in place: those of a single process of float32."""
    return run.trainer.parallel.shape.world == 1 and run.trainer.dtype == "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """Bytes that one launched server takes on each of its GPUs, or of the machine's memory."""

    weights: int
    kv_per_token: int
    kv_tokens: int
    """Tokens that its requests need together at their longest; with a smaller cache, requests wait."""

    @property
    def kv_wanted(self) -> int:
        """Bytes of a cache in which no request waits."""
        return self.kv_per_token * self.kv_tokens

    @property
    def fixed(self) -> int:
        """Bytes before the first token is cached."""
        return self.weights + _CUDA_BYTES


def running_requests(config: InferenceConfig) -> int | None:
    """Return how many sequences a launched server decodes together; None: as many as SGLang fits on its GPU."""
    on_cpu = config.backend == "embedded" or runs_on_cpu(config)
    return config.max_running_requests or (CPU_RUNNING_REQUESTS if on_cpu else None)


def server_memory(run: RunConfig, shape: ModelShape) -> ServerMemory:
    """Return the memory that a launched server takes on each of its GPUs."""
    inference = run.resolved_inference
    size = ELEMENT_BYTES[inference.dtype or "float32"]
    ways = tensor_parallel(inference) if inference.backend == "sglang" else 1
    requests = running_requests(inference) or run.rollout.max_concurrent_episodes
    return ServerMemory(
        weights=shape.num_parameters * size // ways,
        kv_per_token=shape.kv_bytes(size) // min(ways, shape.kv_heads),
        kv_tokens=requests * (inference.context_limit or 4096),
    )


def shared_gpus(run: RunConfig) -> tuple[int, ...]:
    """Return the GPUs that both the trainer and launched SGLang servers would use."""
    inference, device = run.inference, run.trainer.device
    if inference.backend != "sglang" or inference.urls or device == "cpu" or run.cluster.launcher != "local":
        return ()  # Ray gives each process GPUs of its own, and attached ranks are on machines of their own
    if runs_on_cpu(inference) and (inference.device == "cpu" or device == "auto"):
        return ()
    first = index_of(device)
    return tuple(sorted(server_gpus(run) & set(range(first, first + run.trainer.parallel.shape.world))))


def memory_rows(run: RunConfig) -> list[tuple[str, str]]:
    """Return the plan's rows on memory; none where the shape of the model is unknown."""
    shape = model_shape_of(run.model.local_path or run.model.path)
    if shape is None:
        return []
    trainer, mesh = trainer_memory(run, shape), run.trainer.parallel.shape
    states = f"weights {gib(trainer.weights)} + gradients {gib(trainer.gradients)} + AdamW {gib(trainer.optimizer)}, float32"
    copies = f"; gathered {gib(trainer.copies)} + gradients before they are split {gib(trainer.reduced)}"
    copies = copies if trainer.copies else ""
    tokens = -(-_longest_pass(run) // mesh.cp)
    batch = f"activations of {tokens} tokens {gib(trainer.activations)}; logits {gib(trainer.logits)}"
    experts = ", each layer gathered with all its experts" if shape.experts else ""
    count = f"{shape.num_parameters / 1e9:.2f}e9 parameters{experts}"
    each_process = "each trainer process" if mesh.world > 1 else "trainer"
    rows = [("memory", f"{each_process} about {gib(trainer.total)} GiB for {count}: {states}{copies}; {batch}")]
    rows.append(("", _checkpoint_row(run, shape)))
    if run.inference.urls:
        return rows
    server = server_memory(run, shape)
    room = f"a cache in which no request waits holds {server.kv_tokens} tokens and takes {gib(server.kv_wanted)} GiB"
    each = (
        f"each server: {gib(server.weights)} GiB of weights and {server.kv_per_token / 1024:.1f} KiB of KV cache per token"
    )
    ways = tensor_parallel(run.inference)
    rows.append(("", f"{each}{f', on each of its {ways} GPUs' if ways > 1 else ''}; {room}"))
    if gpus := shared_gpus(run):
        least = gib(trainer.total + server.fixed)
        bound = "limit the server with inference.sglang_args: [--mem-fraction-static, share of the GPU]"
        rows.append(("", f"trainer and server share GPU {gpus[0]}: {least} GiB before the first cached token; {bound}"))
    return rows


def _checkpoint_row(run: RunConfig, shape: ModelShape) -> str:
    each, world = checkpoint_memory(run, shape), run.trainer.parallel.shape.world
    row = "host memory for the copy of a checkpoint while it is written:"
    if world == 1:
        return f"{row} {gib(each)} GiB"
    if run.cluster.launcher != "local":
        return f"{row} {gib(each)} GiB for each of {world} trainer processes on their machines"
    return f"{row} {gib(each * world)} GiB, {gib(each)} GiB for each of {world} trainer processes"


def gib(count: int) -> str:
    """Return bytes as GiB, with one decimal."""
    return f"{count / GIB:.1f}"
