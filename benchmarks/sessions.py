"""Sessions of episodes: the share of prompt tokens from the server's cache, and tokens a CPU-second, with and without.

Run: `python -m benchmarks.sessions` (two minutes; `--repeats 1 --prompt 128` for less), and with `--backend sglang` for a
real SGLang, which `make sglang-install` installs. It prints a table and writes benchmarks/results/sessions.json or
sessions_sglang.json (`--output` names another file).

8 groups of 8 episodes run at once, each of 8 turns. The members of a group begin with the same prompt. After each answer an
episode adds a tool's result and calls again, behind all calls that wait. The embedded server's cache has a row for each
episode (`roomy`), or for half of them (`tight`), so that episodes must drop rows of others. SGLang's has room for all
contexts, or for the common prompts and half of what follows them; without sessions it runs with `--no-sessions`. `updates`
runs the tight case with four weight updates while calls are in flight: `retract` recomputes what runs and flushes the cache,
`salt` leaves what runs as it is and keeps new calls from older prefixes by a `cache_salt` of the version. A rate is output
tokens over the CPU time of the server, with one thread for each of its processes. The embedded engine runs in this process
and SGLang behind HTTP. Settings take turns in each repeat, and the table has medians.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple, Protocol

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import anyio
import numpy as np
import torch

from agentrl.inference.backend import CONTEXT_HEADROOM, Context, GenerateRequest, SamplingParams
from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.pool import launch_pool
from agentrl.inference.sglang.server import SGLangServer
from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.servers.engine import EngineRequest, EngineSampling
from benchmarks.embedded_decode import VOCAB, Meter, save_model
from benchmarks.machine import cpu_seconds_of, describe_machine, processes_below
from tests.support.servers import publication_of
from tests.support.tiny import build_tokenizer

GROUPS, MEMBERS, TURNS = 8, 8, 8
OUTPUT, RESULT = 24, 40
"""Tokens of an answer and of a tool's result."""
UPDATES = 4
FOLDER = Path(__file__).parent / "results"


class Setting(NamedTuple):
    """One way to serve the episodes."""

    name: str
    roomy: bool
    """Whether the cache has room for all episodes, in place of half of them."""
    sessions: bool
    update: Literal["", "retract", "salt"] = ""


SETTINGS = (
    Setting("roomy, without sessions", roomy=True, sessions=False),
    Setting("roomy, with sessions", roomy=True, sessions=True),
    Setting("tight, without sessions", roomy=False, sessions=False),
    Setting("tight, with sessions", roomy=False, sessions=True),
    Setting("updates by retract, with sessions", roomy=False, sessions=True, update="retract"),
    Setting("updates by salt, with sessions", roomy=False, sessions=True, update="salt"),
)


class Served(NamedTuple):
    """The result of a call."""

    output_ids: list[int]
    cached_tokens: int


class Server(Protocol):
    """What the episodes play on."""

    async def call(self, episode: int, turn: int, ids: list[int]) -> Served:
        """Sample `OUTPUT` tokens after `ids`."""
        ...

    async def end(self, episode: int) -> None:
        """End an episode's session."""
        ...

    async def update(self, version: int) -> None:
        """Load the same weights under a new version."""
        ...

    def cpu_s(self) -> float:
        """Return the CPU seconds that the server has used."""
        ...


class Embedded:
    """The embedded engine in this process."""

    def __init__(self, engine: EmbeddedEngine, setting: Setting, model: Path) -> None:
        self._engine, self._setting, self._model = engine, setting, model
        self._salt = ""

    @classmethod
    @asynccontextmanager
    async def opened(cls, setting: Setting, model: Path, prompt: int) -> AsyncGenerator[Embedded]:
        """Run a new engine, whose cache has two rows for each request that it runs."""
        rows = GROUPS * MEMBERS if setting.roomy else GROUPS * MEMBERS // 2
        options = EngineOptions(model_path=str(model), max_running_requests=rows // 2, max_context_tokens=longest(prompt))
        engine = EmbeddedEngine(options)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.run)
            yield cls(engine, setting, model)
            tasks.cancel_scope.cancel()

    async def call(self, episode: int, turn: int, ids: list[int]) -> Served:
        meter = Meter(1)
        request = EngineRequest(
            rid=f"{episode:030x}{turn:02x}",
            input_ids=ids,
            sampling=EngineSampling(max_new_tokens=OUTPUT, ignore_eos=True),
            session=f"episode {episode}" if self._setting.sessions else "",
            cache_key=("", self._salt),
        )
        self._engine.submit(request, meter)
        await meter.done.wait()
        (result,) = meter.results
        return Served(list(result.output_ids), result.cached_tokens)

    async def end(self, episode: int) -> None:
        self._engine.close_session(f"episode {episode}")

    async def update(self, version: int) -> None:
        retract = self._setting.update == "retract"
        await self._engine.pause("retract" if retract else "in_place")
        done = await self._engine.update_weights(
            str(self._model), weight_version=str(version), flush_cache=retract, abort_all_requests=False
        )
        assert done.success, done.message
        self._salt = "" if retract else f"v{version}"
        await self._engine.resume()

    def cpu_s(self) -> float:
        return time.process_time()


