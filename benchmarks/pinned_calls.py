"""What it saves that running calls keep their adapter at an update (`inference.pause_mode: pinned`).

Run: `python -m benchmarks.pinned_calls` (80 seconds on idle cores). `--quick` takes half of the calls and one round, and
writes nothing. It prints a table, and overwrites benchmarks/results/pinned_calls.json.

An embedded engine of 5 million parameters, in this process and behind its own HTTP, answers `CALLS` calls, and takes
`UPDATES` updates while they run:

  still     no update comes: the cost of the calls alone
  pinned    adapters; a call ends under the one that it began with
  exact     adapters; each update aborts every call, and the client asks for the rest under the new adapter
  merged    whole weights; each update pauses, retracts and flushes, and the server computes each context again

  cpu       CPU seconds of this process, client and server, from the first call to the last token, updates included
  over      the same, less those of `still`
  again     context tokens that a server computed again for calls that an update interrupted, by their version spans
  versions  policy versions of a call, the mean

Rounds of all four alternate; the row of a mode is the median round.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import anyio
import torch
from transformers.utils import logging

from agentrl.errors import InvariantError
from agentrl.inference.backend import GenerateRequest, Generation
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool.pool import ServerPool
from agentrl.inference.sglang.server import SGLangServer
from agentrl.plan.model import read_model
from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.servers.serve import serving
from agentrl.weights.merging import merge_adapter
from agentrl.weights.types import Publication
from benchmarks.machine import describe_machine
from benchmarks.weight_sync import SIZES, checkpoint
from tests.support.adapters import make_adapter, published_adapter
from tests.support.calls import ask
from tests.support.servers import publication_of

RESULT = Path(__file__).parent / "results" / "pinned_calls.json"
Mode = Literal["still", "pinned", "exact", "merged"]
MODES: tuple[Mode, ...] = ("still", "pinned", "exact", "merged")
CALLS, PROMPT, OUTPUT, UPDATES, BETWEEN, ROUNDS = 16, 256, 48, 3, 12, 3


def publications(base: Path, folder: Path) -> dict[Mode, list[Publication]]:
    """Return versions 1, 2, ... of every mode; the merged ones are the sums of the same adapters."""
    adapters = [make_adapter(base, folder / f"a{version}", seed=version, rank=8) for version in range(1, UPDATES + 2)]
    found: dict[Mode, list[Publication]] = {mode: [] for mode in MODES}
    for version, adapter in enumerate(adapters, start=1):
        whole = folder / f"w{version}"
        merge_adapter(adapter, whole, base)
        found["merged"].append(publication_of(whole, version))
        for mode in ("still", "pinned", "exact"):
            found[mode].append(published_adapter(adapter, version))
    return found


async def measure(base: Path, versions: list[Publication], mode: Mode, calls: int) -> dict[str, Any]:
    engine = EmbeddedEngine(EngineOptions(model_path=str(base), device="cpu"))
    shape = read_model(str(base)).shape
    assert shape is not None
    done: list[Generation] = []
    begin = 0.0
    async with serving(engine) as url:
        config = InferenceConfig.model_validate(
            {"urls": [url], "health_interval_s": 3600, "request_timeout_s": 3600, "control_timeout_s": 600}
        )
        lag = UPDATES if mode == "pinned" else 0
        server = SGLangServer(
            url, vocab_size=shape.vocabulary, max_adapter_lag=lag, request_timeout_s=3600, control_timeout_s=600
        )
        async with ServerPool([server], config) as pool, anyio.create_task_group() as tasks:
            await pool.update_weights(versions[0])
            begin = time.process_time()

            async def answer(request: GenerateRequest) -> None:
                done.append(await pool.generate(request))

            # Prompts of their own, so that no prefix is shared; one call is streamed, and its tokens time the updates.
            prompts = [[3 + (number + at * 7) % 300 for at in range(PROMPT)] for number in range(calls)]
            for prompt in prompts[1:]:
                tasks.start_soon(answer, ask(prompt, OUTPUT))
            done.append(
                await _updated_while_streamed(pool, ask(prompts[0], OUTPUT), () if mode == "still" else versions[1:])
            )
        return {
            "mode": mode,
            "cpu_s": time.process_time() - begin,
            "again_tokens": sum(map(computed_again, done)),
            "versions": sum(len(each.spans) for each in done) / len(done),
        }


async def _updated_while_streamed(
    pool: ServerPool, request: GenerateRequest, publications: Sequence[Publication]
) -> Generation:
    """Stream a call to its end, and update the servers each time that it has `BETWEEN` tokens more."""
    waiting, tokens = list(publications), 0
    async with pool.stream(request) as chunks, anyio.create_task_group() as tasks:
        async for chunk in chunks:
            tokens += len(chunk.output_ids)
            if waiting and tokens >= BETWEEN * (len(publications) - len(waiting) + 1):
                tasks.start_soon(pool.update_weights, waiting.pop(0))
            if chunk.generation is not None:
                return chunk.generation
    raise InvariantError("the stream ended without its generation")


def computed_again(generation: Generation) -> int:
    return sum(PROMPT + span.start for span in generation.spans[1:])


async def run(*, quick: bool) -> None:
    calls, rounds = (CALLS // 2, 1) if quick else (CALLS, ROUNDS)
    size = next(each for each in SIZES if each.name == "5M")
    with tempfile.TemporaryDirectory() as folder:
        base = checkpoint(size, Path(folder))
        versions = publications(base, Path(folder))
        measured: list[dict[str, Any]] = []
        for _ in range(rounds):
            for mode in MODES:
                measured.append(await measure(base, versions[mode], mode, calls))
                print(f"{mode} took {measured[-1]['cpu_s']:.2f} CPU s", file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = []
    for mode in MODES:
        each = [row for row in measured if row["mode"] == mode]
        rows.append({"mode": mode, **{key: median(row[key] for row in each) for key in each[0] if key != "mode"}})
    print(f"{'mode':>8} {'cpu s':>8} {'over s':>8} {'again':>8} {'versions':>9}")
    for row in rows:
        row["over_s"] = row["cpu_s"] - rows[0]["cpu_s"]
        seconds = f"{row['cpu_s']:>8.2f} {row['over_s']:>8.2f}"
        print(f"{row['mode']:>8} {seconds} {row['again_tokens']:>8.0f} {row['versions']:>9.2f}")
    if not quick:
        about = {"calls": calls, "prompt": PROMPT, "output": OUTPUT, "updates": UPDATES, "rounds": rounds}
        RESULT.write_text(
            json.dumps({"machine": describe_machine("torch", "transformers"), **about, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    anyio.run(lambda: run(quick=parser.parse_args().quick))
