"""Memory of token graphs: 256 episodes of 4,096 tokens, and long agents, as the rollout side holds them while they run.

Run: `python -m benchmarks.memory` (some seconds; `--episodes 32` for less). It prints what Python and numpy allocated for
episodes of 10 and of 32 turns and writes benchmarks/results/memory.json: with the messages that running workflows keep
(`total_mb`), of the graphs alone (`graphs_mb`), and of those without the texts of the conversation, which no graph can do
without.

Long agents have 64 turns and 128k tokens (`--long-episodes 4` of them; episodes share nothing, so 256 take 64 times as
much). Their graphs without the conversation's text are compared with the ids and log-probs alone, at half and at full
length: growth that is quadratic in turns would show between them. The journal then writes them as fast as it can in its
thread. What stops the event loop meanwhile is the encoding of one record. Its processor time is measured beside the longest
pause, which a busy machine makes longer.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from agentrl.episode.codec import encode_line, trajectory_record
from agentrl.episode.summary import EndedEpisode
from agentrl.observe.episode_files import EpisodeFiles
from agentrl.tokens.graph import TokenGraph
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason, Trajectory, VersionSpan
from tests.support.tiny import build_tokenizer

RESULTS = Path(__file__).parent / "results" / "memory.json"
TARGET_MB = 20
TURNS = (10, 32)
LONG_TURNS, LONG_TOKENS = 64, 131_072
WORDS = np.array(["the", "answer", "is", "what", "sum", "of", "these", "numbers", "use", "tool", "then", "result", "name"])


def text_of(renderer: Renderer, num_tokens: int, rng: np.random.Generator) -> str:
    """Return ordinary text of about `num_tokens` tokens."""
    ids = renderer.encode_content(" ".join(rng.choice(WORDS, num_tokens)))[:num_tokens]
    return renderer.decode(ids, skip_special=False)


def play(renderer: Renderer, *, num_tokens: int, num_turns: int, seed: int) -> tuple[TokenGraph, list[dict[str, Any]]]:
    """Return a graph of `num_turns` turns and `num_tokens` tokens, half of them sampled, and its conversation."""
    rng = np.random.default_rng(seed)
    piece = num_tokens // num_turns // 2 - 10
    graph = TokenGraph(renderer, episode_id=f"{seed:032x}")
    messages: list[dict[str, Any]] = []
    for _ in range(num_turns):
        messages.append({"role": "user", "content": text_of(renderer, piece, rng)})
        prompt = graph.prepare(messages)
        ids = [*renderer.encode_content(text_of(renderer, piece, rng)), renderer.end_of_turn_id or 0]
        turn = graph.append(
            prompt,
            output_ids=ids,
            output_logprobs=rng.uniform(-3, -0.01, len(ids)).astype(np.float32),
            spans=(VersionSpan(start=0, end=len(ids), version=seed % 7),),
            stop_reason=StopReason.STOP,
            matched_stop=renderer.end_of_turn_id,
            temperature=1.0,
        )
        messages.append(dict(graph.turns[turn].message))
    return graph, messages


def measure(num_episodes: int, num_tokens: int, num_turns: int) -> dict[str, float]:
    """Return megabytes and bytes per token."""
    with tempfile.TemporaryDirectory() as folder:
        build_tokenizer(Path(folder))
        renderer = Renderer.load(folder)
    play(renderer, num_tokens=num_tokens, num_turns=num_turns, seed=0)
    gc.collect()
    tracemalloc.start()
    episodes = [play(renderer, num_tokens=num_tokens, num_turns=num_turns, seed=seed) for seed in range(1, num_episodes + 1)]
    gc.collect()
    with_messages = tracemalloc.get_traced_memory()[0]
    texts = sum(len(message["content"]) for _, messages in episodes for message in messages)
    for _, messages in episodes:
        messages.clear()
    gc.collect()
    graphs = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    turns = [turn for graph, _ in episodes for turn in graph.turns]
    stored = sum(turn.context_ids.nbytes + turn.output_ids.nbytes + turn.output_logprobs.nbytes for turn in turns)
    tokens = sum(len(turn.context_ids) + len(turn.output_ids) for turn in turns)
    return {
        "episodes": num_episodes,
        "tokens_per_episode": round(tokens / num_episodes, 1),
        "total_mb": round(with_messages / 1e6, 2),
        "graphs_mb": round(graphs / 1e6, 2),
        "graphs_without_conversation_text_mb": round((graphs - texts) / 1e6, 2),
        "arrays_bytes_per_token": round(stored / tokens, 2),
        "total_bytes_per_token": round(with_messages / tokens, 2),
    }


def measure_long(num_episodes: int) -> dict[str, float]:
    """Return bytes of long agents' graphs, over the ids and log-probs alone, and the pauses of the loop."""
    with tempfile.TemporaryDirectory() as folder:
        build_tokenizer(Path(folder))
        renderer = Renderer.load(folder)
    play(renderer, num_tokens=4096, num_turns=8, seed=0)
    found: dict[str, float] = {}
    graphs: list[TokenGraph] = []
    for turns in (LONG_TURNS // 2, LONG_TURNS):
        gc.collect()
        tracemalloc.start()
        tokens = LONG_TOKENS * turns // LONG_TURNS
        episodes = [play(renderer, num_tokens=tokens, num_turns=turns, seed=seed) for seed in range(num_episodes)]
        texts = sum(len(message["content"]) for _, messages in episodes for message in messages)
        graphs = [graph for graph, _ in episodes]
        episodes.clear()
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - texts
        tracemalloc.stop()
        recorded = [turn for graph in graphs for turn in graph.turns]
        arrays = sum(turn.context_ids.nbytes + turn.output_ids.nbytes + turn.output_logprobs.nbytes for turn in recorded)
        found[f"{turns} turns: kilobytes of an episode"] = held / num_episodes / 1e3
        found[f"{turns} turns: over ids and log-probs alone"] = held / arrays
    return found | anyio.run(journal_pauses, graphs)


async def journal_pauses(graphs: list[TokenGraph]) -> dict[str, float]:
    """Return the longest pause of the event loop, milliseconds, while the journal writes, and while nothing is done."""
    with tempfile.TemporaryDirectory() as folder:
        files = EpisodeFiles(Path(folder), next_step=1)
        idle = await longest_pause(lambda: anyio.sleep(0.5))
        ended = [
            EndedEpisode(
                trajectory=Trajectory(
                    episode_id=str(number), task_id="t", turns=tuple(graph.turns), stop_reason=StopReason.COMPLETED
                ),
                purpose="training",
                group=number,
                step=1,
                policy_version=1,
                run_begin_s=0.0,
            )
            for number, graph in enumerate(graphs)
        ]
        for one in ended:
            files.put(one)
        busy = await longest_pause(files.flush)
        record = trajectory_record(ended[0])
        spent: list[float] = []
        for _ in range(9):
            began = time.process_time()
            encode_line(record)
            spent.append(time.process_time() - began)
        await files.close()
    return {
        "longest pause of the loop, ms: idle": 1e3 * idle,
        "longest pause of the loop, ms: journal": 1e3 * busy,
        "encoding of a record, CPU ms": 1e3 * min(spent),
    }


async def longest_pause(work: Callable[[], Awaitable[None]]) -> float:
    """Return the longest time between two turns of the loop while `work` runs, seconds."""
    longest, done = 0.0, False

    async def watch() -> None:
        nonlocal longest
        while not done:
            began = time.perf_counter()
            await anyio.sleep(0.001)
            longest = max(longest, time.perf_counter() - began - 0.001)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await work()
        done = True
    return longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--long-episodes", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = {f"{turns} turns": measure(options.episodes, options.tokens, turns) for turns in TURNS}
    machine = {
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "machine": platform.machine(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    long = measure_long(options.long_episodes)
    found = {"machine": machine, "target_mb": TARGET_MB, **rows, "long agents": long}
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(" " * 38 + "".join(f"{name:>12}" for name in rows))
    for figure in next(iter(rows.values())):
        print(f"{figure:38}" + "".join(f"{row[figure]:12.2f}" for row in rows.values()))
    for figure, value in long.items():
        print(f"{figure:50}{value:12.3f}")


if __name__ == "__main__":
    main()
