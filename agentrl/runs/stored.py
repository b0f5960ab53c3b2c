"""One episode from the files of a run.

Invariant: its trajectory has the tokens, log-probs, versions, messages and rewards that were recorded, exactly; times are
seconds on the run's clock, and `prompt_digest` is not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from agentrl.display.notebook import html_of
from agentrl.display.terminal import print_view
from agentrl.display.view import EpisodeView, view_of
from agentrl.observe.episode_record import EpisodeSummary, RecordedEpisode, RecordedTurn, TrainedEpisode
from agentrl.types import EpisodeFailure, ForkReason, StopReason, Task, Trajectory, Turn, VersionSpan

_RECORDS = msgspec.json.Decoder(RecordedEpisode)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEpisode:
    """An episode of a run with everything that is recorded of it."""

    summary: EpisodeSummary
    """Its line in the index."""
    trajectory: Trajectory
    """Its turns; `trajectory.task` has the task."""
    read_trained: Callable[[], TrainedEpisode | None]
    """Reads what `trained` returns."""
    read_texts: Callable[[Sequence[int]], list[str] | None]
    """Reads what `token_texts` returns."""

    @property
    def task(self) -> Task | None:
        """The task; None where only its id was recorded."""
        return self.trajectory.task

    @property
    def trained(self) -> TrainedEpisode | None:
        """The advantages and proximal log-probs of its turns; None for an episode that no step has trained."""
        return self.read_trained()

    def token_texts(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each of `ids`; None where no tokenizer of the run is found.

        Raises:
            ConfigError: the tokenizer of the run cannot be read.
        """
        return self.read_texts(ids)

    def show(self, tokens: bool = False) -> None:
        """Print the episode to the terminal, with the advantages that were trained; `tokens` prints each token, too."""
        print_view(self._view(tokens))

    def _repr_html_(self) -> str:
        """Return the episode as a notebook shows it, with every token."""
        return html_of(self._view(tokens=True))

    def _view(self, tokens: bool) -> EpisodeView:
        trained = self.trained
        advantages = None if trained is None else [turn.advantage for turn in trained.turns]
        return view_of(self.trajectory, tokens=tokens, texts=self.token_texts, advantages=advantages)


def stored_trajectory(record: bytes) -> Trajectory:
    """Return the trajectory of a line of `episodes/step-NNNNNN.jsonl`.

    Raises:
        msgspec.DecodeError: it is no such line.
    """
    found = _RECORDS.decode(record)
    failure = found.failure
    return Trajectory(
        episode_id=found.episode_id,
        task_id=found.task_id,
        turns=tuple(_turn(index, turn) for index, turn in enumerate(found.turns)),
        stop_reason=StopReason(found.stop_reason),
        final_reward=found.final_reward,
        advantage=found.advantage,
        failure=failure and EpisodeFailure(**msgspec.structs.asdict(failure)),
        metrics=_restored_numbers(found.metrics),
        reward_parts=_restored_numbers(found.reward_parts or {}),
        answer=found.answer,
        task=None if found.task is None else Task(id=found.task_id, data=found.task),
        started_s=found.started_s,
        ended_s=found.ended_s,
    )


def _restored_numbers(found: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float("nan") if value is None else value for name, value in found.items()}


def _turn(index: int, turn: RecordedTurn) -> Turn:
    sent_at, rewarded_at = turn.sent_at, turn.rewarded_at
    if sent_at is None:  # an older record: a reward is set when its turn completes, and a request is sent right after that
        sent_at, rewarded_at = 2 * turn.sent_after + 1, None if turn.reward is None else 2 * index + 2
    return Turn(
        context_ids=np.array(turn.context_ids, np.int32),
        output_ids=np.array(turn.output_ids, np.int32),
        output_logprobs=np.array(turn.output_logprobs, np.float32),
        spans=tuple(VersionSpan(start=start, end=end, version=version) for start, end, version in turn.spans),
        stop_reason=StopReason(turn.stop_reason),
        reward=turn.reward,
        role=turn.role,
        player=turn.player,
        branch=tuple(turn.branch),
        sent_after=turn.sent_after,
        sent_at=sent_at,
        rewarded_at=rewarded_at,
        parent=turn.parent,
        message=turn.message,
        temperature=turn.temperature,
        fork=None if turn.fork is None else ForkReason(turn.fork),
        kept_thinking=turn.kept_thinking,
        messages=tuple(turn.messages),
        tools=turn.tools,
        started_s=turn.started_s,
        ended_s=turn.ended_s,
    )
