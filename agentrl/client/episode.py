"""One episode as its clients share it: the turns, the budgets, rewards and metrics.

Invariant: a model call either becomes exactly one turn or leaves the episode as it was (refused, failed, timed out,
cancelled). A turn has at most one reward, finite; after `close` nothing changes any more.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final
from uuid import uuid4

import numpy as np

from agentrl.client.calls import EpisodeCalls, RunningCall
from agentrl.client.config import SamplingConfig
from agentrl.client.structured.demand import Demand
from agentrl.client.structured.instructions import Instructions
from agentrl.errors import AgentRLError, ContextOverflow, ReplyError, RewardError, ServerUnavailable, WorkflowError
from agentrl.inference.backend import Backend, GenerateRequest, Generation, SamplingParams
from agentrl.tokens.graph import Prompt, TokenGraph
from agentrl.tokens.history import continues_other_branch
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.template.rendering import ToolSchemas
from agentrl.types import (
    BranchPath,
    EpisodeFailure,
    Int32Array,
    Message,
    Speaker,
    StopReason,
    Trajectory,
    Turn,
)
from agentrl.validation import are_independent, check_reward_parts

_AMBIGUOUS = -1
REPORTED_NAMES: Final = ("prompt_tokens", "completion_tokens")
"""What an endpoint counts of an episode; metrics of the trajectory."""

MISSES_METRIC: Final = "unsupported_misses"
"""Answers that miss what their call demanded, where prompts ask for it (`sampling.unsupported: prompt`)."""


class EpisodeRecord(ABC):
    """What every episode keeps, whichever model answers. Single-threaded: no method awaits."""

    turns: Sequence[Turn]
    """The recorded turns, in order of completion."""

    def __init__(
        self,
        episode_id: str,
        task_id: str,
        *,
        max_turns: int | None,
        max_tokens: int | None,
        on_turn: Callable[[Turn], None] | None,
    ) -> None:
        """Start without turns; the arguments are those of `Client`."""
        self.id = episode_id
        self.calls = EpisodeCalls(episode_id, max_turns=max_turns, max_tokens=max_tokens)
        self.clock = itertools.count()
        """Numbers the events: each request that is sent, each turn reward that is set."""
        self.metrics: dict[str, float] = {}
        """What the workflow recorded."""
        self.final_reward: float | None = None
        """What the workflow set by `client.reward_final`."""
        self.reward_parts: dict[str, float] = {}
        self.turn_reward_parts: dict[str, float] = {}
        """What rewards that were given in parts add up to, by the name of the part."""
        self.answer: str | None = None
        """What the workflow named by `client.final_answer`."""
        self.reported_tokens: dict[str, float] = {}
        """Tokens by an endpoint's own count; empty where the turns hold the tokens."""
        self._task_id = task_id
        self._on_turn = on_turn
        self._turn_by_id: dict[str, int] = {}
        self._turn_by_object: dict[int, tuple[object, int]] = {}
        self._closed = False
        self._num_branches = 0

    def open_branch(self, inside: BranchPath) -> BranchPath:
        """Return a new declared branch inside another one."""
        self._num_branches += 1
        return (*inside, self._num_branches - 1)

    def check_open(self) -> None:
        """Raise `WorkflowError` if the episode is closed."""
        if self._closed:
            raise WorkflowError(f"episode {self.id} is closed; the workflow must not use its client after it has returned")

    @property
    def is_open(self) -> bool:
        """Whether the episode was not closed yet."""
        return not self._closed

    def start_call(self) -> RunningCall:
        """Count one more running call.

        Raises:
            WorkflowError: the episode is closed.
            EpisodeLimit: the turn or token budget is spent.
        """
        self.check_open()
        return self.calls.start_call()

    @contextmanager
    def refusals(self) -> Generator[None]:
        """Record an error of the block as a refused call, so that a workflow cannot hide it."""
        try:
            yield
        except AgentRLError as error:
            self.calls.fail(error)
            raise

    def reward(self, target: object, value: object, branch: BranchPath) -> None:
        """Set the reward of the turn that `target` (a completion, chunk, its id, or a generation) stands for.

        Raises:
            RewardError: as `reward_turn`.
            WorkflowError: `target` is no turn of this episode, or as `reward_turn`.
        """
        self.check_open()
        check_reward_parts(value, f"client.reward, episode {self.id}")
        self.reward_turn(self._find_turn(target), value, branch)

    def reward_turn(self, turn: int, value: object, branch: BranchPath) -> None:
        """Set the reward of the turn with this index; `branch` is that of the client that sets it.

        Raises:
            RewardError: `value` is not a finite number, or the turn has a reward already.
            WorkflowError: the turn is of a declared branch that `branch` is not in, or the episode is closed.
        """
        self.check_open()
        number, parts = check_reward_parts(value, f"client.reward, episode {self.id}")
        own = self.turns[turn].branch
        if branch[: len(own)] != own:
            raise WorkflowError(
                f"episode {self.id}: turn {turn} is of branch {list(own)}, and a client of branch {list(branch)} rewards "
                "it; client.branch() declares that its rewards depend on nothing outside: reward it with the client that "
                "client.branch() returned, or reward the episode (client.reward_final)"
            )
        present = self.turns[turn].reward
        if present is not None:
            raise RewardError(
                f"episode {self.id}: turn {turn} already has the reward {present}, got {number}; set it once, with the total"
            )
        self._set_reward(turn, number)
        _add_parts(self.reward_parts, parts)
        _add_parts(self.turn_reward_parts, parts)

    def reward_final(self, value: object) -> None:
        """Set the final reward of the episode.

        Raises:
            RewardError: `value` is not a finite number, or there is a final reward already.
            WorkflowError: the episode is closed.
        """
        self.check_open()
        number, parts = check_reward_parts(value, f"client.reward_final, episode {self.id}")
        if self.final_reward is not None:
            raise RewardError(
                f"episode {self.id}: the final reward is already {self.final_reward}, got {number}; set it once: by "
                "client.reward_final, or by what run returns"
            )
        self.final_reward = number
        _add_parts(self.reward_parts, parts)

    def name_answer(self, answer: object) -> None:
        """Keep the answer of the episode; a later one replaces an earlier one.

        Raises:
            WorkflowError: it is neither text nor a number nor None, or the episode is closed.
        """
        self.check_open()
        if answer is not None and not isinstance(answer, (str, int, float, np.floating, np.integer)):
            raise WorkflowError(
                f"client.final_answer, episode {self.id}: expected text or a number, or None for no answer, got "
                f"{type(answer).__name__} {repr(answer)[:40]}; write it as text"
            )
        self.answer = None if answer is None else str(answer)

    def record_metrics(self, metrics: Mapping[str, object]) -> None:
        """Keep numbers of the episode; a later value replaces an earlier one of the same name.

        Raises:
            WorkflowError: a value is not a finite number, or the episode is closed.
        """
        self.check_open()
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            huge = isinstance(value, int) and abs(value) > 1e308  # an int may be too large for a float
            if huge or not isinstance(value, (int, float, np.floating, np.integer)) or not math.isfinite(value):
                raise WorkflowError(f"client.record: {name} must be a finite number, got {type(value).__name__} {value!r}")
            numbers[name] = float(value)
        self.metrics.update(numbers)

    def close(self, stop_reason: StopReason, final_reward: object, failure: EpisodeFailure | None) -> Trajectory:
        """End the episode and return its trajectory; `final_reward` None leaves the one of `reward_final`, unless it failed.

        Raises:
            RewardError: `final_reward` is not a finite number, or there is another one; the episode stays open.
            WorkflowError: the episode is closed already.
        """
        self.check_open()
        if final_reward is not None:
            self.reward_final(final_reward)
        reward = None if failure is not None else self.final_reward
        self._closed = True
        return Trajectory(
            episode_id=self.id,
            task_id=self._task_id,
            turns=tuple(self.turns),
            stop_reason=stop_reason,
            final_reward=reward,
            failure=failure,
            metrics={**self.reported_tokens, **self.metrics},
            reward_parts=dict(self.reward_parts),
            turn_reward_parts=dict(self.turn_reward_parts),
            answer=self.answer,
        )

    @abstractmethod
    def _set_reward(self, turn: int, reward: float) -> None:
        """Replace a turn by the same one with a reward."""

    def _announce(self, turn: int, completion_id: str, num_tokens: int, given: object) -> None:
        """Count a turn that was recorded, let `reward` find it, and pass it on.

        Args:
            turn: its index.
            completion_id: the id of its completion.
            num_tokens: what it sampled.
            given: the object that the caller gets, where ids may be missing or the same for several calls.
        """
        self.calls.add_turn(num_tokens)
        self._turn_by_id[completion_id] = _AMBIGUOUS if completion_id in self._turn_by_id else turn
        if given is not None:
            self._turn_by_object[id(given)] = (given, turn)
        if self._on_turn is not None:
            self._on_turn(self.turns[turn])

    def _find_turn(self, target: object) -> int:
        entry = self._turn_by_object.get(id(target))
        if entry is not None:
            return entry[1]
        if isinstance(target, Generation):
            raise WorkflowError(f"episode {self.id}: this generation is not of this episode's client.generate")
        identity = target if isinstance(target, str) else getattr(target, "id", None)
        if not isinstance(identity, str):
            raise WorkflowError(
                f"client.reward takes a completion, its id, or a generation, got {type(target).__name__} {target!r:.80}"
            )
        turn = self._turn_by_id.get(identity)
        if turn == _AMBIGUOUS:
            raise WorkflowError(
                f"episode {self.id}: the endpoint gave several completions the id {identity!r}; "
                "reward the completion object, not its id or a chunk"
            )
        if turn is None:
            raise WorkflowError(
                f"episode {self.id}: {identity!r} is no completed model call of this episode; "
                "reward a completion with the client that made it, and a stream after its last chunk"
            )
        return turn


