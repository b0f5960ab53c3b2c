"""What a run records of an episode: the full record, the line of the index, and what a step trained.

Invariant: the keys that are written are the fields of the structs here, which is what readers decode. A number that is not
finite is null. A record is encoded whatever a workflow put into its task or its messages.

The files are described in `agentrl.observe.episode_files`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

import msgspec
import numpy as np

from agentrl.observe.metrics import is_success, version_range
from agentrl.types import Float32Array, Trajectory, Turn

EPISODES_HEADER = {"format": "agentrl.episodes", "version": 1}
"""First line of a file of full records."""
INDEX_HEADER = {"format": "agentrl.episodes.index", "version": 1}
"""First line of the index."""
TRAINED_HEADER = {"format": "agentrl.episodes.trained", "version": 1}
"""First line of a file of what a step trained."""
_PROMPT_CHARACTERS: Final = 160


Purpose: TypeAlias = Literal["training", "evaluation"]
"""What an episode is for."""


class RecordedFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why an episode has no usable result."""

    kind: str
    """Name of the error class."""
    message: str
    """The message of the error."""
    traceback: str
    """The formatted traceback; empty where there is none."""
    after_turn: str | None = None
    """The line that raised, such as `agent.py:12`, where the last event before was a turn of the policy; null elsewhere."""


class RecordedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call of a recorded episode."""

    role: str
    """In which role the policy spoke; empty where the workflow names none."""
    player: str
    """Who took the turn; empty where the episode has one player."""
    branch: list[int] = []
    """The branch that the workflow declared independent; empty for the main one, and in records of older versions."""
    sent_after: int
    """Turns that were complete when the request was sent."""
    sent_at: int | None = None
    """When the request was sent: its number among the requests and turn rewards of the episode; null in older records."""
    rewarded_at: int | None = None
    """When the reward was set, by the same count; null without one, and in older records."""
    parent: int | None
    """Number of the turn that the call continues; null for a root."""
    fork: str | None
    """Why the request did not extend the latest turn of its conversation; null where it did."""
    kept_thinking: bool
    """Whether the context holds reasoning that the chat template would have dropped."""
    stop_reason: str
    """Why the turn ended: `stop`, `length` or `abort`."""
    reward: float | None
    """The turn's own reward."""
    temperature: float
    """Sampling temperature."""
    messages: list[dict[str, Any]]
    """The messages that the call added after its parent's answer; the whole prompt of a root."""
    tools: list[dict[str, Any]] | None
    """The tool schemas where they differ from the parent's, or where there is no parent; else null."""
    message: dict[str, Any]
    """The answer."""
    context_ids: list[int]
    """Token ids that the call added after its parent's answer."""
    output_ids: list[int]
    """Sampled token ids."""
    output_logprobs: list[float]
    """Log-prob of each sampled id under the version that sampled it, nats."""
    spans: list[tuple[int, int, int]]
    """`[start, end, version]` for each policy version of the sampled ids; `end` is exclusive."""
    started_s: float | None
    """When the request was made, seconds on the run's clock."""
    ended_s: float | None
    """When the answer was recorded, seconds on the run's clock."""


class RecordedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `episodes/step-NNNNNN.jsonl`."""

    purpose: str
    """`training` or `evaluation`."""
    group: int | None
    """Number of the group; null for an evaluation."""
    step: int
    """The training step that was the next to complete when the episode ended, from 1."""
    policy_version: int
    """The published version when the episode ended."""
    episode_id: str
    """`GROUP.MEMBER.ATTEMPT` in training, `eval.STEP.NUMBER` in an evaluation after STEP."""
    task_id: str
    """Id of the task."""
    task: dict[str, Any] | None
    """The data of the task."""
    stop_reason: str
    """Why the episode ended."""
    final_reward: float | None
    """The reward that the workflow returned; null for a failed episode."""
    advantage: float | None = None
    """The advantage of its turns, where `score_group` gave advantages; else null."""
    episode_return: float | None
    """Sum of all rewards, undiscounted; null for a failed episode."""
    success: bool | None
    """Whether it succeeded, by `agentrl.observe.metrics.is_success`; null for a failed episode."""
    failure: RecordedFailure | None
    """Why there is no usable result; null where there is one."""
    metrics: dict[str, float | None]
    """Numbers that the workflow recorded."""
    started_s: float | None
    """When the episode started, seconds on the run's clock."""
    ended_s: float | None
    """When it ended, seconds on the run's clock."""
    turns: list[RecordedTurn]
    """The model calls, in order of completion."""
    reward_parts: dict[str, float | None] | None = None
    """The named parts of all rewards that were given in parts, added up by name; null where there is none."""
    answer: str | None = None
    """The answer that the workflow named; null where it named none."""


class EpisodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `episodes/index.jsonl`: one finished attempt."""

    episode_id: str
    """As in the record."""
    task_id: str
    """As in the record."""
    purpose: str
    """As in the record."""
    group: int | None
    """As in the record."""
    step: int
    """As in the record."""
    policy_version: int
    """As in the record."""
    started_s: float | None
    """As in the record."""
    ended_s: float | None
    """As in the record."""
    episode_return: float | None
    """As in the record."""
    final_reward: float | None
    """As in the record."""
    success: bool | None
    """As in the record."""
    turns: int
    """Number of model calls."""
    output_tokens: int
    """Sampled tokens."""
    context_tokens: int
    """Tokens of the contexts, each counted in the turn that added it."""
    branches: int
    """Number of turns without children."""
    forks: dict[str, int]
    """Turns that forked, by reason."""
    stop_reason: str
    """As in the record."""
    failure: str | None
    """Name of the error class of a failed episode; null elsewhere."""
    players: list[str]
    """The players, in the order of their first turns; empty where the episode has one player."""
    min_version: int | None
    """Lowest policy version of a sampled token; null where nothing was sampled."""
    max_version: int | None
    """Highest policy version of a sampled token; null where nothing was sampled."""
    file: str
    """The file of the record, without its ending: `step-000007`."""
    line: int
    """Number of the record's line in that file, from 0; line 0 is the header."""
    prompt: str = ""
    """First words of the first user message, on one line; empty where there is none, and in records of older releases."""


class TrainedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What a step trained of one turn."""

    advantage: float | None
    """The advantage of its tokens; null where none of them was trained."""
    proximal_logprobs: list[float | None] | None
    """Log-prob of each sampled id under the weights before the step, nats; null for tokens, and turns, that the trainer did
    not compute: those out of the loss, and those of a branch whose advantages are all 0."""


class TrainedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `episodes/trained-NNNNNN.jsonl.gz`: an episode in the batch of that step."""

    episode_id: str
    """As in the record."""
    step: int
    """The training step."""
    policy_version: int
    """The version that it trained: the proximal policy."""
    turns: list[TrainedTurn]
    """In the order of the record's turns."""


class EndedEpisode(NamedTuple):
    """A finished attempt, and where in the run it ended."""

    trajectory: Trajectory
    purpose: Purpose
    group: int | None
    step: int
    policy_version: int
    run_begin_s: float
    """Zero of the run's clock, seconds of `time.perf_counter`."""


def trajectory_record(ended: EndedEpisode) -> Mapping[str, object]:
    """Return the line of one episode; its keys are the fields of `RecordedEpisode`."""
    trajectory = ended.trajectory
    failure = trajectory.failure
    return {
        "purpose": ended.purpose,
        "group": ended.group,
        "step": ended.step,
        "policy_version": ended.policy_version,
        "episode_id": trajectory.episode_id,
        "task_id": trajectory.task_id,
        "task": None if trajectory.task is None else dict(trajectory.task.data),
        "stop_reason": trajectory.stop_reason,
        "final_reward": trajectory.final_reward,
        "advantage": trajectory.advantage,
        "episode_return": trajectory.episode_return if failure is None else None,
        "success": is_success(trajectory) if failure is None else None,
        "failure": failure and asdict(failure),
        "metrics": dict(trajectory.metrics),
        "started_s": _on_run_clock(trajectory.started_s, ended),
        "ended_s": _on_run_clock(trajectory.ended_s, ended),
        "turns": [_turn_record(turn, ended) for turn in trajectory.turns],
        "reward_parts": dict(trajectory.reward_parts) or None,
        "answer": trajectory.answer,
    }


