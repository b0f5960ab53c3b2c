"""A document of ATIF as an episode: one that agentrl wrote comes back whole, one of another program as far as it goes.

Of others, each step of the agent that is a model call becomes a turn, and what stands between them its messages. Embedded
trajectories stand before the main one, each a conversation of its own. Token ids are kept where the document has log-probs
for them; their policy version is 0, because the format has none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from agentrl.errors import ConfigError
from agentrl_viewer.exchange.atif_format import AtifMetrics, AtifResult, AtifStep, AtifTrajectory, ours
from agentrl_viewer.exchange.atif_messages import WireMessage, messages_of
from agentrl_viewer.exchange.foreign_record import EpisodeRecord, ReadEpisode, foreign_record

_READABLE: Final = re.compile(r"ATIF-v1\.\d+")
_DECODER: Final = msgspec.json.Decoder(AtifTrajectory)


def read_atif(text: bytes, where: Path) -> ReadEpisode:
    """Return the episode of a document.

    Args:
        text: the JSON of the document.
        where: the file, for messages, and for a name where the document has none.

    Raises:
        ConfigError: it is no ATIF document of version 1, or its steps contradict each other.
    """
    try:
        document = _DECODER.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where} is no ATIF document: {error}") from error
    if not _READABLE.fullmatch(document.schema_version):
        raise ConfigError(f"{where}: expected schema_version ATIF-v1.N, got {document.schema_version!r:.40}")
    turns = _Turns(where)
    own = ours(document.extra)
    is_own = "turns" not in own and "stop_reason" in own
    for part in (*(document.subagent_trajectories or ()), document):
        if is_own:
            turns.add_own(part)
        else:
            turns.add_foreign(part, is_main=part is document)
    if is_own:
        record = {name: value for name, value in own.items() if name != "run"}
        return ReadEpisode({**record, "turns": turns.in_order()}, turns.closing)
    return ReadEpisode(_foreign_record(document, turns.found, where), turns.closing)


class _Turns:
    """The turns of the trajectories of a document."""

    def __init__(self, where: Path) -> None:
        self.found: list[EpisodeRecord] = []
        self.closing: dict[int, list[WireMessage]] = {}
        self._where = where
        self._numbers: list[int] = []

    def in_order(self) -> list[EpisodeRecord]:
        """Return the turns in the order in which they were recorded."""
        order = sorted(range(len(self.found)), key=self._numbers.__getitem__)
        if sorted(self._numbers) != list(range(len(self.found))):
            raise ConfigError(f"{self._where}: expected turns 0 to {len(self.found) - 1}, got {sorted(self._numbers)[:20]}")
        return [self.found[at] for at in order]

    def add_own(self, document: AtifTrajectory) -> None:
        """Add the turns of a trajectory that agentrl wrote."""
        pending: list[WireMessage] = []
        for step in document.steps:
            message, *results = messages_of(step, _reference_text)
            own = ours(step.extra)
            if isinstance(number := own.get("turn"), int):
                if not step.is_copied_context:
                    self._numbers.append(number)
                    self.found.append(_own_turn(step, own, message, pending, document))
                pending = results
            else:
                pending += (message, *results)

    def add_foreign(self, document: AtifTrajectory, *, is_main: bool) -> None:
        """Add the turns of a trajectory of another program; raises ConfigError where its steps contradict each other."""
        pending: list[WireMessage] = []
        parent: int | None = None
        ids: list[int] = []
        for step in document.steps:
            message, *results = messages_of(step, _reference_text)
            if step.source != "agent" or step.is_copied_context or step.llm_call_count == 0:
                pending += (message, *results)
                continue
            sampled = _sampled(step.metrics or AtifMetrics(), ids)
            ids = [*ids, *sampled["context_ids"], *sampled["output_ids"]]
            first = parent is None
            self.found.append(
                {
                    "role": "" if is_main else document.agent.name,
                    "sent_after": len(self.found),
                    "sent_at": len(self.found),
                    "parent": parent,
                    "fork": "new_conversation" if first and self.found else None,
                    "stop_reason": "stop",
                    "reward": None,
                    "messages": pending,
                    "tools": document.agent.tool_definitions if first else None,
                    "message": message,
                    **sampled,
                }
            )
            parent, pending = len(self.found) - 1, results
        if parent is not None and pending:
            self.closing[parent] = pending


def _own_turn(
    step: AtifStep, own: Mapping[str, Any], message: WireMessage, pending: list[WireMessage], document: AtifTrajectory
) -> EpisodeRecord:
    metrics = step.metrics or AtifMetrics()
    tools = own.get("tools", document.agent.tool_definitions if own.get("parent") is None else None)
    return {
        **{name: value for name, value in own.items() if name != "turn"},
        "messages": pending,
        "tools": tools,
        "message": message,
        "output_ids": metrics.completion_token_ids or [],
        "output_logprobs": metrics.logprobs or [],
    }


def _sampled(metrics: AtifMetrics, before: Sequence[int]) -> EpisodeRecord:
    """Return the tokens of a call whose conversation has the ids `before`; none where they cannot be told."""
    ids, logprobs, prompt = metrics.completion_token_ids or [], metrics.logprobs or [], metrics.prompt_token_ids or []
    if len(ids) != len(logprobs) or not all(math.isfinite(value) and value <= 0 for value in logprobs):
        ids, logprobs = [], []
    extends = prompt[: len(before)] == list(before)
    return {
        "context_ids": prompt[len(before) :] if extends else [],
        "output_ids": ids,
        "output_logprobs": logprobs,
        "spans": [[0, len(ids), 0]] if ids else [],
        "cached_tokens": metrics.cached_tokens,
    }


def _foreign_record(document: AtifTrajectory, turns: list[EpisodeRecord], where: Path) -> EpisodeRecord:
    cost = document.final_metrics and document.final_metrics.total_cost_usd
    task = {
        "file": where.name,
        "agent": document.agent.name,
        "version": document.agent.version,
        "model": document.agent.model_name,
        "notes": document.notes,
    }
    return foreign_record(
        document.trajectory_id or document.session_id or where.stem,
        _task_name(where),
        task=task,
        turns=turns,
        reward=_harbor_reward(where),
        metrics={} if cost is None else {"cost_usd": cost},
        seconds=_seconds_of_steps(document.steps),
    )


def _task_name(where: Path) -> str:
    """Return the name of the task: Harbor writes TASK__ID/agent/trajectory.json."""
    return where.parent.parent.name.partition("__")[0] if where.parent.name == "agent" else where.stem


def _harbor_reward(where: Path) -> float | None:
    """Return the reward that Harbor's verifier left beside the folder of the agent; None where there is none."""
    file = where.parent.parent / "verifier" / "reward.txt"
    if where.parent.name != "agent" or not file.is_file():
        return None
    try:
        reward = float(file.read_text(encoding="utf-8").strip())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: expected a number: {error}") from error
    return reward if math.isfinite(reward) else None


def _seconds_of_steps(steps: Sequence[AtifStep]) -> float | None:
    """Return the time between the first and the last step."""
    try:
        times = [datetime.fromisoformat(step.timestamp) for step in steps if step.timestamp]
        return (times[-1] - times[0]).total_seconds() if len(times) > 1 else None
    except (ValueError, TypeError):  # no time, or one with and one without a zone
        return None


def _reference_text(result: AtifResult) -> str:
    """Return what stands for a result without content: the sub-agents that it names."""
    names = [each.trajectory_id or each.trajectory_path or "" for each in result.subagent_trajectory_ref or ()]
    return f"[sub-agent: {', '.join(names)}]" if names else ""
