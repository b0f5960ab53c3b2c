"""Sessions on the embedded server: the share of prompt tokens from the cache, and tokens a CPU-second, with and without.

Run: `python -m benchmarks.sessions` (two minutes; `--repeats 1 --prompt 128` for less). It prints a table and writes
benchmarks/results/sessions.json (`--output` names another file).

8 groups of 8 episodes run at once, each of 8 turns. The members of a group begin with the same prompt. After each answer an
episode adds a tool's result and calls again, behind all calls that wait. The cache has a row for each episode (`roomy`), or
for half of them (`tight`), so that episodes must drop rows of others. `updates` runs the tight case with four weight updates
while calls are in flight: `retract` recomputes what runs and flushes the cache, `salt` leaves what runs as it is and keeps
new calls from older prefixes by a `cache_salt` of the version. A rate is output tokens over the CPU time of the process,
which has one thread; settings take turns in each repeat, and the table has medians.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import anyio
import numpy as np
import torch

from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.servers.engine import EngineRequest, EngineSampling
from benchmarks.embedded_decode import VOCAB, Meter, save_model
from benchmarks.machine import describe_machine

GROUPS, MEMBERS, TURNS = 8, 8, 8
OUTPUT, RESULT = 24, 40
"""Tokens of an answer and of a tool's result."""
UPDATES = 4
RESULTS = Path(__file__).parent / "results" / "sessions.json"


class Setting(NamedTuple):
    """One way to serve the episodes."""

    name: str
    running: int
    """Requests that decode together; the cache has twice as many rows."""
    sessions: bool
    update: str = ""
    """`retract`, `salt`, or none."""


SETTINGS = (
    Setting("roomy, without sessions", 32, sessions=False),
    Setting("roomy, with sessions", 32, sessions=True),
    Setting("tight, without sessions", 16, sessions=False),
    Setting("tight, with sessions", 16, sessions=True),
    Setting("updates by retract, with sessions", 16, sessions=True, update="retract"),
    Setting("updates by salt, with sessions", 16, sessions=True, update="salt"),
)


class Play:
    """All episodes of one setting on one engine."""

    def __init__(self, engine: EmbeddedEngine, setting: Setting, model: Path, prompt: int) -> None:
        self.engine, self.setting, self.model, self.prompt = engine, setting, model, prompt
        self.prompts = self.cached = self.outputs = 0
        self.salt = ""
        self._turns_done = 0
        self._version = 0
        self._due = anyio.Event()

    async def run(self) -> dict[str, float]:
        """Return what was measured."""
        begin = time.process_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.engine.run)
            async with anyio.create_task_group() as episodes:
                for number in range(GROUPS * MEMBERS):
                    episodes.start_soon(self._episode, number)
                if self.setting.update:
                    for _ in range(UPDATES):
                        await self._due.wait()
                        self._due = anyio.Event()
                        await self._update()
            tasks.cancel_scope.cancel()
        load = self.engine.load
        return {
            "hit_rate": self.cached / self.prompts,
            "tokens_per_cpu_s": self.outputs / (time.process_time() - begin),
            "dropped": load.num_dropped_sessions,
        }

    async def _episode(self, number: int) -> None:
        group, session = number // MEMBERS, f"episode {number}"
        ids = np.random.default_rng(group).integers(1, VOCAB, self.prompt).tolist()
        more = np.random.default_rng((1, number))
        for turn in range(TURNS):
            meter = Meter(1)
            request = EngineRequest(
                rid=f"{number:030x}{turn:02x}",
                input_ids=ids,
                sampling=EngineSampling(max_new_tokens=OUTPUT, ignore_eos=True),
                session=session if self.setting.sessions else "",
                cache_key=("", self.salt),
            )
            self.engine.submit(request, meter)
            await meter.done.wait()
            (result,) = meter.results
            self.prompts += len(ids)
            self.cached += result.cached_tokens
            self.outputs += len(result.output_ids)
            ids = [*ids, *result.output_ids, *more.integers(1, VOCAB, RESULT).tolist()]
            self._turns_done += 1
            if self._turns_done % (GROUPS * MEMBERS * TURNS // (UPDATES + 1)) == 0:
                self._due.set()
        self.engine.close_session(session)

    async def _update(self) -> None:
        self._version += 1
        retract = self.setting.update == "retract"
        await self.engine.pause("retract" if retract else "in_place")
        done = await self.engine.update_weights(
            str(self.model), weight_version=str(self._version), flush_cache=retract, abort_all_requests=False
        )
        assert done.success, done.message
        self.salt = "" if retract else f"v{self._version}"
        await self.engine.resume()


async def measure(setting: Setting, model: Path, prompt: int) -> dict[str, float]:
    """Play all episodes on a new engine."""
    engine = EmbeddedEngine(
        EngineOptions(model_path=str(model), max_running_requests=setting.running, max_context_tokens=4096)
    )
    return await Play(engine, setting, model, prompt).run()


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512, help="tokens that the members of a group have in common")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[dict[str, float]]] = {setting.name: [] for setting in SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        for _ in range(options.repeats):
            for setting in SETTINGS:
                rows[setting.name].append(anyio.run(measure, setting, Path(folder), options.prompt))
    found = {name: {key: round(median(run[key] for run in runs), 4) for key in runs[0]} for name, runs in rows.items()}
    for name, figures in found.items():
        print(f"{name:36}" + "".join(f"{key} {value:10.3f}   " for key, value in figures.items()))
    report = {
        "machine": describe_machine("torch"),
        "episodes": f"{GROUPS} x {MEMBERS} of {TURNS} turns, {OUTPUT} tokens sampled and {RESULT} added by a tool in each",
        "prompt_tokens_in_common": options.prompt,
        "repeats": options.repeats,
        "medians": found,
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