def summarize(ended: EndedEpisode, *, file: str, line: int) -> EpisodeSummary:
    """Return the index line of one episode, whose record is line `line` of `file`."""
    trajectory, versions = ended.trajectory, version_range([ended.trajectory])
    turns, failure = trajectory.turns, trajectory.failure
    players = dict.fromkeys(turn.player for turn in turns)
    return EpisodeSummary(
        episode_id=trajectory.episode_id,
        task_id=trajectory.task_id,
        purpose=ended.purpose,
        group=ended.group,
        step=ended.step,
        policy_version=ended.policy_version,
        started_s=_on_run_clock(trajectory.started_s, ended),
        ended_s=_on_run_clock(trajectory.ended_s, ended),
        episode_return=trajectory.episode_return if failure is None else None,
        final_reward=trajectory.final_reward,
        success=is_success(trajectory) if failure is None else None,
        turns=len(turns),
        output_tokens=trajectory.num_output_tokens,
        context_tokens=sum(len(turn.context_ids) for turn in turns),
        branches=len(trajectory.leaves()),
        forks=dict(Counter(str(turn.fork) for turn in turns if turn.fork is not None)),
        stop_reason=str(trajectory.stop_reason),
        failure=None if failure is None else failure.kind,
        players=[] if set(players) <= {""} else list(players),
        min_version=None if versions is None else versions[0],
        max_version=None if versions is None else versions[1],
        file=file,
        line=line,
        prompt=_first_words(turns),
    )


def trained_record(
    trajectory: Trajectory,
    *,
    step: int,
    policy_version: int,
    advantages: Sequence[float | None],
    proximal_logprobs: Sequence[Float32Array | None],
) -> Mapping[str, object]:
    """Return the line of an episode that a step trained; its keys are the fields of `TrainedEpisode`.

    Args:
        trajectory: the episode.
        step: number of the step.
        policy_version: the version that it trained.
        advantages: one for each turn; None where the turn was not trained.
        proximal_logprobs: one array for each turn, [T] float32, NaN for a token that was not computed.
    """
    return {
        "episode_id": trajectory.episode_id,
        "step": step,
        "policy_version": policy_version,
        "turns": [
            {"advantage": advantage, "proximal_logprobs": logprobs}
            for advantage, logprobs in zip(advantages, proximal_logprobs, strict=True)
        ],
    }


def _first_words(turns: Sequence[Turn]) -> str:
    """Return the beginning of the first text that a user message holds, with its white space folded."""
    for message in turns[0].messages if turns else ():
        if message.get("role") == "user" and (text := _plain_text(message.get("content"))):
            return " ".join(text[: 4 * _PROMPT_CHARACTERS].split())[:_PROMPT_CHARACTERS]
    return ""


def _plain_text(content: object) -> str:
    """Return the text of a message's content: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    parts = cast("Sequence[object]", content) if isinstance(content, list | tuple) else ()
    texts = [cast("Mapping[str, object]", part).get("text") for part in parts if isinstance(part, Mapping)]
    return " ".join(text for text in texts if isinstance(text, str))


def _turn_record(turn: Turn, ended: EndedEpisode) -> Mapping[str, object]:
    return {
        "role": turn.role,
        "player": turn.player,
        "branch": list(turn.branch),
        "sent_after": turn.sent_after,
        "sent_at": turn.sent_at,
        "rewarded_at": turn.rewarded_at,
        "parent": turn.parent,
        "fork": turn.fork,
        "kept_thinking": turn.kept_thinking,
        "stop_reason": turn.stop_reason,
        "reward": turn.reward,
        "temperature": turn.temperature,
        "messages": [dict(message) for message in turn.messages],
        "tools": None if turn.tools is None else list(turn.tools),
        "message": dict(turn.message),
        "context_ids": np.ascontiguousarray(turn.context_ids),
        "output_ids": np.ascontiguousarray(turn.output_ids),
        "output_logprobs": np.ascontiguousarray(turn.output_logprobs),
        "spans": [[span.start, span.end, span.version] for span in turn.spans],
        "started_s": _on_run_clock(turn.started_s, ended),
        "ended_s": _on_run_clock(turn.ended_s, ended),
    }


def _on_run_clock(seconds: float | None, ended: EndedEpisode) -> float | None:
    return None if seconds is None else round(seconds - ended.run_begin_s, 4)