class Episode(EpisodeRecord):
    """An episode of the policy: every call is recorded with its token ids."""

    def __init__(
        self,
        *,
        backend: Backend,
        renderer: Renderer,
        sampling: SamplingConfig,
        episode_id: str,
        task_id: str,
        max_turns: int | None,
        max_episode_tokens: int | None,
        max_context_tokens: int | None,
        seed: int | None,
        on_turn: Callable[[Turn], None] | None,
        counts_misses: bool,
    ) -> None:
        """Start without turns; the arguments are those of `Client`."""
        super().__init__(episode_id, task_id, max_turns=max_turns, max_tokens=max_episode_tokens, on_turn=on_turn)
        self._seed = seed
        self._counts_misses = counts_misses
        self._num_requests = 0
        self.backend = backend
        self.renderer = renderer
        self.sampling = sampling
        limits = [limit for limit in (max_context_tokens, renderer.max_context) if limit is not None]
        self._max_context = min(limits, default=None)
        self.graph = TokenGraph(
            renderer, episode_id=episode_id, history=sampling.history, max_context=self._max_context, clock=self.clock
        )
        self.turns = self.graph.turns
        self._instructions = Instructions() if sampling.unsupported == "prompt" else None

    def prepare(
        self, messages: Sequence[Message], tools: ToolSchemas | None, demand: Demand | None, branch: BranchPath
    ) -> Prompt:
        """Return the prompt of a request, with the instructions that its demand and those of earlier calls add.

        Raises:
            EpisodeLimit: the messages cannot fit into the context.
            WorkflowError: they continue a turn of a branch that was declared independent of `branch`.
            TokenError: they cannot be rendered.
        """
        try:
            if self._instructions is not None:
                messages = self._instructions.applied(messages, demand)
            return self.graph.prepare(messages, tools, branch)
        except ContextOverflow as error:
            raise self.calls.exceeded(StopReason.CONTEXT_LIMIT, str(error)) from error

    def request(self, prompt: Prompt, sampling: SamplingParams) -> GenerateRequest:
        """Return the request for `prompt`, its output limit lowered to what the context and the token budget leave.

        Raises:
            EpisodeLimit: the context leaves no room for one token.
            WorkflowError: there is no context.
        """
        length = prompt.context.size
        if not length:
            raise WorkflowError(f"episode {self.id}: a model call needs at least one context token")
        room = self.calls.clip(sampling.max_new_tokens)
        if self._max_context is not None:
            room = min(room, self._max_context - length)
            if room < 1:
                full = f"a context of {length} tokens leaves no room for output: the limit is {self._max_context}"
                raise self.calls.exceeded(StopReason.CONTEXT_LIMIT, full)
        if room != sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        if sampling.seed is None and self._seed is not None:
            sampling = replace(sampling, seed=call_seed(self._seed, self.id, self._num_requests))
        self._num_requests += 1
        return GenerateRequest(request_id=uuid4().hex, episode_id=self.id, context=prompt.context, sampling=sampling)

    def compare(self, messages: Sequence[Message], demand: Demand | None, answer: Message) -> None:
        """Count whether a recorded answer misses what its call demanded, as the metric `MISSES_METRIC`."""
        if self._counts_misses and self._instructions is not None and demand is not None:
            self._instructions.remember(messages, demand, answer)
            missed = bool(demand.problem(answer))
            self.metrics[MISSES_METRIC] = self.metrics.get(MISSES_METRIC, 0.0) + missed

    def check_not_aborted(self, request: GenerateRequest, generation: Generation) -> None:
        """Raise `ServerUnavailable` for an aborted generation: the server cut it, so it is no answer of the policy."""
        if generation.stop_reason is StopReason.ABORT:
            raise ServerUnavailable(
                f"episode {self.id}, request {request.request_id}: the server aborted the call after "
                f"{len(generation.output_ids)} tokens; nothing was recorded, and calling again is safe"
            )

    def record(
        self, prompt: Prompt, request: GenerateRequest, generation: Generation, *, speaker: Speaker, given: object = None
    ) -> Turn:
        """Append the turn that `generation` makes of `prompt`, and return it.

        Args:
            prompt: what was sent.
            request: how it was sent.
            generation: what came back.
            speaker: who takes the turn.
            given: an object that stands for the turn in `reward`, beside the completion's id.

        Raises:
            WorkflowError: the episode was closed while the call ran.
            ReplyError: an empty, mismatched or impossible generation.
        """
        self.check_open()
        count, limit = len(generation.output_ids), request.sampling.max_new_tokens
        if not 0 < count <= limit:
            what = f"{count} tokens" if count else "an empty completion"
            where = f"episode {self.id}, request {request.request_id}: the server returned {what}"
            raise ReplyError(f"{where} ({generation.stop_reason}); asked for 1 to {limit}")
        turn = self.graph.append(
            prompt,
            output_ids=generation.output_ids,
            output_logprobs=generation.output_logprobs,
            spans=generation.spans,
            stop_reason=generation.stop_reason,
            matched_stop=generation.matched_stop,
            temperature=request.sampling.temperature,
            speaker=speaker,
        )
        self._announce(turn, completion_id(request), count, given)
        return self.turns[turn]

    def _set_reward(self, turn: int, reward: float) -> None:
        self.graph.set_reward(turn, reward)

    def check_ids(self, input_ids: Sequence[int] | Int32Array) -> Int32Array:
        """Return the ids of a token-level call, [N] int32.

        Raises:
            WorkflowError: they are no ids, or outside the vocabulary: one of them would kill a real server.
        """
        ids = np.asarray(input_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise WorkflowError(
                f"client.generate takes a list of token ids, got an array of {ids.dtype} with shape {ids.shape}"
            )
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.renderer.vocab_size:
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise WorkflowError(
                f"episode {self.id}: token id {bad} is outside the vocabulary of {self.renderer.vocab_size}; it was not sent"
            )
        return ids.astype(np.int32)

    def parent_of(self, ids: Int32Array, branch: BranchPath) -> tuple[int | None, int]:
        """Return the turn with the longest context and output that `ids` begins with, and where it ends; else None, 0.

        Raises:
            WorkflowError: the longest ones are of branches that were declared independent of `branch`.
        """
        ends: list[int] = []
        begins: list[bool] = []
        best, best_end = None, 0
        for index, turn in enumerate(self.turns):
            at = 0 if turn.parent is None else ends[turn.parent]
            middle = at + len(turn.context_ids)
            end = middle + len(turn.output_ids)
            same = (
                end <= len(ids)
                and (turn.parent is None or begins[turn.parent])
                and np.array_equal(ids[at:middle], turn.context_ids)
                and np.array_equal(ids[middle:end], turn.output_ids)
            )
            ends.append(end)
            begins.append(same)
            if same and (end > best_end or (end == best_end and self._is_foreign(best, branch))):
                best, best_end = index, end
        if best is not None and self._is_foreign(best, branch):
            raise continues_other_branch(best, self.turns[best].branch, branch)
        return best, best_end

    def _is_foreign(self, turn: int | None, branch: BranchPath) -> bool:
        return turn is not None and are_independent(self.turns[turn].branch, branch)


def call_seed(run_seed: int, episode_id: str, call: int) -> int:
    """Return the seed of a model call, 63 bits; `call` is its number in the episode.

    Example:
        >>> call_seed(0, "0.0.0", 0) == call_seed(0, "0.0.0", 0), call_seed(0, "0.0.0", 0) == call_seed(0, "0.0.0", 1)
        (True, False)
    """
    digest = hashlib.blake2b(f"{run_seed}/{episode_id}/{call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def completion_id(request: GenerateRequest) -> str:
    """Return the completion id of a request, unique over all episodes."""
    return f"chatcmpl-{request.request_id}"


def _add_parts(sums: dict[str, float], parts: Mapping[str, float]) -> None:
    for name, value in parts.items():
        sums[name] = sums.get(name, 0.0) + value
