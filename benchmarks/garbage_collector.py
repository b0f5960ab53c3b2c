"""What Python's garbage collector takes from the driver of a run, with Python's settings and with those of a run.

Run: `python -m benchmarks.garbage_collector` (four minutes; `--repeats 1 --episodes 500` for less). It prints a table and
writes benchmarks/results/garbage_collector.json. 256 episodes of 8 turns and 4,096 tokens run at a time, 512 finished ones
are kept, as by a buffer; the model, in this process, answers after 0.25 to 0.75 s. `full core` has the settings of a run and
48 episodes whose model answers at once, so that they wait for nothing but each other.

  cpu_ms_per_turn      CPU time of the process, over the turns
  collector_share      the part of it that the collector took
  gap_p50_ms, ...      from the answer of a turn to the next call of its episode: how long a server waits for the episode
  longest_pause_ms     the longest collection
  max_rss_mb           the largest memory of the process

The event loop's clock counts CPU time and skips the time in which nothing is to be done. So a gap is what it would be on a
core of its own, whatever else the machine does, and nothing waits. The two settings take turns, each time in a fresh
process; a row shows medians.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import anyio

from agentrl.client import SamplingConfig
from agentrl.client.client import Client
from agentrl.commands import train
from agentrl.inference.backend import GenerateRequest, Generation
from agentrl.processes.watchdog.delays import tuned_garbage_collector
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_policy_episode
from agentrl.tokens.renderer import Renderer
from agentrl.types import Task, Trajectory
from agentrl.workflow import RolloutWorkflow
from benchmarks.instant_model import TRAINED_ON, Corpus, Instant, answer, save_tokenizer, standard_library
from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results" / "garbage_collector.json"
KEPT = 512
TURNS, CONTEXT, OUTPUT_TOKENS = 8, 4096, 64
DRIVER = train.__name__
"""Imported for what it imports: the driver of a run holds it all."""


class Setting(NamedTuple):
    """What runs."""

    collector: Callable[[], AbstractContextManager[None]]
    concurrent: int
    """Episodes at a time."""
    latency_s: tuple[float, float]
    """The least and the most that an answer takes."""


SETTINGS = {
    "Python's": Setting(nullcontext, 256, (0.25, 0.75)),
    "a run's": Setting(tuned_garbage_collector, 256, (0.25, 0.75)),
    "full core": Setting(tuned_garbage_collector, 48, (0.0, 0.0)),
}


class CpuClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock counts CPU time, and skips what it would wait."""

    def __init__(self) -> None:
        self._skipped = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        """Return the seconds."""
        return time.process_time() + self._skipped

    def skip(self, seconds: float) -> None:
        """Let time pass."""
        self._skipped += seconds


