"""One episode as the client keeps it: the token graph, the backend, the budgets.

Invariant: a model call either becomes exactly one turn of the graph or leaves the episode as it was (refused, failed,
timed out, cancelled); a budget is checked before the call it forbids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from uuid import uuid4

import numpy as np

from agentrl.client.arguments import ArgumentReader
from agentrl.client.budget import Ledger
from agentrl.client.config import SamplingConfig
from agentrl.errors import ReplyError, ServerUnavailable, WorkflowError
from agentrl.inference.backend import Backend, GenerateRequest, Generation, SamplingParams
from agentrl.tokens.graph import Prompt, TokenGraph
from agentrl.tokens.renderer import Renderer
from agentrl.types import EpisodeFailure, Int32Array, StopReason, Trajectory, Turn


class Episode:
    """What all clients of one episode share. Single-threaded: no method awaits."""

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
        on_turn: Callable[[Turn], None] | None,
    ) -> None:
        self.backend = backend
        self.renderer = renderer
        self.sampling = sampling
        self.id = episode_id
        self.graph = TokenGraph(renderer, episode_id=episode_id, task_id=task_id, history=sampling.history)
        self.arguments = ArgumentReader(sampling, vocab_size=renderer.vocab_size)
        self.ledger = Ledger(episode_id, max_turns)
        self._max_tokens = max_episode_tokens
        limits = [limit for limit in (max_context_tokens, renderer.max_context) if limit is not None]
        self._max_context = min(limits, default=None)
        self._on_turn = on_turn
        self._output_tokens = 0

    def call(self) -> Ledger:
        """Check the budgets, and return a context that holds one call's place in the turn budget.

        Raises:
            WorkflowError: the episode is closed.
            EpisodeLimit: the turn or token budget is spent.
        """
        if self._max_tokens is not None and self._output_tokens >= self._max_tokens:
            self.ledger.check_open()
            spent = f"{self._output_tokens} of {self._max_tokens} sampled tokens are spent"
            raise self.ledger.spent(StopReason.TOKEN_LIMIT, spent)
        return self.ledger.call()

    def request(self, prompt: Prompt, sampling: SamplingParams) -> GenerateRequest:
        """Return the request for `prompt`, its output limit clipped to what context and token budget leave.

        Raises:
            EpisodeLimit: the context leaves no room for one token.
            WorkflowError: there is no context.
        """
        length = prompt.context.size
        if not length:
            raise WorkflowError(f"episode {self.id}: a model call needs at least one context token")
        room = sampling.max_new_tokens
        if self._max_context is not None:
            left = self._max_context - length
            if left < 1:
                taken = f"a context of {length} tokens leaves no room for output: the limit is {self._max_context}"
                raise self.ledger.spent(StopReason.TOKEN_LIMIT, taken)
            room = left if left < room else room
        if self._max_tokens is not None:
            room = min(room, self._max_tokens - self._output_tokens)
        if room != sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        return GenerateRequest(request_id=uuid4().hex, episode_id=self.id, context=prompt.context, sampling=sampling)

    def check_whole(self, request: GenerateRequest, generation: Generation) -> None:
        """Raise `ServerUnavailable` for an aborted completion: the server cut it, so it is no answer of the policy."""
        if generation.stop_reason is StopReason.ABORT:
            raise ServerUnavailable(
                f"episode {self.id}, request {request.request_id}: the server aborted the call after "
                f"{len(generation.output_ids)} tokens; nothing was recorded, and calling again is safe"
            )

    def record(self, prompt: Prompt, request: GenerateRequest, generation: Generation, given: object = None) -> int:
        """Append the turn that `generation` makes of `prompt`; return its index.

        Args:
            prompt: what was sent.
            request: how it was sent.
            generation: what came back.
            given: an object that stands for the turn in `reward`, beside the completion's id.

        Raises:
            WorkflowError: the episode was closed while the call ran.
            ReplyError: an empty, mismatched or impossible completion.
        """
        self.ledger.check_open()
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
        )
        self._output_tokens += count
        self.ledger.add_turn(completion_id(request), turn, given)
        if self._on_turn is not None:
            self._on_turn(self.graph.turns[turn])
        return turn

    def reward(self, target: object, value: object) -> None:
        """Set a turn's reward; see `Client.reward`."""
        turn = self.ledger.reward(target, value)
        self.graph.set_reward(turn, self.ledger.rewards[turn])

    def context(self, input_ids: Sequence[int] | Int32Array) -> Int32Array:
        """Return the ids of a token-level call.

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

    def parent_of(self, ids: Int32Array) -> tuple[int | None, int]:
        """Return the turn with the longest context and output that `ids` begins with, and where it ends; else None, 0."""
        ends: list[int] = []
        begins: list[bool] = []
        best, best_end = None, 0
        for index, turn in enumerate(self.graph.turns):
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
            if same and end > best_end:
                best, best_end = index, end
        return best, best_end

    def close(self, stop_reason: StopReason, final_reward: float | None, failure: EpisodeFailure | None) -> Trajectory:
        """End the episode and return its trajectory; see `Client.close`."""
        reward = self.ledger.close(final_reward)
        return self.graph.trajectory(
            stop_reason=stop_reason, final_reward=reward, failure=failure, metrics=dict(self.ledger.metrics)
        )


def completion_id(request: GenerateRequest) -> str:
    """Return the completion id of a request, unique over all episodes."""
    return f"chatcmpl-{request.request_id}"
