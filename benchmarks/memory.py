"""Memory of token graphs: 256 episodes of 4,096 tokens, as the rollout side holds them while they run.

Run: `python -m benchmarks.memory [--episodes 256] [--tokens 4096] [--turns 10]`. Takes some seconds. Prints what Python and
numpy allocated for the graphs (conversation objects of the workflow included and not) and what the recorded turns hold
themselves, in bytes per token.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.tokens.graph import TokenGraph
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason, VersionSpan
from tests.support.tiny import build_tokenizer

WORDS = np.array(["the", "answer", "is", "what", "sum", "of", "these", "numbers", "use", "tool", "then", "result", "name"])


def text_of(renderer: Renderer, num_tokens: int, rng: np.random.Generator) -> str:
    """Return ordinary text of about `num_tokens` tokens."""
    ids = renderer.encode_content(" ".join(rng.choice(WORDS, num_tokens)))[:num_tokens]
    return renderer.decode(ids, skip_special=False)


def play(renderer: Renderer, *, num_tokens: int, num_turns: int, seed: int) -> tuple[TokenGraph, list[dict[str, Any]]]:
    """Return a graph of `num_turns` turns and `num_tokens` tokens, half of them sampled, and its conversation."""
    rng = np.random.default_rng(seed)
    piece = num_tokens // num_turns // 2 - 10
    graph = TokenGraph(renderer, episode_id=f"{seed:032x}", task_id=str(seed))
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
    tracemalloc.stop()
    turns = [turn for graph, _ in episodes for turn in graph.turns]
    stored = sum(turn.context_ids.nbytes + turn.output_ids.nbytes + turn.output_logprobs.nbytes for turn in turns)
    tokens = sum(len(turn.context_ids) + len(turn.output_ids) for turn in turns)
    texts = sum(len(message["content"]) for _, messages in episodes for message in messages)
    return {
        "episodes": num_episodes,
        "tokens_per_episode": tokens / num_episodes,
        "total_mb": with_messages / 1e6,
        "total_without_conversation_text_mb": (with_messages - texts) / 1e6,
        "arrays_bytes_per_token": stored / tokens,
        "total_bytes_per_token": with_messages / tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    for name, value in measure(options.episodes, options.tokens, options.turns).items():
        print(f"{name:36} {value:10.2f}")


if __name__ == "__main__":
    main()
