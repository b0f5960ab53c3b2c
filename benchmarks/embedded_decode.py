"""Decode throughput of the embedded engine against a plain batched decode loop, the price of a weight swap, HTTP cost.

Run: python benchmarks/embedded_decode.py [--json out.json]. About fifteen seconds on one core. The plain loop holds a
fixed batch in a plain KV cache, has no requests and no masks, and samples as cheaply as the engine does (one uniform
number per token, not torch.multinomial, which takes a third of a step at 64); it runs in the same process, alternating
with the engine. Figures are CPU time of one-thread processes (but for requests per second), so that a busy machine
disturbs them less.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import aiohttp
import anyio
import anyio.lowlevel
import orjson
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.servers.engine import EngineRequest, EngineSampling, RequestProgress

PROMPT, OUTPUT = 32, 128
LAYERS, HIDDEN, HEADS, DIM, VOCAB, FFN = 2, 64, 4, 16, 373, 128


def save_model(path: Path, *, positions: int = 4096) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=DIM, tie_word_embeddings=True, max_position_embeddings=positions, eos_token_id=0,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)


class PlainLoop:
    """A fixed batch decoded in lockstep: the floor that continuous batching is held against."""

    def __init__(self, path: Path, batch: int, device: torch.device) -> None:
        self.w = {name: tensor.to(device) for name, tensor in load_file(path / "model.safetensors").items()}
        self.k = torch.zeros(LAYERS, batch, HEADS, PROMPT + OUTPUT, DIM, device=device)
        self.v = torch.zeros_like(self.k)
        frequencies = 1e4 ** (-torch.arange(0, DIM, 2) / DIM)
        angles = (torch.arange(PROMPT + OUTPUT)[:, None] * frequencies).repeat(1, 2).to(device)
        self.cos, self.sin = angles.cos(), angles.sin()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return `x` normalized by the named weight."""
        weight = self.w[name + ".weight"]
        return F.rms_norm(x, weight.shape, weight, 1e-6)

    def rope(self, x: torch.Tensor, at: int) -> torch.Tensor:
        """Return `x` rotated for position `at`."""
        half = torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1)
        return x * self.cos[at] + half * self.sin[at]

    def step(self, ids: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next ids, [B], and their log-probs, [B, 1]."""
        x = self.w["model.embed_tokens.weight"][ids]
        for layer in range(LAYERS):
            p = f"model.layers.{layer}."
            h = self.norm(x, p + "input_layernorm")
            q, k, v = (F.linear(h, self.w[f"{p}self_attn.{n}_proj.weight"]).view(-1, HEADS, DIM) for n in ("q", "k", "v"))
            q = self.rope(self.norm(q, p + "self_attn.q_norm"), at)
            self.k[layer, :, :, at] = self.rope(self.norm(k, p + "self_attn.k_norm"), at)
            self.v[layer, :, :, at] = v
            keys, values = self.k[layer, :, :, : at + 1], self.v[layer, :, :, : at + 1]
            attended = F.scaled_dot_product_attention(q[:, :, None], keys, values)
            x = x + F.linear(attended.reshape(len(ids), -1), self.w[p + "self_attn.o_proj.weight"])
            h = self.norm(x, p + "post_attention_layernorm")
            gate, up = (F.linear(h, self.w[f"{p}mlp.{n}_proj.weight"]) for n in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, self.w[p + "mlp.down_proj.weight"])
        logprobs = torch.log_softmax(F.linear(self.norm(x, "model.norm"), self.w["model.embed_tokens.weight"]), -1)
        cumulative = logprobs.exp().cumsum(-1)
        sampled = torch.searchsorted(cumulative, torch.rand(len(ids), 1, device=ids.device)).clamp_(max=VOCAB - 1)
        return sampled[:, 0], logprobs.gather(1, sampled)

    @torch.inference_mode()
    def run(self, prompts: torch.Tensor) -> float:
        """Return decode tokens per second after the prompt."""
        ids = prompts[:, 0]
        for at in range(PROMPT):
            ids, _ = self.step(prompts[:, at], at)
        rows: list[list[int]] = []
        begin = time.process_time()
        for at in range(PROMPT, PROMPT + OUTPUT - 1):
            ids, _ = self.step(ids, at)
            rows.append(ids.tolist())
        return len(prompts) * (OUTPUT - 1) / (time.process_time() - begin)


class Meter:
    """Keeps the results of `count` requests and says when the last one has ended."""

    def __init__(self, count: int) -> None:
        self.results: list[RequestProgress] = []
        self.done = anyio.Event()
        self.ended_at = 0.0
        self._count = count

    def progress(self, progress: RequestProgress) -> None:
        """Nothing to note."""

    def finish(self, progress: RequestProgress) -> None:
        """Keep the result."""
        self.results.append(progress)
        if len(self.results) == self._count:
            self.ended_at = time.process_time()
            self.done.set()


def requests(prompts: torch.Tensor, tokens: int = OUTPUT) -> list[EngineRequest]:
    sampling = EngineSampling(max_new_tokens=tokens, ignore_eos=True)
    return [EngineRequest(rid=f"{i:032x}", input_ids=row, sampling=sampling) for i, row in enumerate(prompts.tolist())]


async def engine_decode(engine: EmbeddedEngine, prompts: torch.Tensor) -> float:
    """Return decode tokens per second: the whole run less a run of one token each, both through `submit` and `run`."""
    seconds: list[float] = []
    for tokens in (1, OUTPUT):
        await engine.flush_cache(0)
        meter = Meter(len(prompts))
        begin = time.process_time()
        for request in requests(prompts, tokens):
            engine.submit(request, meter)
        await meter.done.wait()
        seconds.append(meter.ended_at - begin)
    return len(prompts) * (OUTPUT - 1) / (seconds[1] - seconds[0])


async def churn(engine: EmbeddedEngine, clients: int, rounds: int) -> dict[str, float]:
    """Multi-turn load as a tool agent makes it: `clients` episodes of 4 turns, 10 tokens out, 9 tokens in between."""
    generator = torch.Generator().manual_seed(1)
    before = time.process_time()
    total = 0

    async def episode(index: int) -> None:
        nonlocal total
        ids = torch.randint(1, VOCAB, (18,), generator=generator).tolist()
        for turn in range(4):
            meter = Meter(1)
            sampling = EngineSampling(max_new_tokens=7 + (index + turn) % 7, ignore_eos=True)
            engine.submit(EngineRequest(rid=f"{index:030x}{turn:02x}", input_ids=ids, sampling=sampling), meter)
            await meter.done.wait()
            output = meter.results[0].output_ids
            total += len(output)
            ids = [*ids, *output, *torch.randint(1, VOCAB, (9,), generator=generator).tolist()]

    async def client(index: int) -> None:
        for turn in range(rounds):
            await episode(index * rounds + turn)

    async with anyio.create_task_group() as group:
        for index in range(clients):
            group.start_soon(client, index)
    elapsed = time.process_time() - before
    return {"tokens_per_s": total / elapsed, "turns_per_s": clients * rounds * 4 / elapsed}


class Watch(Meter):
    """Says when a streamed request has `length` output tokens."""

    def __init__(self, length: int) -> None:
        super().__init__(1)
        self.length = length
        self.seen = anyio.Event()

    def progress(self, progress: RequestProgress) -> None:
        """Look at the length."""
        if len(progress.output_ids) == self.length:
            self.seen.set()


async def swap_cost(engine: EmbeddedEngine, path: Path, prompts: torch.Tensor) -> dict[str, float]:
    """Return milliseconds of pause, load and swap, and of the recompute, with all prompts in flight at ~70 tokens."""
    meter, watch = Meter(len(prompts)), Watch(70 - PROMPT)
    first, *rest = requests(prompts)
    engine.submit(EngineRequest(rid=first.rid, input_ids=first.input_ids, sampling=first.sampling, stream=True), watch)
    for request in rest:
        engine.submit(request, meter)
    await watch.seen.wait()
    begin = time.process_time()
    await engine.pause("retract")
    reply = await engine.update_weights(str(path), weight_version="1", flush_cache=True, abort_all_requests=False)
    await engine.resume()
    swapped = time.process_time()
    assert reply.success, reply.message
    while engine.load.num_used_tokens < len(prompts) * 70:
        await anyio.lowlevel.checkpoint()
    recomputed = time.process_time()
    engine.abort(abort_all=True)
    return {"pause_swap_ms": 1e3 * (swapped - begin), "recompute_ms": 1e3 * (recomputed - swapped)}


async def http_cost(path: str, clients: int = 64, calls: int = 2000) -> dict[str, float]:
    """Requests per second and the server's CPU per request, 1 token out, 100 ids in, all but one of them cached."""
    command = [sys.executable, "-m", "agentrl.servers.serve", "--model-path", path, "--exit-with-stdin"]
    async with await anyio.open_process(command, stderr=None) as server, aiohttp.ClientSession() as session:
        assert server.stdout is not None
        url = orjson.loads(await server.stdout.receive())["url"]
        sampling = {"max_new_tokens": 1, "ignore_eos": True}

        async def call(index: int) -> None:
            sent = {"rid": f"{index:032x}", "input_ids": list(range(1, 101)), "sampling_params": sampling}
            async with session.post(url + "/generate", data=orjson.dumps({**sent, "return_logprob": True})) as response:
                assert response.status == 200
                await response.read()

        async def client(first: int) -> None:
            for index in range(first, calls, clients):
                await call(index)

        await call(calls)
        cpu, begin = _cpu_seconds(server.pid), time.perf_counter()
        async with anyio.create_task_group() as group:
            for first in range(clients):
                group.start_soon(client, first)
        seconds, cpu = time.perf_counter() - begin, _cpu_seconds(server.pid) - cpu
        assert server.stdin is not None
        await server.stdin.aclose()
        await server.wait()
    return {"requests_per_s": calls / seconds, "server_cpu_ms_per_request": 1e3 * cpu / calls}


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def main(device: str, repeats: int) -> dict[str, object]:
    torch.set_num_threads(1)
    report: dict[str, object] = {"torch": torch.__version__, "device": device, "decode": {}}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        save_model(path)
        engine = EmbeddedEngine(EngineOptions(model_path=directory, device=device))
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run)
            rows: dict[str, dict[str, float]] = {}
            for batch in (1, 8, 64):
                prompts = torch.randint(1, VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(batch))
                plain = PlainLoop(path, batch, torch.device(device))
                best = [0.0, 0.0]
                for _ in range(repeats):
                    best[0] = max(best[0], plain.run(prompts.to(device)))
                    best[1] = max(best[1], await engine_decode(engine, prompts))
                rows[str(batch)] = {"plain_tok_s": best[0], "engine_tok_s": best[1], "ratio": best[1] / best[0]}
                print(f"B={batch:3d} plain {best[0]:9.0f} tok/s  engine {best[1]:9.0f} tok/s  ratio {best[1] / best[0]:.2f}")
            report["decode"] = rows
            prompts = torch.randint(1, VOCAB, (64, PROMPT), generator=torch.Generator().manual_seed(9))
            costs = [await swap_cost(engine, path, prompts) for _ in range(repeats)]
            report["swap"] = {key: min(cost[key] for cost in costs) for key in costs[0]}
            print("swap with 64 in flight at 70 tokens:", report["swap"])
            report["multi_turn"] = await churn(engine, 64, 8)
            print("multi-turn, 64 clients:", report["multi_turn"], f"cache hit rate {engine.load.cache_hit_rate:.2f}")
            group.cancel_scope.cancel()
        report["http"] = await http_cost(directory)
        print("http, 64 connections:", report["http"])
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    result = anyio.run(main, arguments.device, arguments.repeats)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
