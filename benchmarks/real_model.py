"""A model of real size on the embedded server and in the trainer, beside what the machine can do.

Run: `python -m benchmarks.real_model` (an hour or two on idle cores). It prints a table of the server and one of the
trainer, and overwrites benchmarks/results/real_model.json after each row. The model is of the shape of
SmolLM2-135M (30 layers, 49,152 words) with random weights, since speed does not depend on them; `--model DIR` takes a real
one, `--gguf FILE` compares with llama.cpp too where `llama_cpp` is installed, and `--threads`, `--dtypes`, `--requests`,
`--prompts` and `--batches` choose rows. `--quick` trains on small batches.

  ours        EmbeddedEngine, all requests at once, sampled at temperature 0.7
  generate    Hugging Face `generate` of the same batch, sampled likewise
  roof        the same products alone, by `torch.mm`, without attention, norms, sampling and copies; a step with so few
              rows that it only reads weights is bound by the bandwidth of memory, which the products show too
  bandwidth   bytes of the weights over the seconds of a large copy, in steps per second; decoding only

Rates are tokens per CPU second of the process, with its threads together; rates of the clock are in the JSON. Our prefill is
timed by requests of one token, and our decode by the same requests again, whose prompts are in the cache. Each row has a
process of its own, in which the three take turns.

The trainer's roof is its matrix products, forward and twice backward, at the rate of `torch.mm` with the tokens of a pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import anyio
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StoppingCriteriaList
from transformers.utils import logging

from agentrl.algo.config import AlgorithmConfig
from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.servers.engine import EngineRequest, EngineSampling
from agentrl.trainer.base import TrainBatch, TrainSample
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.policy import PolicyTrainer
from agentrl.types import Sample
from benchmarks.embedded_decode import Meter
from benchmarks.machine import describe_machine

RESULT = Path(__file__).parent / "results" / "real_model.json"
TEMPERATURE = 0.7
OUTPUT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of the server's table."""

    dtype: str
    threads: int
    requests: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds of this process, and seconds of the clock."""

    cpu: float
    wall: float

    def less(self, other: Spent) -> Spent:
        """Return the difference; never so small that a rate is without bound."""
        return Spent(max(self.cpu - other.cpu, 1e-3), max(self.wall - other.wall, 1e-3))


class Watch:
    """Measures from its making on."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def spent(self) -> Spent:
        """Return what was spent so far."""
        return Spent(time.process_time() - self._cpu, time.perf_counter() - self._wall)


def shape_of_smollm2(folder: Path) -> Path:
    """Write a model of the shape of SmolLM2-135M with random weights."""
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def prompts_of(case: Case, vocabulary: int) -> torch.Tensor:
    """Return [requests, prompt] random words, none of which begins as another one does."""
    generator = torch.Generator().manual_seed(case.requests)
    return torch.randint(100, vocabulary, (case.requests, case.prompt), generator=generator)


class Ours:
    """The embedded engine."""

    def __init__(self, path: Path, case: Case) -> None:
        self._engine = EmbeddedEngine(
            EngineOptions(
                model_path=str(path),
                dtype=cast("Any", case.dtype),
                max_running_requests=case.requests,
                max_context_tokens=case.prompt + OUTPUT + 16,
                memory_fraction=0.6,
            )
        )

    async def run(self, prompts: torch.Tensor) -> tuple[Spent, Spent]:
        """Return the cost of prefill and decode."""
        return await self._requests(prompts, 1), await self._requests(prompts, OUTPUT)

    async def _requests(self, prompts: torch.Tensor, tokens: int) -> Spent:
        """Return the cost of `tokens` output tokens for each prompt, of which the cache has what it has."""
        meter, watch = Meter(len(prompts)), Watch()
        async with anyio.create_task_group() as group:
            group.start_soon(self._engine.run)
            sampling = EngineSampling(max_new_tokens=tokens, ignore_eos=True, temperature=TEMPERATURE)
            for number, ids in enumerate(prompts.tolist()):
                self._engine.submit(EngineRequest(rid=f"{number:032x}", input_ids=ids, sampling=sampling), meter)
            await meter.done.wait()
            group.cancel_scope.cancel()
        return watch.spent()