class _Skipping(selectors.DefaultSelector):
    def __init__(self, loop: CpuClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            self._loop.skip(timeout)
        return super().select(0)


class Reader(RolloutWorkflow):
    """A workflow that shows the model one text after the other."""

    def __init__(self, corpus: Corpus, size: int) -> None:
        self._corpus, self._size = corpus, size

    async def run(self, task: Task, client: Client) -> float:
        """Take the turns."""
        messages: list[Any] = []
        for _ in range(TURNS):
            messages.append({"role": "user", "content": self._corpus.take(self._size)})
            completion = await client.chat.completions.create(messages=messages, max_tokens=OUTPUT_TOKENS)
            messages.append(completion.choices[0].message)
        return 1.0


class Slow(Instant):
    """Answers after a while, and measures from an answer to the next call of the same episode."""

    def __init__(self, answers: list[Generation], latency_s: tuple[float, float]) -> None:
        super().__init__(answers)
        self._latency_s = latency_s
        self._rng = random.Random(0)
        self._answered: dict[str, float] = {}
        self.gaps: list[float] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the next of the prepared answers."""
        now = anyio.current_time()
        if request.episode_id in self._answered:
            self.gaps.append(now - self._answered[request.episode_id])
        due = now + self._rng.uniform(*self._latency_s)
        await anyio.sleep_until(due)
        self._answered[request.episode_id] = due
        return await super().generate(request)


@contextmanager
def collections_timed() -> Generator[list[float]]:
    """Yield the CPU seconds of each collection in the block."""
    seconds: list[float] = []
    start = 0.0

    def note(phase: str, _info: dict[str, int]) -> None:
        nonlocal start
        if phase == "start":
            start = time.process_time()
        else:
            seconds.append(time.process_time() - start)

    gc.callbacks.append(note)
    try:
        yield seconds
    finally:
        gc.callbacks.remove(note)


async def drive(setting: Setting, episodes: int) -> dict[str, float]:
    """Run the episodes under a setting and return the figures."""
    text = standard_library()
    with tempfile.TemporaryDirectory() as name:
        tokenizer, _ = save_tokenizer(Path(name), text)
        renderer = Renderer.load(name)
    text = text[TRAINED_ON:]
    end_of_turn = tokenizer.encode("<|im_end|>").ids[0]
    spoken = tokenizer.encode(text[:100_000]).ids
    answers = [
        answer(spoken[at : at + OUTPUT_TOKENS - 1], end_of_turn) for at in range(0, 61 * OUTPUT_TOKENS, OUTPUT_TOKENS)
    ]
    chars_per_token = 100_000 / len(spoken)
    workflow = Reader(Corpus(text), int((CONTEXT / TURNS - OUTPUT_TOKENS) * chars_per_token))
    backend, kept, waiting = Slow(answers, setting.latency_s), list[Trajectory](), iter(range(episodes))

    async def in_turn() -> None:
        for number in waiting:
            finished = await run_policy_episode(
                workflow,
                Task(id=str(number), data={}),
                backend=backend,
                renderer=renderer,
                rollout=RolloutConfig(),
                sampling=SamplingConfig(),
            )
            assert finished.failure is None, finished.failure
            kept.append(finished)
            del kept[:-KEPT]

    with setting.collector(), collections_timed() as pauses:
        started = time.process_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(setting.concurrent):
                tasks.start_soon(in_turn)
        spent = time.process_time() - started
    percentiles = quantiles(backend.gaps, n=100)
    return {
        "cpu_ms_per_turn": 1e3 * spent / (episodes * TURNS),
        "collector_share": sum(pauses) / spent,
        "gap_p50_ms": 1e3 * percentiles[49],
        "gap_p99_ms": 1e3 * percentiles[98],
        "gap_max_ms": 1e3 * max(backend.gaps),
        "longest_pause_ms": 1e3 * max(pauses, default=0.0),
        "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=4000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--setting", choices=list(SETTINGS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.setting is not None:
        print(json.dumps(asyncio.Runner(loop_factory=CpuClockLoop).run(drive(SETTINGS[options.setting], options.episodes))))
        return
    rounds: dict[str, list[dict[str, float]]] = {setting: [] for setting in SETTINGS}
    command = [sys.executable, "-m", "benchmarks.garbage_collector", "--episodes", str(options.episodes), "--setting"]
    for _ in range(options.repeats):
        for setting, results in rounds.items():
            done = subprocess.run([*command, setting], capture_output=True, text=True, check=True)
            results.append(json.loads(done.stdout))
    names = list(rounds["a run's"][0])
    rows = {
        setting: {name: round(median(one[name] for one in all_), 3) for name in names} for setting, all_ in rounds.items()
    }
    record = {
        "machine": describe_machine("openai", "anyio"),
        "repeats": options.repeats,
        "episodes": options.episodes,
        **rows,
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{'settings of the collector':<26}" + "".join(f"{setting:>10}" for setting in rows))
    for name in names:
        print(f"{name:<26}" + "".join(f"{row[name]:>10.3f}" for row in rows.values()))


if __name__ == "__main__":
    main()
