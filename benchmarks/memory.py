"""Memory of token graphs: 256 episodes of 4,096 tokens, as the rollout side holds them while they run.

Run: `python -m benchmarks.memory` (some seconds; `--episodes 32` for less). It prints what Python and numpy allocated for
episodes of 10 and of 32 turns and writes benchmarks/results/memory.json: with the messages that running workflows keep
(`total_mb`), of the graphs alone (`graphs_mb`), and of those without the texts of the conversation, which no graph can do
without.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import tempfile
import tracemalloc
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.tokens.graph import TokenGraph
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason, VersionSpan
from tests.support.tiny import build_tokenizer

RESULTS = Path(__file__).parent / "results" / "memory.json"
TARGET_MB = 20
TURNS = (10, 32)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    rows = {f"{turns} turns": measure(options.episodes, options.tokens, turns) for turns in TURNS}
    machine = {
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "machine": platform.machine(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "target_mb": TARGET_MB, **rows}, indent=1) + "\n")
    print(" " * 38 + "".join(f"{name:>12}" for name in rows))
    for figure in next(iter(rows.values())):
        print(f"{figure:38}" + "".join(f"{row[figure]:12.2f}" for row in rows.values()))


if __name__ == "__main__":
    main()
