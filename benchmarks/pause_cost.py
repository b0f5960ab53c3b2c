"""Time that a weight update takes from the requests in flight: pause, update, resume, and the wait for the next token.

Run: `python -m benchmarks.pause_cost` (about five minutes on two idle cores; needs the environment that `make sglang`
builds). `--quick` measures three times, on the embedded server alone, and writes nothing; `--backends embedded` leaves
SGLang out. It prints a table and writes benchmarks/results/pause_cost.json.

In each repetition 64 requests with prompts of their own have sampled about `BEFORE` tokens each when the weights are
replaced from disk:

  pause     the pause call: `retract` (mode exact) or `in_place` (mode fast) update    the new weights, read from disk,
  with a flush of the cache (exact), and the check of the version reported then resume    the call that lets the server go
  on pause_to_resume   the three together: how long the server stands still next      from there until every request has
  its first token of the new version: with `exact` each context is computed again stall     from the pause call to the
  last of these tokens: what the update costs in all step      for comparison: the time between two tokens of a request
  before the pause

Once with one request streamed and the others plain, which is how workflows mostly call, and once with all of them streamed,
which alone shows when each got its next token; there the events of 64 streams, repeating all ids so far, also keep client
and server busy while they handle the pause. The first token of the new version is found by the version spans of the finished
request, so chunks that were on their way when the server paused do not count. Medians over the repetitions, with the
quartiles; modes and forms alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal
from uuid import uuid4

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import anyio
import numpy as np
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.engine.buffer import Signal
from agentrl.inference.backend import Context, GenerateRequest, SamplingParams
from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.pool import launch_pool
from agentrl.inference.pool.members import PAUSES
from agentrl.inference.sglang.server import SGLangServer
from agentrl.types import Int32Array
from agentrl.weights.types import Publication
from benchmarks.machine import describe_machine
from tests.support.servers import Launched
from tests.support.tiny import build_tokenizer
from tests.support.versions import SMALL_STEP, Versions

RESULTS = Path(__file__).parent / "results" / "pause_cost.json"
Mode = Literal["exact", "fast"]
MODES: tuple[Mode, Mode] = ("exact", "fast")
REQUESTS, PROMPT, OUTPUT, BEFORE = 64, 96, 120, 12
REPETITIONS = 21
DEADLINE_S = 120.0
FORMS: Mapping[str, int] = {"plain": 1, "streamed": REQUESTS}
"""How many of the requests are streamed."""


@dataclass(slots=True)
class Stream:
    """One request as the client sees it."""

    arrivals: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """When chunks came, and how many tokens there were then."""
    start: int | None = None
    """Index of the first token of the new version; None when all are of one."""

    @property
    def count(self) -> int:
        """Tokens so far."""
        return self.arrivals[-1][1] if self.arrivals else 0

    def at(self, token: int) -> float:
        """Return when a token came."""
        return next(when for when, count in self.arrivals if count > token)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=("embedded", "sglang"), default=["embedded", "sglang"])
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    backends: list[Launched] = ["embedded"] if options.quick else options.backends
    repetitions = 3 if options.quick else options.repetitions
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        base = save_model(Path(folder) / "model")
        parameters = sum(tensor.size for tensor in Versions(base, base, quiet_ids=frozenset()).tensors(0).values())
        rows = [
            row for backend in backends for row in anyio.run(measure, backend, base, Path(folder) / backend, repetitions)
        ]
    if options.quick:
        return
    report = {
        "what": "seconds of one weight update from disk with requests in flight: median and quartiles",
        "machine": describe_machine("torch", "aiohttp", "numpy", sglang="sglang" in backends),
        "requests_in_flight": REQUESTS,
        "context_tokens_at_the_pause": f"{PROMPT} of prompt and {BEFORE} to {OUTPUT} sampled, of each request",
        "repetitions": repetitions,
        "parameters": parameters,
        "cases": rows,
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {RESULTS}")


def save_model(path: Path) -> Path:
    """Write a random Qwen3 of some 300 thousand parameters with its tokenizer; return the directory."""
    vocab_size = build_tokenizer(path)
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=4096, eos_token_id=0,
        bos_token_id=None, pad_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


async def measure(backend: Launched, base: Path, folder: Path, repetitions: int) -> list[dict[str, Any]]:
    """Return a row for each mode, measured on one server."""
    versions = Versions(base, folder / "weights", quiet_ids=frozenset(), scale=SMALL_STEP)
    vocab_size = int(json.loads((base / "config.json").read_text())["vocab_size"])
    config = InferenceConfig.model_validate(
        {
            "backend": backend,
            "device": "cpu",
            "max_running_requests": REQUESTS,
            "health_interval_s": 3600.0,
        }
    )
    samples: dict[tuple[Mode, str], list[dict[str, float]]] = {(mode, form): [] for form in FORMS for mode in MODES}
    async with launch_pool(config, model_path=base, vocab_size=vocab_size, log_dir=folder) as pool:
        url = pool.describe().servers[0].url
        async with SGLangServer(url, vocab_size=vocab_size) as server:
            version = server.version
            for attempt in range(2 * repetitions + 1):
                for mode, form in samples:
                    if len(samples[mode, form]) == repetitions:
                        continue
                    version += 1
                    with anyio.fail_after(DEADLINE_S):
                        sample = await one_update(server, versions, version, mode, FORMS[form])
                    if attempt and sample is not None:  # the first warms caches and allocators
                        samples[mode, form].append(sample)
    if short := [f"{mode} {form}" for (mode, form), some in samples.items() if len(some) < repetitions]:
        raise RuntimeError(f"{backend}, {short}: requests ended before the update, too often; is the machine busy?")
    return [summary(backend, mode, form, some) for (mode, form), some in samples.items()]


async def one_update(
    server: SGLangServer, versions: Versions, version: int, mode: Mode, streamed: int
) -> dict[str, float] | None:
    """Replace the weights under running requests, the last `streamed` of them streams.

    Returns:
        The seconds of each part; None when a request had ended or not begun, so that there were fewer in flight.
    """
    publication = versions.publication(version)
    streams = [Stream() for _ in range(REQUESTS)]
    changed = Signal()
    times: tuple[float, float, float, float] | None = None
    async with anyio.create_task_group() as tasks:
        rng = np.random.default_rng(version)
        for index, stream in enumerate(streams):
            prompt = rng.integers(1, server_vocab(versions), PROMPT).astype(np.int32)
            if index == REQUESTS - streamed:
                await until_running(server, index)
            run = wait if index < REQUESTS - streamed else follow
            tasks.start_soon(run, server, request_of(f"{version}.{index}", prompt), stream, changed)
        watched = streams[REQUESTS - streamed :]
        await changed.wait_until(
            lambda: all(stream.count >= BEFORE for stream in watched),
            timeout_s=DEADLINE_S,
            what=lambda: f"{sum(stream.count < BEFORE for stream in watched)} requests have not sampled {BEFORE} tokens yet",
        )
        times = await replace_weights(server, publication, mode)
    if times is None or any(stream.start is None for stream in streams):
        return None
    began, paused, updated, resumed = times
    gaps = [
        (when - earlier) / (count - fewer)
        for stream in streams
        for (earlier, fewer), (when, count) in zip(stream.arrivals, stream.arrivals[1:], strict=False)
        if when < began
    ]
    parts = {
        "pause": paused - began,
        "update": updated - paused,
        "resume": resumed - updated,
        "pause_to_resume": resumed - began,
        "step": float(np.median(gaps)),
    }
    if streamed == REQUESTS:
        last = max(stream.at(stream.start) for stream in streams if stream.start is not None)
        parts |= {"next": last - resumed, "stall": last - began}
    return parts


async def replace_weights(server: SGLangServer, publication: Publication, mode: Mode) -> tuple[float, float, float, float]:
    """Pause, update and resume; return when each began and the last ended."""
    began = time.perf_counter()
    await server.pause(PAUSES[mode])
    paused = time.perf_counter()
    await server.load_weights(publication)
    updated = time.perf_counter()
    await server.resume()
    return began, paused, updated, time.perf_counter()


async def until_running(server: SGLangServer, count: int) -> None:
    """Return when the server runs `count` requests; each question waits for the server's answer."""
    while sum(load.num_running_reqs for load in await server.loads()) < count:
        pass


