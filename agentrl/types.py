"""The nouns of agentrl: task, turn, trajectory, group, sample. Plain frozen records, no I/O, no torch.

Invariant: a trajectory is a tree of turns, each holding only the tokens it adds. Joining the turns from the root to any
leaf gives exactly the ids the server saw and produced, in order; every token sampled is trained at most once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentrl.display.view import TokenDecoder, view_of

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
Int32Array: TypeAlias = NDArray[np.int32]
Float32Array: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
Message: TypeAlias = Mapping[str, Any]
"""One chat message as the OpenAI wire writes it: `role`, `content`, `tool_calls`, `tool_call_id`, ..."""
BranchPath: TypeAlias = tuple[int, ...]
"""A branch that a workflow declared independent (`client.branch`), below those it was opened in; empty for the main one."""


class StopReason(StrEnum):
    """Why a turn or an episode ended."""

    STOP = "stop"
    """Turn: the model ended it (end-of-turn token or a stop string)."""
    LENGTH = "length"
    """Turn: the token limit of the call was reached; the output is truncated."""
    ABORT = "abort"
    """Turn: the server ended it early; the output is partial."""
    COMPLETED = "completed"
    """Episode: the workflow returned a reward."""
    TURN_LIMIT = "turn_limit"
    """Episode: the turn budget was spent before the workflow returned."""
    TOKEN_LIMIT = "token_limit"
    """Episode: the token budget was spent before the workflow returned."""
    CONTEXT_LIMIT = "context_limit"
    """Episode: the context left no room for the next call."""
    DEADLINE = "deadline"
    """Episode: the wall-clock deadline passed: a limit if that is the policy's doing, else a failure.

    It is the policy's doing if calls of the model took at least half of the deadline, none of them over a tenth, and the
    last one ended, or was cut off, in the last tenth; no outside work ran into it, and the last call did not fail."""
    WORKFLOW_ERROR = "workflow_error"
    """Episode: the workflow raised or returned what is not a reward."""
    ENVIRONMENT_FAULT = "environment_fault"
    """Episode: the environment or a tool backend broke."""
    SERVER_ERROR = "server_error"
    """Episode: no inference server could answer."""


class ForkReason(StrEnum):
    """Why a request did not extend the latest turn of its conversation."""

    HISTORY_EDITED = "history_edited"
    """A message that the server has seen was changed, removed or inserted."""
    THINKING_STRIPPED = "thinking_stripped"
    """The chat template (history: as_template) drops earlier reasoning."""
    TOOLS_CHANGED = "tools_changed"
    """The list of tools differs from the one the parent turn was rendered with."""
    NEW_CONVERSATION = "new_conversation"
    """A request after the first turn continues no recorded turn: another role, a sub-agent, a compacted context."""
    TEMPLATE_CHANGED = "template_changed"
    """The template's own text for known messages differs from what was recorded (system text, template options)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem instance with its metadata; `task["question"]` reads a field.

    Example:
        >>> task = Task(id="7", data={"question": "2 + 2 = ?", "answer": "4"})
        >>> task["answer"]
        '4'
    """

    id: str
    """Unique within its task set."""
    data: Mapping[str, Any]
    """The fields of the task, as its author wrote them."""

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - a task's fields are the user's own JSON
        """Return a field; the error for a missing one lists the fields of the task."""
        try:
            return self.data[key]
        except KeyError:
            raise KeyError(f"task {self.id!r} has no field {key!r}; it has {sorted(self.data)}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Output tokens `start` (inclusive) to `end` (exclusive) of one turn were sampled by `version`."""

    start: int
    end: int
    version: int


