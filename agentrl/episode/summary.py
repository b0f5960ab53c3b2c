"""Figures of episodes: the line of the index, the training of a step, and the statistics behind `metrics.jsonl`.

Invariant: the keys of a written line are the fields of the structs here, which readers decode. A statistic over no episodes
has no key. A failed episode has no result, so rates and returns leave it out. `agentrl.observe.metric_keys` lists the keys.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, cast

import msgspec
import numpy as np

from agentrl.episode.trajectory import Float32Array, Int32Array, StopReason, Trajectory, Turn

EPISODES_HEADER = {"format": "agentrl.episodes", "version": 1}
"""First line of a file of full records."""
INDEX_HEADER = {"format": "agentrl.episodes.index", "version": 1}
"""First line of the index."""
TRAINED_HEADER = {"format": "agentrl.episodes.trained", "version": 1}
"""First line of a file of what a step trained."""
_PROMPT_CHARACTERS: Final = 160
MetricValue = float | int | str | bool | None
_LIMITS = frozenset({StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT, StopReason.CONTEXT_LIMIT, StopReason.DEADLINE})
Purpose: TypeAlias = Literal["training", "evaluation"]


class EndedEpisode(NamedTuple):
    """A finished attempt, and where in the run it ended."""

    trajectory: Trajectory
    purpose: Purpose
    """`training` or `evaluation`."""
    group: int | None
    """Number of the group; null for an evaluation."""
    step: int
    """The training step that was the next to complete when the episode ended, from 1."""
    policy_version: int
    """The published version when the episode ended."""
    run_begin_s: float
    """Zero of the run's clock, seconds of `time.perf_counter`."""


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
    """The advantage of its first trained token, which all share unless a critic parts them; null where none was trained."""
    proximal_logprobs: list[float | None] | None
    """Log-prob of each sampled id under the weights before the step, nats; null for tokens, and turns, that the trainer did
    not compute: those out of the loss, and those of a branch whose advantages are all 0."""
    sent: str | None = None
    """Digest of the ids that were sent to the server for the call (`Turn.prompt_digest`), 32 hex digits; null in older
    records."""
    trained: str | None = None
    """Digest of the trained array to the end of the turn: all ids, and the log-probs, versions and temperatures of the turn
    (`agentrl.tokens.verify.trained_digests`), 32 hex digits; null for a turn that was not trained, and in older records."""


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


def is_success(episode: Trajectory) -> bool:
    """Return whether an episode reached its goal; a failed one did not.

    Where the workflow recorded `success`, a value of at least 0.5 decides; elsewhere, a positive final reward.
    """
    if episode.failure is not None:
        return False
    recorded = episode.metrics.get("success")
    return recorded >= 0.5 if recorded is not None else (episode.final_reward or 0.0) > 0.0


def version_range(episodes: Iterable[Trajectory]) -> tuple[int, int] | None:
    """Return the lowest and highest policy version among the sampled tokens; None when nothing was sampled."""
    versions = [span.version for e in episodes for turn in e.turns for span in turn.spans]
    return (min(versions), max(versions)) if versions else None


def on_clock(moment_s: float | None, begin_s: float) -> float | None:
    """Return a moment as seconds after `begin_s`, to a tenth of a millisecond."""
    return None if moment_s is None else round(moment_s - begin_s, 4)


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
        started_s=on_clock(trajectory.started_s, ended.run_begin_s),
        ended_s=on_clock(trajectory.ended_s, ended.run_begin_s),
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
    digests: Sequence[str | None] | None = None,
) -> Mapping[str, object]:
    """Return the line of an episode that a step trained; its keys are the fields of `TrainedEpisode`.

    Each turn has an advantage, None where it was not trained, an array [T] float32, NaN for tokens not computed, and, with
    `digests`, that of what was trained, None where nothing was.
    """
    proofs: list[Mapping[str, str | None]] = [{} for _ in trajectory.turns]
    if digests is not None:
        sent = [turn.prompt_digest.hex() for turn in trajectory.turns]
        proofs = [{"sent": each, "trained": trained} for each, trained in zip(sent, digests, strict=True)]
    return {
        "episode_id": trajectory.episode_id,
        "step": step,
        "policy_version": policy_version,
        "turns": [
            {"advantage": advantage, "proximal_logprobs": logprobs, **proof}
            for advantage, logprobs, proof in zip(advantages, proximal_logprobs, proofs, strict=True)
        ],
    }


def _first_words(turns: Sequence[Turn]) -> str:
    for message in turns[0].messages if turns else ():
        if message.get("role") == "user" and (text := _plain_text(message.get("content"))):
            return " ".join(text[: 4 * _PROMPT_CHARACTERS].split())[:_PROMPT_CHARACTERS]
    return ""