class Generate:
    """Hugging Face."""

    def __init__(self, path: Path, case: Case) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(path), dtype=getattr(torch, case.dtype))

    @torch.inference_mode()
    def run(self, prompts: torch.Tensor) -> tuple[Spent, Spent]:
        """Return the cost of prefill and decode."""
        prefill, watch = list[Spent](), Watch()

        def after_each_token(ids: torch.Tensor, _: object, **__: object) -> torch.Tensor:
            if not prefill:
                prefill.append(watch.spent())
            return torch.zeros(len(ids), dtype=torch.bool)

        cast("Any", self._model).generate(
            input_ids=prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=OUTPUT, min_new_tokens=OUTPUT,
            do_sample=True, temperature=TEMPERATURE, top_k=0, pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([cast("Any", after_each_token)]),
        )  # fmt: skip
        return prefill[0], watch.spent().less(prefill[0])


class Roof:
    """The products of a step, and nothing else."""

    def __init__(self, path: Path, dtype: str) -> None:
        module = AutoModelForCausalLM.from_pretrained(str(path), dtype=getattr(torch, dtype))
        self.head = cast("torch.nn.Linear", module.get_output_embeddings()).weight.detach()
        linear = [part for part in module.model.modules() if isinstance(part, torch.nn.Linear)]
        self.weights = [part.weight.detach() for part in linear]
        self.bytes = sum(weight.numel() * weight.itemsize for weight in [*self.weights, self.head])

    @torch.inference_mode()
    def step(self, rows: int, sampled: int) -> Spent:
        """Return the least cost of two steps over `rows` tokens, `sampled` of which get logits."""
        sizes = {weight.shape[1] for weight in [*self.weights, self.head]}
        inputs = {size: torch.randn(rows, size).to(self.head.dtype) for size in sizes}

        def once() -> Spent:
            watch = Watch()
            for weight in self.weights:
                torch.mm(inputs[weight.shape[1]], weight.t())
            if sampled:
                torch.mm(inputs[self.head.shape[1]][:sampled], self.head.t())
            return watch.spent()

        return min((once() for _ in range(3)), key=lambda spent: spent.cpu)


def copy_bandwidth() -> float:
    """Return bytes that memory gives a second, by the best of some copies, in which each byte is read and written."""
    source = torch.zeros(1 << 26)
    target = torch.zeros_like(source)
    seconds: list[float] = []
    for _ in range(5):
        watch = Watch()
        target.copy_(source)
        seconds.append(watch.spent().wall)
    return 2 * source.numel() * source.itemsize / min(seconds)


def server_row(case: Case, path: Path) -> dict[str, float]:
    """Return the rates of a case."""
    torch.set_num_threads(case.threads)
    roof = Roof(path, case.dtype)
    prompts = prompts_of(case, len(roof.head))
    row = {"bandwidth_steps_per_s": copy_bandwidth() / roof.bytes}
    chunk = min(case.requests * case.prompt, 512)
    products = {"prefill": roof.step(chunk, 0), "decode": roof.step(case.requests, case.requests)}
    size = {"prefill": case.requests * case.prompt, "decode": case.requests * (OUTPUT - 1)}
    computed = {"prefill": chunk, "decode": case.requests}
    costs = {"ours": anyio.run(Ours(path, case).run, prompts), "generate": Generate(path, case).run(prompts)}
    for at, part in enumerate(("prefill", "decode")):
        for name, cost in costs.items():
            # The first token of `generate` is part of its prefill.
            tokens = size[part] + (case.requests if (part, name) == ("decode", "ours") else 0)
            row[f"{part}_{name}_per_cpu_s"] = tokens / cost[at].cpu
            row[f"{part}_{name}_per_s"] = tokens / cost[at].wall
        row[f"{part}_roof_per_cpu_s"] = computed[part] / products[part].cpu
    return row