class RealSGLang:
    """An SGLang behind HTTP."""

    def __init__(self, server: SGLangServer, setting: Setting, model: Path) -> None:
        self._server, self._setting, self._model = server, setting, model

    @classmethod
    @asynccontextmanager
    async def opened(cls, setting: Setting, model: Path, prompt: int) -> AsyncGenerator[RealSGLang]:
        """Start a server that runs 32 requests at once, as the embedded one with a roomy cache does."""
        added = GROUPS * MEMBERS * (TURNS * (OUTPUT + RESULT) + CONTEXT_HEADROOM)
        room = GROUPS * prompt + (added if setting.roomy else added // 2)
        config = InferenceConfig(
            backend="sglang",
            device="cpu",
            max_running_requests=GROUPS * MEMBERS // 2,
            max_context_tokens=longest(prompt),
            sglang_args=("--max-total-tokens", str(room), *([] if setting.sessions else ["--no-sessions"])),
            health_interval_s=3600.0,
        )
        async with launch_pool(config, model_path=model, vocab_size=VOCAB, log_dir=model / "logs") as pool:
            url = pool.describe().servers[0].url
            async with SGLangServer(url, vocab_size=VOCAB) as server:
                yield cls(server, setting, model)

    async def call(self, episode: int, turn: int, ids: list[int]) -> Served:
        request = GenerateRequest(
            request_id=f"{episode:030x}{turn:02x}",
            episode_id=f"episode-{episode}",
            context=Context.of(ids),
            sampling=SamplingParams(max_new_tokens=OUTPUT, ignore_eos=True),
        )
        result = await self._server.generate(request)
        return Served(result.output_ids.tolist(), result.cached_tokens)

    async def end(self, episode: int) -> None:
        await self._server.end_session(f"episode-{episode}")

    async def update(self, version: int) -> None:
        await self._server.pause("retract" if self._setting.update == "retract" else "in_place")
        await self._server.load_weights(publication_of(self._model, version))
        await self._server.resume()

    def cpu_s(self) -> float:
        return cpu_seconds_of(processes_below(os.getpid()))


BACKENDS: Mapping[str, type[Embedded | RealSGLang]] = {"embedded": Embedded, "sglang": RealSGLang}


class Play:
    """All episodes of one setting on one server."""

    def __init__(self, server: Server, setting: Setting, prompt: int) -> None:
        self.server, self.setting, self.prompt = server, setting, prompt
        self.prompts = self.cached = self.outputs = 0
        self._turns_done = 0
        self._due = anyio.Event()

    async def run(self) -> dict[str, float]:
        """Return what was measured."""
        began, used = time.perf_counter(), self.server.cpu_s()
        async with anyio.create_task_group() as episodes:
            for number in range(GROUPS * MEMBERS):
                episodes.start_soon(self._episode, number)
            if self.setting.update:
                for version in range(1, UPDATES + 1):
                    await self._due.wait()
                    self._due = anyio.Event()
                    await self.server.update(version)
        return {
            "hit_rate": self.cached / self.prompts,
            "tokens_per_cpu_s": self.outputs / (self.server.cpu_s() - used),
            "wall_s": time.perf_counter() - began,
        }

    async def _episode(self, number: int) -> None:
        ids = np.random.default_rng(number // MEMBERS).integers(1, VOCAB, self.prompt).tolist()
        more = np.random.default_rng((1, number))
        for turn in range(TURNS):
            result = await self.server.call(number, turn, ids)
            self.prompts += len(ids)
            self.cached += result.cached_tokens
            self.outputs += len(result.output_ids)
            ids = [*ids, *result.output_ids, *more.integers(1, VOCAB, RESULT).tolist()]
            self._turns_done += 1
            if self._turns_done % (GROUPS * MEMBERS * TURNS // (UPDATES + 1)) == 0:
                self._due.set()
        await self.server.end(number)


def longest(prompt: int) -> int:
    """Return the tokens of an episode's last context, with what it samples."""
    return prompt + TURNS * (OUTPUT + RESULT)


async def measure(backend: str, setting: Setting, model: Path, prompt: int) -> dict[str, float]:
    """Play all episodes on a new server."""
    opened: AbstractAsyncContextManager[Server] = BACKENDS[backend].opened(setting, model, prompt)
    async with opened as server:
        return await Play(server, setting, prompt).run()


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="embedded")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512, help="tokens that the members of a group have in common")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[dict[str, float]]] = {setting.name: [] for setting in SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        build_tokenizer(model, vocab_size=VOCAB)
        save_model(model, positions=longest(options.prompt) + CONTEXT_HEADROOM)
        for _ in range(options.repeats):
            for setting in SETTINGS:
                rows[setting.name].append(anyio.run(measure, options.backend, setting, model, options.prompt))
    found = {name: {key: round(median(run[key] for run in runs), 4) for key in runs[0]} for name, runs in rows.items()}
    for name, figures in found.items():
        print(f"{name:36}" + "".join(f"{key} {value:10.3f}   " for key, value in figures.items()))
    report = {
        "machine": describe_machine("torch", sglang=options.backend == "sglang"),
        "backend": options.backend,
        "episodes": f"{GROUPS} x {MEMBERS} of {TURNS} turns, {OUTPUT} tokens sampled and {RESULT} added by a tool in each",
        "prompt_tokens_in_common": options.prompt,
        "repeats": options.repeats,
        "medians": found,
    }
    output = options.output or FOLDER / ("sessions.json" if options.backend == "embedded" else "sessions_sglang.json")
    output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
