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
from agentrl.jobs.plan.gpus import index_of, server_gpus

GIB = 2**30
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
_CUDA_BYTES = GIB
"""CUDA context and library workspaces of one process on a GPU."""
_MAX_LOGITS = 1 << 27
"""The most logits that the trainer makes at once (agentrl.trainer.model)."""
_BYTES_PER_LOGIT = 20
"""The head's output, its float32 copy, the scaled one, the log-softmax and the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a dense decoder.

    Example:
        >>> model_shape_of("/models/Qwen3-4B").num_parameters
        4022468096
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    query_key_norm: bool = True
    attention_bias: bool = False

    @property
    def num_parameters(self) -> int:
        """P: embeddings, output head where it is not tied, attention, MLP and norms."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys
        attention += 2 * self.head_dim * self.query_key_norm + (queries + 2 * keys) * self.attention_bias
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.layers * layer + self.hidden

    def kv_bytes(self, element_bytes: int) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes

    def saved_bytes(self, dtype: str, *, checkpointing: bool) -> int:
        """Return the bytes of activations that autograd keeps for one token, without the weights.

        The factors count the tensors that transformers' Qwen3 layer saves, for bfloat16 with float32 weights under autocast.
        A checkpointed layer keeps its float32 input only; one layer at a time is recomputed.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide = dtype == "float32"
        hidden, inner, query, key = (24, 16, 16.5, 16.25) if wide else (26, 8, 10.5, 10.25)
        layer = hidden * self.hidden + inner * self.intermediate + query * queries + key * keys
        return int(self.layers * 4 * self.hidden + layer) if checkpointing else int(self.layers * layer)


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> ModelShape:
    return ModelShape(
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        vocabulary=151_936,
        tied=tied,
    )


_PUBLISHED = {
    "0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "8b": _qwen3(4096, 12_288, 36, 32, tied=False),
}


def model_shape_of(model_path: str) -> ModelShape | None:
    """Return the shape of a model from its config.json or, without that file, from the Qwen3 that its path names.

    None where neither gives a shape, and for models that are not uniformly dense.
    """
    try:
        config: dict[str, Any] = json.loads((Path(model_path) / "config.json").read_bytes())
    except (OSError, ValueError):
        named = re.match(r"qwen3-(0\.6b|1\.7b|4b|8b)(?![\w.])", Path(model_path).name.lower())
        return None if named is None else _PUBLISHED[named[1]]
    try:
        return _from_config(config.get("text_config") or config)
    except KeyError:
        return None


def _from_config(config: dict[str, Any]) -> ModelShape | None:
    if any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    heads, kind = config["num_attention_heads"], config.get("model_type")
    return ModelShape(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        query_key_norm=kind == "qwen3",
        attention_bias=kind == "qwen2",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes that the trainer holds at its peak, in the backward pass of a full microbatch."""

    weights: int
    gradients: int
    optimizer: int
    copies: int
    """Weights gathered for the forward pass: embeddings, head and two layers, in its type."""
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """The sum, with the CUDA context."""
        return self.weights + self.gradients + self.optimizer + self.copies + self.activations + self.logits + _CUDA_BYTES


def _longest_pass(run: RunConfig) -> int:
    """Return the most tokens of one forward pass: a microbatch, or one sample that is longer than a microbatch."""
    return max(run.trainer.microbatch_tokens, run.inference.context_limit or 0)


def trainer_memory(run: RunConfig, shape: ModelShape) -> TrainerMemory:
    """Return the memory of one trainer process: its share of float32 weights, gradients and AdamW moments, and a microbatch.

    Several processes each gather one layer at a time, in the type of the forward pass.
    """
    trainer = run.trainer
    mesh = trainer.parallel.shape
    count = shape.num_parameters // (mesh.shards * mesh.tp)
    logits = min(_longest_pass(run) * shape.vocabulary, _MAX_LOGITS)
    saved = shape.saved_bytes(trainer.dtype, checkpointing=trainer.gradient_checkpointing)
    return TrainerMemory(
        weights=4 * count,
        gradients=4 * count,
        optimizer=8 * count,
        copies=_gathered(run, shape),
        activations=saved * _longest_pass(run),
        logits=logits * _BYTES_PER_LOGIT,
    )


def _gathered(run: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of gathered weights; float32 weights of a single process are used in place."""
    trainer = run.trainer
    if trainer.parallel.shape.world == 1 and trainer.dtype == "float32":
        return 0
    outside = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    layer = (shape.num_parameters - outside) // shape.layers
    return (outside + 2 * layer) * ELEMENT_BYTES[trainer.dtype]


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
    if inference.backend != "sglang" or inference.urls or device == "cpu":
        return ()
    if runs_on_cpu(inference) and (inference.device == "cpu" or device == "auto"):
        return ()
    first = index_of(device)
    return tuple(sorted(server_gpus(run) & set(range(first, first + run.trainer.parallel.shape.world))))


def memory_rows(run: RunConfig) -> list[tuple[str, str]]:
    """Return the plan's rows on memory; none where the shape of the model is unknown."""
    shape = model_shape_of(run.model.local_path or run.model.path)
    if shape is None:
        return []
    trainer = trainer_memory(run, shape)
    states = (
        f"weights {_gib(trainer.weights)} + gradients {_gib(trainer.gradients)} + AdamW {_gib(trainer.optimizer)}, float32"
    )
    copies = f"; gathered for the forward pass {_gib(trainer.copies)}" if trainer.copies else ""
    batch = f"activations of {_longest_pass(run)} tokens {_gib(trainer.activations)}; logits {_gib(trainer.logits)}"
    count = f"{shape.num_parameters / 1e9:.2f}e9 parameters"
    each_process = "each trainer process" if run.trainer.parallel.shape.world > 1 else "trainer"
    rows = [("memory", f"{each_process} about {_gib(trainer.total)} GiB for {count}: {states}{copies}; {batch}")]
    if run.inference.urls:
        return rows
    server = server_memory(run, shape)
    room = f"a cache in which no request waits holds {server.kv_tokens} tokens and takes {_gib(server.kv_wanted)} GiB"
    each = (
        f"each server: {_gib(server.weights)} GiB of weights and {server.kv_per_token / 1024:.1f} KiB of KV cache per token"
    )
    ways = tensor_parallel(run.inference)
    rows.append(("", f"{each}{f', on each of its {ways} GPUs' if ways > 1 else ''}; {room}"))
    if gpus := shared_gpus(run):
        least = _gib(trainer.total + server.fixed)
        bound = "limit the server with inference.sglang_args: [--mem-fraction-static, share of the GPU]"
        rows.append(("", f"trainer and server share GPU {gpus[0]}: {least} GiB before the first cached token; {bound}"))
    return rows


def _gib(count: int) -> str:
    return f"{count / GIB:.1f}"