def llama_cpp_row(case: Case, file: Path) -> dict[str, float]:
    """Return the rates of llama.cpp for one request after another, or nothing where it is not installed."""
    if find_spec("llama_cpp") is None or case.requests != 1:
        return {}
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    model: Any = Llama(str(file), n_ctx=case.prompt + OUTPUT, n_threads=case.threads, verbose=False)
    model.eval(list(range(100, 110)))
    model.reset()
    watch = Watch()
    model.eval(list(range(100, 100 + case.prompt)))
    prefill = watch.spent()
    watch = Watch()
    for _ in range(OUTPUT - 1):
        model.eval([model.sample(temp=TEMPERATURE)])
    return {
        "prefill_llama_cpp_per_cpu_s": case.prompt / prefill.cpu,
        "decode_llama_cpp_per_cpu_s": (OUTPUT - 1) / watch.spent().cpu,
    }


def episodes(*, groups: int, members: int, shared: int, own: int, vocabulary: int) -> TrainBatch:
    """Return groups of episodes with a prompt in common, of whose own tokens half are trained."""
    random, samples = np.random.default_rng(0), list[TrainSample]()
    for group in range(groups):
        prompt = random.integers(100, vocabulary, shared)
        for _ in range(members):
            ids = np.concatenate([prompt, random.integers(100, vocabulary, own)]).astype(np.int32)
            mask = np.arange(len(ids)) >= shared
            mask &= np.arange(len(ids)) // 16 % 2 == 0
            sample = Sample(
                token_ids=ids,
                loss_mask=mask,
                behavior_logprobs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
                token_versions=np.where(mask, 1, -1).astype(np.int32),
                turn_index=np.zeros(len(ids), np.int32),
                temperatures=np.full(len(ids), TEMPERATURE, np.float32),
            )
            advantages = np.where(mask, random.normal(), 0).astype(np.float32)
            samples.append(TrainSample(sample=sample, advantages=advantages, group=group))
    return TrainBatch(samples=tuple(samples), policy_version=1)


def trainer_row(name: str, dtype: str, threads: int, path: Path, *, quick: bool) -> dict[str, float]:
    """Return the rates of the second of two steps."""
    torch.set_num_threads(threads)
    roof = Roof(path, dtype)
    config = TrainerConfig(lr=1e-5, minibatches=1)
    model = PolicyModel(path, device=torch.device("cpu"), dtype=cast("Any", dtype), share=True)
    trainer = PolicyTrainer(model, config, AlgorithmConfig(), total_steps=2)
    words = {"groups": 1 if quick else 8, "members": 8, "shared": 186, "own": 64}
    long = {"groups": 1, "members": 1 if quick else 4, "shared": 1000, "own": 1000}
    batch = episodes(**(words if name == "words" else long), vocabulary=len(roof.head))
    trainer.step(batch)
    watch = Watch()
    metrics = trainer.step(batch).metrics
    spent = watch.spent()
    computed, trained = metrics["computed_tokens"], metrics["loss_tokens"]
    rows = int(min(computed, config.microbatch_tokens))
    body, logits = roof.step(rows, 0), roof.step(1024, 1024).less(roof.step(1024, 0))
    least = 3 * (body.cpu * computed / rows + logits.cpu * trained / 1024)
    return {
        "tokens": metrics["tokens"],
        "computed_tokens": computed,
        "trained_tokens": trained,
        "computed_per_cpu_s": computed / spent.cpu,
        "computed_per_s": computed / spent.wall,
        "roof_per_cpu_s": computed / least,
        "over_roof": least / spent.cpu,
        "optimizer_s": metrics["seconds_optimizer"],
    }