def _plain_text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = cast("Sequence[object]", content) if isinstance(content, list | tuple) else ()
    texts = [cast("Mapping[str, object]", part).get("text") for part in parts if isinstance(part, Mapping)]
    return " ".join(text for text in texts if isinstance(text, str))


def episode_metrics(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return the number of episodes, success rate, returns, turns, output tokens, limits, and means of `workflow.NAME`.

    Success rate, returns, their parts and the figures by outcome are over the episodes that did not fail, and left out where
    all did; the rest is over all. Nothing but `episodes` when there are none.

    Example:
        >>> episode_metrics([])
        {'episodes': 0}
    """
    result: dict[str, float] = {"episodes": len(episodes)}
    if not episodes:
        return result
    if done := [e for e in episodes if e.failure is None]:
        returns = [e.episode_return for e in done]
        result["success_rate"] = float(np.mean([is_success(e) for e in done]))
        result["return_mean"], result["return_std"] = float(np.mean(returns)), float(np.std(returns))
        result |= _reward_parts(done) | _by_outcome(done)
    result["turns_mean"] = float(np.mean([len(e.turns) for e in episodes]))
    if any(e.num_output_tokens for e in episodes):  # the ids at an endpoint of others are not known
        result["output_tokens_mean"] = float(np.mean([e.num_output_tokens for e in episodes]))
    limits = Counter(f"limits.{e.stop_reason}" for e in episodes if e.failure is None and e.stop_reason in _LIMITS)
    result |= dict(sorted(limits.items()))
    recorded: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, value in episode.metrics.items():
            recorded[name].append(value)
    result |= {f"workflow.{name}": float(np.mean(values)) for name, values in sorted(recorded.items())}
    return result


def name_part(name: str) -> str:
    """Return a name that a workflow chose as the part of a key: what trackers refuse in a key becomes `_`.

    Example:
        >>> name_part("critic #1")
        'critic _1'
    """
    return re.sub(r"[^\w -]", "_", name, flags=re.ASCII)


def is_truncated(episode: Trajectory) -> bool:
    """Return whether a limit cut a turn of the episode, or the episode itself."""
    return episode.stop_reason in _LIMITS or any(turn.stop_reason == StopReason.LENGTH for turn in episode.turns)


def uniform_outcome(episodes: Sequence[Trajectory]) -> str | None:
    """Return `right` where all episodes succeeded, `wrong` where none did; else None."""
    verdicts = set(map(is_success, episodes))
    return None if len(verdicts) != 1 else "right" if verdicts == {True} else "wrong"


def _reward_parts(done: Sequence[Trajectory]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for episode in done:
        for name, value in episode.reward_parts.items():
            sums[name_part(name)] += value
    return {f"reward_parts.{name}": total / len(done) for name, total in sorted(sums.items())}


def _by_outcome(done: Sequence[Trajectory]) -> dict[str, float]:
    result: dict[str, float] = {}
    are_tokens_known = any(e.num_output_tokens for e in done)
    for outcome in ("right", "wrong"):
        if some := [episode for episode in done if is_success(episode) == (outcome == "right")]:
            result[f"turns_mean_by_outcome.{outcome}"] = float(np.mean([len(e.turns) for e in some]))
            if are_tokens_known:
                result[f"output_tokens_mean_by_outcome.{outcome}"] = float(np.mean([e.num_output_tokens for e in some]))
            result[f"truncated_share_by_outcome.{outcome}"] = float(np.mean([is_truncated(e) for e in some]))
    return result


def history_counts(episodes: Iterable[Trajectory]) -> dict[str, int]:
    """Return how many turns forked, as `forks.REASON`, and how many kept reasoning, as `kept_thinking_turns`."""
    counts: dict[str, int] = defaultdict(int)
    for episode in episodes:
        for turn in episode.turns:
            if turn.fork is not None:
                counts[f"forks.{turn.fork}"] += 1
            if turn.kept_thinking:
                counts["kept_thinking_turns"] += 1
    return dict(counts)


def staleness_metrics(staleness: Int32Array) -> dict[str, float]:
    """Return mean, p50, p99 and max of the staleness of trained tokens, [tokens] int32; empty without tokens."""
    if not len(staleness):
        return {}
    p50, p99 = np.percentile(staleness, [50, 99], method="higher")
    return {
        "staleness_mean": float(staleness.mean()),
        "staleness_p50": float(p50),
        "staleness_p99": float(p99),
        "staleness_max": float(staleness.max()),
    }


def prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return `values` with `prefix.` before each key."""
    return {f"{prefix}.{key}": value for key, value in values.items()}
