"""One episode as the page and a file for a colleague read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentrl.commands.open_run import StoredEpisode, TokenTexts
from agentrl.episode.codec import turn_record
from agentrl.episode.summary import TrainedTurn
from agentrl.types import Int32Array, Turn


def episode_json(episode: StoredEpisode, token_texts: TokenTexts) -> dict[str, Any]:
    """Return an episode as JSON: `summary`, `task`, `metrics`, `reward_parts`, `answer`, `failure`, `trained` and `turns`.

    A turn has what its record has, the texts of its tokens where the tokenizer is known (else null), and of what was trained
    its `advantage`, `proximal_logprobs` in nats and `is_trained`.
    """
    trajectory, trained, failure = episode.trajectory, episode.trained, episode.trajectory.failure
    ids = sorted({int(id_) for turn in trajectory.turns for id_ in (*turn.context_ids, *turn.output_ids)})
    known = token_texts(ids)
    texts = None if known is None else dict(zip(ids, known, strict=True))
    return {
        "summary": msgspec.to_builtins(episode.summary),
        "task": episode.task and dict(episode.task.data),
        "metrics": dict(trajectory.metrics),
        "reward_parts": dict(trajectory.reward_parts),
        "answer": trajectory.answer,
        "failure": failure and {"kind": failure.kind, "message": failure.message, "traceback": failure.traceback},
        "trained": trained and {"step": trained.step, "policy_version": trained.policy_version},
        "turns": [_turn_json(turn, trained and trained.turns[at], texts) for at, turn in enumerate(trajectory.turns)],
    }


def _turn_json(turn: Turn, trained: TrainedTurn | None, texts: Mapping[int, str] | None) -> dict[str, Any]:
    advantage = trained.advantage if trained else None
    return turn_record(turn) | {
        "context_texts": _texts_of_ids(turn.context_ids, texts),
        "output_texts": _texts_of_ids(turn.output_ids, texts),
        "advantage": advantage,
        "proximal_logprobs": trained.proximal_logprobs if trained else None,
        "is_trained": advantage is not None and turn.in_loss,
    }


def _texts_of_ids(ids: Int32Array, texts: Mapping[int, str] | None) -> list[str] | None:
    return None if texts is None else [texts[int(id_)] for id_ in ids]