def in_a_process(task: dict[str, Any]) -> dict[str, float]:
    """Return the row of a task, computed by a process of its own, so that none finds memory or threads of another one."""
    threads = {name: str(task["threads"]) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, "-m", "benchmarks.real_model", "--task", json.dumps(task)]
    done = subprocess.run(command, env={**os.environ, **threads}, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compute(task: dict[str, Any]) -> dict[str, float]:
    """Return the row of a task, in this process."""
    path = Path(task["model"])
    if "batch" in task:
        return trainer_row(task["batch"], task["dtype"], task["threads"], path, quick=task["quick"])
    case = Case(**{name: task[name] for name in ("dtype", "threads", "requests", "prompt")})
    return server_row(case, path) | (llama_cpp_row(case, Path(task["gguf"])) if task["gguf"] else {})


def show_server(case: Case, row: dict[str, float]) -> str:
    """Return a line of the server's table."""
    cells = [f"{case.dtype:<9}{case.threads:>8}{case.requests:>9}{case.prompt:>7}"]
    for part in ("prefill", "decode"):
        ours, other, roof = (row[f"{part}_{name}_per_cpu_s"] for name in ("ours", "generate", "roof"))
        cells.append(f"{ours:>9.0f}{other:>9.0f}{roof:>9.0f}{ours / other:>8.2f}{ours / roof:>8.2f}")
        llama = row.get(f"{part}_llama_cpp_per_cpu_s")
        cells.append("        -" if llama is None else f"{llama:>9.0f}")
    return "".join(cells)


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the rows of the server's table."""
    return [
        Case(dtype=dtype, threads=threads, requests=requests, prompt=prompt)
        for dtype in arguments.dtypes
        for threads in arguments.threads
        for prompt in arguments.prompts
        for requests in arguments.requests
    ]


def measure(arguments: argparse.Namespace, path: Path, write: Callable[[Mapping[str, object]], None]) -> None:
    """Print the tables; give `write` what there is after each row."""
    server, trainer = list[dict[str, object]](), list[dict[str, object]]()
    common = {"model": str(path), "gguf": str(arguments.gguf or ""), "quick": arguments.quick}
    head = "".join(f"{each:>9}" for each in ("ours", "generate", "roof")) + "  / gen. / roof  llama.c"
    print("tokens per CPU second".ljust(33) + "prefill".rjust(26) + "decode".rjust(52))
    print(f"{'type':<9}{'threads':>8}{'requests':>9}{'prompt':>7}{head}{head}", flush=True)
    for case in cases(arguments):
        row = in_a_process({**asdict(case), **common})
        server.append({**asdict(case), **row})
        print(show_server(case, row), flush=True)
        write({"server": server, "trainer": trainer})
    print(f"{'type':<9}{'threads':>8}{'batch':>8}{'computed':>10}{'per CPU s':>11}{'roof':>7}{'/ roof':>8}", flush=True)
    for dtype, threads, name in product(arguments.dtypes, arguments.threads, arguments.batches):
        row = in_a_process({"batch": name, "dtype": dtype, "threads": threads, **common})
        trainer.append({"dtype": dtype, "threads": threads, "batch": name, **row})
        print(
            f"{dtype:<9}{threads:>8}{name:>8}{row['computed_tokens']:>10.0f}{row['computed_per_cpu_s']:>11.0f}"
            f"{row['roof_per_cpu_s']:>7.0f}{row['over_roof']:>8.2f}",
            flush=True,
        )
        write({"server": server, "trainer": trainer})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="an HF directory")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--requests", nargs="*", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--prompts", nargs="+", type=int, default=[100, 2000])
    parser.add_argument("--batches", nargs="*", default=["words", "long"])
    parser.add_argument("--quick", action="store_true", help="small batches of the trainer")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    if arguments.task:
        print(json.dumps(compute(json.loads(arguments.task))))
        return
    machine = {**describe_machine("torch", "transformers"), "capability": torch.backends.cpu.get_cpu_capability()}

    def write(tables: Mapping[str, object]) -> None:
        record = {**machine, "quick": arguments.quick, "load": os.getloadavg()[1], **tables}
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or shape_of_smollm2(Path(folder))
        measure(arguments, path, write)


if __name__ == "__main__":
    main()
