"""The nouns of agentrl: task, turn, trajectory, sample, group. Plain frozen records, no I/O, no torch.

Invariant: a trajectory is a tree of turns, each holding only the tokens it adds. Joining the turns from the root to any
leaf gives exactly the ids the server saw and produced, in order; every token sampled is trained at most once.

`Turn` and `Trajectory` are the only declaration of their fields, which stand in the order of the records of a run
(`agentrl.episode.codec`). Records lack `prompt_digest` and `turn_reward_parts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
Int32Array: TypeAlias = NDArray[np.int32]
Float32Array: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]
Message: TypeAlias = Mapping[str, Any]
"""One chat message as the OpenAI wire writes it: `role`, `content`, `tool_calls`, `tool_call_id`, ..."""
BranchPath: TypeAlias = tuple[int, ...]
"""A branch that a workflow declared independent (`client.branch`), below those it was opened in; empty for the main one."""
TokenDecoder: TypeAlias = Callable[[Sequence[int]], Sequence[str] | None]
"""Returns one text for each id; None where no tokenizer is known."""


class StopReason(StrEnum):
    """Why a turn or an episode ended."""

    STOP = "stop"
    """Turn: the model ended it (end-of-turn token or a stop string)."""
    LENGTH = "length"
    """Turn: the token limit of the call was reached; the output is truncated."""
    ABORT = "abort"
    """Turn: it was given up by the agent, or, for a call of token ids, ended early by the server; the output is partial."""
    COMPLETED = "completed"
    """Episode: the workflow returned a reward."""
    TURN_LIMIT = "turn_limit"
    """Episode: the turn budget was spent before the workflow returned."""
    TOKEN_LIMIT = "token_limit"
    """Episode: the token budget was spent before the workflow returned."""
    CONTEXT_LIMIT = "context_limit"
    """Episode: the context left no room for the next call."""
    DEADLINE = "deadline"
    """Episode: the wall-clock deadline passed: a limit if the policy caused that, else a failure.

    The policy caused it if calls of the model took at least half of the deadline, none of them over a tenth, and the last
    one ended, or was cut off, in the last tenth; no outside work ran into it, and the last call did not fail."""
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


class VersionSpan(NamedTuple):
    """Output tokens `start` (inclusive) to `end` (exclusive) of a turn were sampled by `version`."""

    start: int
    end: int
    version: int


class Speaker(NamedTuple):
    """The speaker of a client's calls: what each of its turns says of it, by the fields of `Turn`."""

    role: str = ""
    player: str = ""
    branch: BranchPath = ()
    dialect: str = ""
    client: str = ""
    left_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call: the tokens that it adds to its parent and the output of the server.

    Example:
        >>> turn = Turn(
        ...     context_ids=np.array([5, 6, 7], np.int32),
        ...     output_ids=np.array([8, 9], np.int32),
        ...     output_logprobs=np.array([-0.1, -0.2], np.float32),
        ...     spans=(VersionSpan(0, 2, 3),),
        ...     stop_reason=StopReason.STOP,
        ...     sent_after=0,
        ...     sent_at=0,
        ... )
        >>> turn.output_versions().tolist()
        [3, 3]
    """

    role: str = ""
    """Role in which the policy spoke, a label; empty where the workflow names none."""
    player: str = ""
    """Player that took the turn and has a return of its own; empty where the episode has one player."""
    branch: BranchPath = ()
    """The branch that the workflow declared independent; empty for the main one, and in older records."""
    dialect: str = ""
    """The dialect of a call over HTTP: `chat`, `responses` or `messages`; empty for one in process, and in older records."""
    client: str = ""
    """The program that made a call over HTTP, as it names itself, such as `claude-cli/2.1.197`; else empty."""
    left_out: bool = False
    """Whether the run file keeps the turn out of training, as it may a side call."""
    sent_after: int
    """Turns that were complete when the request was sent."""
    sent_at: int
    """When the request was sent: its number among the requests and turn rewards of the episode; missing in older records."""
    rewarded_at: int | None = None
    """When the reward was set, by the same count; null without one, and in older records."""
    parent: int | None = None
    """Number of the turn whose tokens the context continues; null for a root."""
    fork: ForkReason | None = None
    """Why the request did not extend the latest turn of its conversation; null where it did."""
    kept_thinking: bool = False
    """Whether the context holds reasoning that the chat template would have dropped (`history: keep`)."""
    stop_reason: StopReason
    """Why the turn ended: `stop`, `length` or `abort`."""
    reward: float | None = None
    """The turn's own reward; null where the workflow set none."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy, whose tokens have no policy gradient and are not trained."""
    truncated_by: Mapping[str, float] | None = None
    """The settings that kept tokens from being sampled, of `top_p`, `top_k` and `min_p`, such as `{"top_p": 0.9}`; missing
    where there are none, and in older records. The log-probs are those of the whole distribution."""
    messages: tuple[Message, ...] = ()
    """The messages that the call added after its parent's answer; the whole prompt of a root. Empty for a call made of token
    ids."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """The tool schemas where they differ from the parent's, or where there is no parent; else null."""
    message: Message = field(default_factory=dict[str, Any])
    """The answer: the assistant message that the output decoded to."""
    context_ids: Int32Array
    """[C] int32: token ids that the call added after its parent's answer; never trained."""
    output_ids: Int32Array
    """[T] int32: sampled token ids, exactly."""
    output_logprobs: Float32Array
    """[T] float32, nats: log-prob of each sampled id at `temperature`, under the version that sampled it."""
    spans: tuple[VersionSpan, ...]
    """`[start, end, version]` for each policy version of the sampled ids; `end` is exclusive. They cover 0 to T, and
    versions do not decrease."""
    started_s: float | None = None
    """When the request was made, seconds of `time.perf_counter`, in a record of the run's clock; null where not known."""
    ended_s: float | None = None
    """When the answer was recorded, seconds of the same clock."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the server's prefix cache held; null where not known, and in older records."""
    prompt_digest: bytes = b""
    """16 bytes: digest of the decimal, comma-joined ids sent to the server for this call."""

    @property
    def in_loss(self) -> bool:
        """Whether its tokens may be trained: it was not sampled at temperature 0, and is not left out."""
        return self.temperature > 0 and not self.left_out

    def output_versions(self) -> Int32Array:
        """Return the policy version of each output token, [T] int32."""
        versions = np.empty(len(self.output_ids), np.int32)
        for span in self.spans:
            versions[span.start : span.end] = span.version
        return versions


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
    """The message of the error."""
    traceback: str
    """The formatted traceback; empty where there is none."""
    after_turn: str | None = None
    """The line that raised, such as `agent.py:12`, where the last event before was a turn of the policy; null elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The recorded tokens, log-probs, versions and rewards of one episode: a tree of turns.

    Example:
        >>> ids = lambda *xs: np.array(xs, np.int32)
        >>> first = Turn(context_ids=ids(1, 2), output_ids=ids(3), output_logprobs=np.array([-1.0], np.float32),
        ...              spans=(VersionSpan(0, 1, 0),), stop_reason=StopReason.STOP, sent_after=0,
        ...              sent_at=0)
        >>> second = Turn(context_ids=ids(4), output_ids=ids(5), output_logprobs=np.array([-2.0], np.float32),
        ...               spans=(VersionSpan(0, 1, 1),), stop_reason=StopReason.STOP, parent=0,
        ...               sent_after=1, sent_at=1)
        >>> trajectory = Trajectory(episode_id="e", task_id="t", turns=(first, second),
        ...                         stop_reason=StopReason.COMPLETED, final_reward=1.0)
        >>> [sample] = trajectory.branches()
        >>> sample.token_ids.tolist(), sample.loss_mask.tolist(), sample.token_versions.tolist()
        ([1, 2, 3, 4, 5], [False, False, True, False, True], [-1, -1, 0, -1, 1])
    """

    episode_id: str
    """`GROUP.MEMBER.ATTEMPT` in training, `eval.STEP.NUMBER` in an evaluation after STEP."""
    task_id: str
    """Id of the task."""
    task: Task | None = None
    """The task, in a record its data; null where only the id is known."""
    stop_reason: StopReason
    """Why the episode ended."""
    final_reward: float | None = None
    """The reward that the workflow returned, credited to the whole episode; null for a failed one."""
    advantage: float | None = None
    """The advantage of all its turns, where `score_group` gave advantages; else null."""
    failure: EpisodeFailure | None = None
    """Why there is no usable result; null where there is one."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers that the workflow recorded, such as `{"busy": 1.0}`."""
    started_s: float | None = None
    """When the episode started, seconds of `time.perf_counter`, in a record of the run's clock; null where not known."""
    ended_s: float | None = None
    """When it ended, seconds of the same clock."""
    turns: tuple[Turn, ...]
    """The model calls, in order of completion; a parent stands before its children."""
    reward_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """The named parts of all rewards that were given in parts, added up by name; null in a record without any. A score that
    replaces the final reward drops its parts."""
    answer: str | None = None
    """The answer that the workflow named (`client.final_answer`); null where it named none."""
    turn_reward_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """The share of turn rewards in `reward_parts`; not recorded, so empty in a stored trajectory."""

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
        """Print the episode to the terminal: speakers, versions, log-probs (nats), rewards, and why turns forked.

        `tokens` prints each token, by its text where `texts` gives it, such as `token_texts` of a stored episode.
        `advantages` has one for each turn.
        """
        from agentrl.episode.show import print_view, view_of  # with rich, which only a display needs

        print_view(view_of(self, tokens=tokens, texts=texts, advantages=advantages))

    def _repr_html_(self) -> str:
        from agentrl.episode.show import html_of, view_of

        return html_of(view_of(self))

    def branches(self) -> list[Sample]:
        """Return one sample for each leaf; a turn shared by several leaves is trained in the first of them only.

        Greedy turns (temperature 0), and those that are left out, are never in the loss mask.
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
            mask[out:end] = turn.in_loss and index not in trained
            if turn.temperature > 0:
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


def are_independent(one: BranchPath, other: BranchPath) -> bool:
    """Return whether two turns stand in branches that were declared independent of each other: neither holds the other."""
    shared = min(len(one), len(other))
    return one[:shared] != other[:shared]
