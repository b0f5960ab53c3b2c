"""Tokens per second, model FLOP/s utilization and peak memory of training steps on one GPU.

Run: `python -m benchmarks.gpu` (needs a CUDA device and 40 GB of disk; `--only NAME ...` takes some cases). It prints a line
a case, and writes benchmarks/results/gpu.json after each (`--results FILE`: another file, for another GPU).

Models have the shape of a published one and random weights. A step is `PolicyTrainer.step` on two samples of the case's
length (one of 65,536): checks, packing, forward, loss with diagnostics, backward with recomputed activations, clipping,
AdamW; the median of three after one that is not counted. A step on a few tokens goes before, so that the trees' kernel is
compiled.

`mfu` is over 989 TFLOP/s of dense bfloat16, and counts what full training takes for each token: 6 FLOP for each weight of a
matrix, the output head included, and 6 x layers x heads x head size x length for causal attention. An adapter on a frozen
base needs a third less of the former. What is recomputed is not counted.

In the cases of trees, 8 or 32 samples begin with a common prompt, which is the given part of their tokens. Three ways
train them: prefixes computed once, by one kernel (`kernel`) or run by run (`runs`), or with each sample (`off`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.prefixes import TokenTree
from agentrl.plan.memory import trainer_memory
from agentrl.plan.model import read_model
from agentrl.trainer import model as model_module
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.policy import PolicyTrainer
from agentrl.trainer.shared import SharedRow, shared_row
from agentrl.types import Int32Array
from benchmarks.machine import describe_machine
from benchmarks.shared_prefixes import batch

RESULTS = Path(__file__).parent / "results" / "gpu.json"
PEAK = 989e12
GIB = 2**30
Way = Literal["kernel", "runs", "off"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a published Qwen3."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    tied: bool = True

    @property
    def matrices(self) -> int:
        """Weights of the matrices that a token passes, the output head included."""
        attention = 2 * self.hidden * 128 * (self.heads + 8)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + VOCABULARY * self.hidden


VOCABULARY = 151_936
SHAPES = {
    "Qwen3-0.6B": Shape(1024, 3072, 28, 16),
    "Qwen3-1.7B": Shape(2048, 6144, 28, 16),
    "Qwen3-4B": Shape(2560, 9728, 36, 32),
    "Qwen3-8B": Shape(4096, 12288, 36, 32, tied=False),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, what of it is trained, and samples."""

    model: str
    rank: int
    """Of the adapter; 0: all weights are trained."""
    length: int
    samples: int = 2
    common: float = 0.0
    way: Way = "off"

    @property
    def name(self) -> str:
        what = f"r{self.rank}" if self.rank else "full"
        tree = f"-{self.samples}x{self.common:.0%}-{self.way}" if self.samples > 2 else ""
        return f"{self.model}-{what}-{self.length}{tree}"


CASES = (
    Case("Qwen3-0.6B", 0, 16_384),
    Case("Qwen3-0.6B", 16, 16_384),
    Case("Qwen3-4B", 16, 16_384),
    Case("Qwen3-8B", 16, 16_384),
    Case("Qwen3-1.7B", 0, 16_384),
    Case("Qwen3-4B", 16, 65_536, 1),
    *(Case("Qwen3-4B", 16, 4096, 32, 0.9, way) for way in ("off", "runs", "kernel")),
    *(Case("Qwen3-4B", 16, 4096, 8, common, way) for common in (0.9, 0.75, 0.5) for way in ("off", "runs", "kernel")),
)


def checkpoint(name: str, folder: Path) -> Path:
    """Write a random model of a published shape in bfloat16, and return its directory."""
    shape, path = SHAPES[name], folder / name
    if path.exists():
        return path
    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=VOCABULARY,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=131_072,
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
    )
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in module.state_dict().items():
        if shape.tied and key == "lm_head.weight":
            continue
        made = torch.ones(tensor.shape, dtype=torch.bfloat16, device="cuda")
        tensors[key] = (made if tensor.dim() == 1 else made.normal_(0, 0.02)).cpu()
    path.mkdir(parents=True)
    config.save_pretrained(path)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def sequences(case: Case) -> list[tuple[Int32Array, int]]:
    """Return each sample's tokens and where those begin that are trained."""
    random, common = np.random.default_rng(0), int(case.common * case.length)
    prompt = random.integers(0, VOCABULARY, common).astype(np.int32)
    rest = random.integers(0, VOCABULARY, (case.samples, case.length - common)).astype(np.int32)
    return [(np.concatenate([prompt, own]), max(common, 1)) for own in rest]


def rows_by(way: Way) -> Callable[[TokenTree, torch.device], SharedRow]:
    return lambda tree, device: shared_row(tree, device, one_kernel=way == "kernel")


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Return the figures of one case."""
    path = checkpoint(case.model, folder)
    given: dict[str, object] = {"lora": {"rank": case.rank, "alpha": 2 * case.rank}} if case.rank else {}
    tokens = case.length if case.samples <= 2 else 8 * case.length
    config = TrainerConfig.model_validate(
        {
            **given,
            **{"device": "cuda", "dtype": "bfloat16", "lr": 1e-5, "minibatches": 1, "gradient_checkpointing": True},
            **{"microbatch_tokens": tokens, "shared_prefixes": "off" if case.way == "off" else "auto"},
        }
    )
    model_module.shared_row = rows_by(case.way)  # what the benchmark compares is no setting
    model = PolicyModel(
        path,
        device=torch.device("cuda"),
        dtype="bfloat16",
        gradient_checkpointing=True,
        share=case.way != "off",
        lora=config.lora,
    )
    trainer = PolicyTrainer(model, config, AlgorithmConfig(), total_steps=100)
    trainer.step(batch(sequences(Case(case.model, 0, 512, max(case.samples, 2), case.common)), VOCABULARY))
    data, times = batch(sequences(case), VOCABULARY), list[float]()
    torch.cuda.reset_peak_memory_stats()
    metrics: Mapping[str, float] = {}
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        metrics = trainer.step(data).metrics
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    seconds, count, shape = median(times[1:]), case.samples * case.length, SHAPES[case.model]
    attention = 6 * shape.layers * shape.heads * 128 * case.length
    known = read_model(str(path)).shape
    assert known is not None
    return {
        "case": case.name,
        "step_s": round(seconds, 3),
        "tokens_per_s": round(count / seconds),
        "mfu": round(count * (6 * shape.matrices + attention) / seconds / PEAK, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 1),
        "planned_gib": round(trainer_memory(config, known, case.length).total / GIB, 1),
        "computed_tokens": metrics["computed_tokens"],
        "loss": metrics["loss"],
        "grad_norm": metrics["grad_norm"],
    }


def run(cases: Sequence[Case], folder: Path, results: Path) -> None:
    rows: list[dict[str, Any]] = json.loads(results.read_text())["rows"] if results.exists() else []
    for case in cases:
        row = measure(case, folder)
        gc.collect()  # the trainer before, so that the next one's peak is its own
        torch.cuda.empty_cache()
        rows = [*(each for each in rows if each["case"] != case.name), row]
        print(json.dumps(row), flush=True)
        machine = describe_machine("torch", "transformers") | {"gpu": torch.cuda.get_device_name()}
        results.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="the cases that run")
    parser.add_argument("--folder", type=Path, help="where models are written and found again; default: a temporary one")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where figures go; default: %(default)s")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    cases = [case for case in CASES if arguments.only is None or case.name in arguments.only]
    with tempfile.TemporaryDirectory() as temporary:
        run(cases, arguments.folder or Path(temporary), arguments.results)


if __name__ == "__main__":
    main()