class Speaker(NamedTuple):
    """Who speaks through a client."""

    role: str = ""
    """A label of the turns; empty unless the workflow names roles."""
    player: str = ""
    """A player with returns of its own; empty unless the workflow names players."""
    branch: BranchPath = ()
    """The declared branch that it speaks in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call: the tokens that it adds to its parent and the output of the server.

    Example:
        >>> turn = Turn(
        ...     context_ids=np.array([5, 6, 7], np.int32),
        ...     output_ids=np.array([8, 9], np.int32),
        ...     output_logprobs=np.array([-0.1, -0.2], np.float32),
        ...     spans=(VersionSpan(start=0, end=2, version=3),),
        ...     stop_reason=StopReason.STOP,
        ...     sent_after=0,
        ...     sent_at=0,
        ... )
        >>> turn.output_versions().tolist()
        [3, 3]
    """

    context_ids: Int32Array
    """[C] int32: tokens since the end of the parent turn (scaffold, user text, tool results); never trained."""
    output_ids: Int32Array
    """[T] int32: the ids the model sampled, exactly."""
    output_logprobs: Float32Array
    """[T] float32, nats: log-prob of each output id under the weights `spans` names, at `temperature`."""
    spans: tuple[VersionSpan, ...]
    """Policy versions of the output tokens; contiguous from 0 to T, versions non-decreasing."""
    stop_reason: StopReason
    reward: float | None = None
    """The turn's own reward; None where the workflow set none."""
    role: str = ""
    """In which role the policy spoke, where a workflow names roles (`client.role`); a label, returns are shared."""
    player: str = ""
    """Who took the turn, where an episode has several players with returns of their own; empty elsewhere."""
    branch: BranchPath = ()
    """The declared branch of its call; empty where the workflow declared none."""
    sent_after: int
    """How many turns were complete when the request was sent."""
    sent_at: int
    """When the request was sent: its number among the events of the episode, the requests and the turn rewards."""
    rewarded_at: int | None = None
    """When `reward` was set, by the same count; None without a reward."""
    parent: int | None = None
    """Index of the turn whose tokens this turn's context continues; None for a root."""
    message: Message = field(default_factory=dict[str, Any])
    """The assistant message the output decoded to."""
    temperature: float = 1.0
    """Sampling temperature of the call; 0 means greedy, whose tokens have no policy gradient and are not trained."""
    fork: ForkReason | None = None
    """Set when the request did not extend the latest turn of its conversation."""
    kept_thinking: bool = False
    """Whether its context holds earlier reasoning that the chat template would have dropped (`history: keep`)."""
    prompt_digest: bytes = b""
    """16 bytes: digest of the decimal, comma-joined ids sent to the server for this call."""
    messages: tuple[Message, ...] = ()
    """The messages that the call added after its parent's answer; all of its messages for a root. Empty for a call made of
    token ids."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """The tool schemas of the call where they differ from its parent's, or where it has no parent; None elsewhere."""
    started_s: float | None = None
    """When the request was made, seconds of `time.perf_counter`; None where it is not known."""
    ended_s: float | None = None
    """When the answer was recorded, seconds of the same clock."""

    def output_versions(self) -> Int32Array:
        """Return the policy version of each output token, [T] int32."""
        versions = np.empty(len(self.output_ids), np.int32)
        for span in self.spans:
            versions[span.start : span.end] = span.version
        return versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A branch as training arrays, all of length L."""

    token_ids: Int32Array
    """[L] int32."""
    loss_mask: BoolArray
    """[L] bool, True at t where the prediction *of* token t, from the tokens before it, is trained."""
    behavior_logprobs: Float32Array
    """[L] float32, nats; 0 where not sampled."""
    token_versions: Int32Array
    """[L] int32: the policy version that sampled the token; -1 where not sampled."""
    turn_index: Int32Array
    """[L] int32: index into `Trajectory.turns`."""
    temperatures: Float32Array
    """[L] float32: sampling temperature; 1 where not sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFailure:
    """Why an episode has no usable result."""

    kind: str
    """Name of the error class."""
    message: str
    traceback: str
    """The formatted traceback, for the first report of an error."""
    after_turn: str | None = None
    """The line that raised, such as `agent.py:12`, where the last event before was a turn of the policy; None elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The recorded tokens, log-probs, versions and rewards of one episode: a tree of turns.

    Example:
        >>> ids = lambda *xs: np.array(xs, np.int32)
        >>> first = Turn(context_ids=ids(1, 2), output_ids=ids(3), output_logprobs=np.array([-1.0], np.float32),
        ...              spans=(VersionSpan(start=0, end=1, version=0),), stop_reason=StopReason.STOP, sent_after=0,
        ...              sent_at=0)
        >>> second = Turn(context_ids=ids(4), output_ids=ids(5), output_logprobs=np.array([-2.0], np.float32),
        ...               spans=(VersionSpan(start=0, end=1, version=1),), stop_reason=StopReason.STOP, parent=0,
        ...               sent_after=1, sent_at=1)
        >>> trajectory = Trajectory(episode_id="e", task_id="t", turns=(first, second),
        ...                         stop_reason=StopReason.COMPLETED, final_reward=1.0)
        >>> [sample] = trajectory.branches()
        >>> sample.token_ids.tolist(), sample.loss_mask.tolist(), sample.token_versions.tolist()
        ([1, 2, 3, 4, 5], [False, False, True, False, True], [-1, -1, 0, -1, 1])
    """

    episode_id: str
    task_id: str
    turns: tuple[Turn, ...]
    """In order of completion; a parent stands before its children."""
    stop_reason: StopReason
    final_reward: float | None = None
    """The reward that the workflow returned, credited to the whole episode. None for a failed episode."""
    advantage: float | None = None
    """The advantage of all its turns, where `score_group` gave advantages; None elsewhere."""
    failure: EpisodeFailure | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers the workflow recorded, such as `{"busy": 1.0}`."""
    reward_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """The named parts of all rewards that the workflow gave in parts, added up by name; a score that replaces the final
    reward drops its parts."""
    turn_reward_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """The share of turn rewards in `reward_parts`; not recorded, so empty in a stored trajectory."""
    answer: str | None = None
    """The episode's answer, where the workflow named one (`client.final_answer`)."""
    task: Task | None = None
    """The task of the episode; None where only its id is known."""
    started_s: float | None = None
    """When the episode started, seconds of `time.perf_counter`; None where it is not known."""
    ended_s: float | None = None
    """When it ended, seconds of the same clock."""

    @property
    def episode_return(self) -> float:
        """Sum of all turn rewards and the final reward, undiscounted."""
        return math.fsum(turn.reward or 0.0 for turn in self.turns) + (self.final_reward or 0.0)

    def player_returns(self) -> dict[str, float]:
        """Return the return of each player: the rewards of its own turns and the final reward, undiscounted."""
        final = self.final_reward or 0.0
        players = dict.fromkeys(turn.player for turn in self.turns)
        return {
            player: math.fsum(turn.reward or 0.0 for turn in self.turns if turn.player == player) + final
            for player in players
        }

    @property
    def num_output_tokens(self) -> int:
        """Tokens the model sampled in this episode."""
        return sum(len(turn.output_ids) for turn in self.turns)

    def leaves(self) -> list[int]:
        """Return the indices of turns without children, in order."""
        parents = {turn.parent for turn in self.turns}
        return [index for index in range(len(self.turns)) if index not in parents]

    def path(self, leaf: int) -> list[int]:
        """Return the turn indices from the root to `leaf`, both included."""
        path: list[int] = []
        index: int | None = leaf
        while index is not None:
            path.append(index)
            index = self.turns[index].parent
        return path[::-1]

    def messages(self, leaf: int | None = None) -> list[Message]:
        """Return the conversation that ends with the answer of turn `leaf`; None: the last turn. Without turns, [].

        A call made of token ids adds no messages but its answer.

        Raises:
            IndexError: there is no turn `leaf`.
        """
        if not self.turns:
            return []
        conversation: list[Message] = []
        for index in self.path(len(self.turns) - 1 if leaf is None else range(len(self.turns))[leaf]):
            conversation += (*self.turns[index].messages, self.turns[index].message)
        return conversation

    def show(
        self,
        tokens: bool = False,
        *,
        texts: TokenDecoder | None = None,
        advantages: Sequence[float | None] | None = None,
    ) -> None:
        """Print the episode to the terminal: speakers, versions, log-probs, rewards, and why turns forked.

        Args:
            tokens: whether to print each token with its loss mask, version, log-prob (nats) and probability.
            texts: returns the texts of token ids, such as `agentrl.open_run(...).episode(...).token_texts`; None: ids.
            advantages: one for each turn; None: not shown.
        """
        from agentrl.display.terminal import print_view

        print_view(view_of(self, tokens=tokens, texts=texts, advantages=advantages))

    def _repr_html_(self) -> str:
        """Return the episode as a notebook shows it."""
        from agentrl.display.notebook import html_of

        return html_of(view_of(self))

    def branches(self) -> list[Sample]:
        """Return one sample for each leaf; a turn shared by several leaves is trained in the first of them only.

        Greedy turns (temperature 0) are never in the loss mask.
        """
        trained: set[int] = set()
        samples: list[Sample] = []
        for leaf in self.leaves():
            path = self.path(leaf)
            samples.append(self._sample(path, trained))
            trained.update(path)
        return samples

    def _sample(self, path: Sequence[int], trained: set[int]) -> Sample:
        length = sum(len(self.turns[i].context_ids) + len(self.turns[i].output_ids) for i in path)
        ids = np.empty(length, np.int32)
        mask = np.zeros(length, np.bool_)
        logprobs = np.zeros(length, np.float32)
        versions = np.full(length, -1, np.int32)
        turn_index = np.empty(length, np.int32)
        temperatures = np.ones(length, np.float32)
        at = 0
        for index in path:
            turn = self.turns[index]
            out = at + len(turn.context_ids)
            end = out + len(turn.output_ids)
            ids[at:out], ids[out:end] = turn.context_ids, turn.output_ids
            turn_index[at:end] = index
            logprobs[out:end] = turn.output_logprobs
            versions[out:end] = turn.output_versions()
            if turn.temperature > 0:
                mask[out:end] = index not in trained
                temperatures[out:end] = turn.temperature
            at = end
        return Sample(
            token_ids=ids,
            loss_mask=mask,
            behavior_logprobs=logprobs,
            token_versions=versions,
            turn_index=turn_index,
            temperatures=temperatures,
        )


@dataclass(frozen=True, slots=True)
class MemberAdvantages:
    """The advantages of the members of a group, which `score_group` may return in place of scores.

    Every turn of a member gets the member's number as it is: nothing is subtracted from it or divided.

    Example:
        >>> MemberAdvantages([0.5, -0.5]).values
        [0.5, -0.5]
    """

    values: Sequence[float]
    """One for each member; a finite number, as a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The episodes of one task, carried together from admission to the loss."""

    index: int
    """Admission number, from 0; unique within a run."""
    task: Task
    episodes: tuple[Trajectory, ...]
    admitted_version: int
    """Policy version when the group was opened; no token of it is older."""

    def min_version(self) -> int:
        """Return the oldest policy version among the sampled tokens (`admitted_version` if none was sampled)."""
        turns = (turn for episode in self.episodes for turn in episode.turns)
        return min((span.version for turn in turns for span in turn.spans), default=self.admitted_version)