def request_of(episode: str, prompt: Int32Array) -> GenerateRequest:
    """Return a request that runs to its limit."""
    return GenerateRequest(
        request_id=uuid4().hex,
        episode_id=episode,
        context=Context.of(prompt),
        sampling=SamplingParams(max_new_tokens=OUTPUT, ignore_eos=True),
    )


async def follow(server: SGLangServer, request: GenerateRequest, stream: Stream, changed: Signal) -> None:
    """Stream a request to its end and note when tokens came."""
    async with server.stream(request) as chunks:
        async for chunk in chunks:
            stream.arrivals.append((time.perf_counter(), stream.count + len(chunk.output_ids)))
            changed.fire()
            if chunk.generation is not None and len(chunk.generation.spans) > 1:
                stream.start = chunk.generation.spans[-1].start


async def wait(server: SGLangServer, request: GenerateRequest, stream: Stream, changed: Signal) -> None:
    """Wait for the end of a request that is not streamed."""
    generation = await server.generate(request)
    stream.start = generation.spans[-1].start if len(generation.spans) > 1 else None
    changed.fire()


def server_vocab(versions: Versions) -> int:
    """Return how many ids the model has."""
    return len(versions.tensors(0)["model.embed_tokens.weight"])


def summary(backend: Launched, mode: Mode, form: str, samples: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return a row: the median and the quartiles of each part, seconds; print it."""
    row: dict[str, Any] = {"backend": backend, "pause_mode": mode, "requests": form}
    for part in samples[0]:
        low, middle, high = quantiles([sample[part] for sample in samples], n=4)
        row[f"{part}_s"] = {"median": middle, "quartiles": [low, high]}
    parts = "".join(f"  {part} {1e3 * row[f'{part}_s']['median']:.1f}" for part in samples[0])
    print(f"{backend:9}{mode:6}{form:9} milliseconds:{parts}")
    return row


if __name__ == "__main__":
    main()
