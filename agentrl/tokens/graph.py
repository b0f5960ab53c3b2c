"""The token graph of one episode: which turn a request extends, the ids it adds, and the turns recorded so far.

Invariant: for every recorded turn, the context and output ids from the root to its own context are, joined, the ids that
were sent for it (`Turn.prompt_digest` proves it); sampled ids are kept as they came.

A request extends the deepest turn whose messages and output it begins with, compared by meaning, with the same tools.
Parallel calls and retries thus become siblings, other conversations new roots. A request that takes up earlier model
outputs in another form is a *fork*, with a reason code: its history is rendered again as context that is never trained.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import numpy as np

from agentrl.checks import check_reward, check_spans, sound_logprobs
from agentrl.context import INT32
from agentrl.errors import ReplyError, TokenError, WorkflowError
from agentrl.packed import opened
from agentrl.tokens.match import TurnIndex
from agentrl.tokens.messages import tools_key
from agentrl.tokens.placing import Placer, Tools, TurnTree
from agentrl.tokens.prompt import Placed, Prompt, PromptBuilder
from agentrl.tokens.renderer import Renderer
from agentrl.types import (
    EpisodeFailure,
    Float32Array,
    ForkReason,
    Int32Array,
    Message,
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
)

__all__ = ["Prompt", "TokenGraph"]

_OpenTurn = opened(Turn)
_FLOAT32, _UINT32 = np.dtype(np.float32), np.dtype(np.uint32)


class TokenGraph:
    """Turns of one episode, as a tree; used by one task at a time, calls in flight may overlap.

    Example:
        prompt = graph.prepare([{"role": "user", "content": "2 + 2 = ?"}])
        turn = graph.append(prompt, output_ids=ids, output_logprobs=logprobs, spans=spans,
                            stop_reason=StopReason.STOP, matched_stop=None, temperature=1.0)
        assert graph.turns[turn].message["content"] == "4"
    """

    def __init__(
        self, renderer: Renderer, *, episode_id: str, task_id: str, history: Literal["keep", "as_template"] = "keep"
    ) -> None:
        """Start with no turns.

        Args:
            renderer: the model's renderer, shared by all episodes.
            episode_id: names the episode in messages.
            task_id: the task of the episode.
            history: what to do where the template rewrites earlier turns: keep the sampled ids as context (marked by
                `Turn.kept_thinking`), or fork as the template says.
        """
        self._renderer = renderer
        self._episode_id = episode_id
        self._task_id = task_id
        self._tree = TurnTree([], TurnIndex(), [], [], array("i"), [])
        self._turns = self._tree.turns
        self._prompts = PromptBuilder(self._turns, renderer.vocab_size)
        self._placer = Placer(renderer, self._tree, self._prompts, history=history)
        self._forks: Counter[ForkReason] = Counter()

    def __str__(self) -> str:
        """Return where the next turn will stand, for messages about it."""
        return f"episode {self._episode_id}, turn {len(self._turns)}"

    @property
    def turns(self) -> Sequence[Turn]:
        """The recorded turns, in order of completion; do not change it."""
        return self._turns

    @property
    def forks(self) -> Mapping[ForkReason, int]:
        """Recorded forks by reason."""
        return self._forks

    def prepare(self, messages: Sequence[Message], tools: Tools = None) -> Prompt:
        """Return the prompt of a request; nothing is recorded until `append`.

        Args:
            messages: the request's messages, mappings or openai objects.
            tools: its tool schemas.

        Raises:
            TokenError: if the messages cannot be rendered exactly, or the model's tool calls could not be read.
        """
        if not messages:
            raise TokenError(f"episode {self._episode_id}: a request needs at least one message")
        if tools:
            self._renderer.check_tools()
        key = tools_key(tools)
        match = self._tree.index.find(messages, key, self._turns, self._tree.tools)
        placed = self._placer.place(match, messages, tools)
        return self._prompts.build(placed, tools=bool(tools), match=match, tools_key=key)

    def prepare_ids(self, context_ids: Sequence[int] | Int32Array, parent: int | None = None) -> Prompt:
        """Return the prompt of a token-level call: `context_ids` after the turn `parent`, exactly.

        Raises:
            TokenError: if an id is outside the vocabulary, or there is no such turn.
        """
        ids = np.asarray(context_ids, np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._renderer.vocab_size:
            raise TokenError(
                f"episode {self._episode_id}: context ids must be in 0..{self._renderer.vocab_size - 1}, "
                f"got {int(ids.min())}..{int(ids.max())}"
            )
        if parent is not None and not 0 <= parent < len(self._turns):
            raise TokenError(f"episode {self._episode_id}: no turn {parent} to extend; there are {len(self._turns)}")
        placed = Placed(parent, ids.tolist(), False, None)
        return self._prompts.build(placed, tools=False, match=None, tools_key=b"")

    def append(
        self,
        prompt: Prompt,
        *,
        output_ids: Sequence[int] | Int32Array,
        output_logprobs: Sequence[float] | Float32Array,
        spans: tuple[VersionSpan, ...],
        stop_reason: StopReason,
        matched_stop: int | str | None,
        temperature: float,
    ) -> int:
        """Record a finished model call; return the index of its turn.

        Args:
            prompt: what `prepare` returned for the call.
            output_ids: [T] the ids the server sampled, the stop token included.
            output_logprobs: [T] nats.
            spans: policy versions of the output.
            stop_reason: STOP, LENGTH or ABORT.
            matched_stop: the token id or stop string that ended it.
            temperature: of the call.

        Raises:
            InvariantError: if the version spans are wrong (see `agentrl.checks.check_spans`).
            ReplyError: if log-probs are missing, not finite or above 0, or an id is outside the vocabulary.
        """
        placed, parent = prompt.placed, prompt.placed.parent
        ids, logprobs = np.asarray(output_ids, INT32), np.asarray(output_logprobs, _FLOAT32)
        self._check(ids, logprobs)
        numbers: list[int] = ids.tolist()
        check_spans(spans, len(numbers), None if parent is None else self._turns[parent], self)
        parsed = self._renderer.parse(
            numbers, tools=prompt.tools, stopped_on=matched_stop, thinking_open=placed.thinking_open, salt=self
        )
        turn = _OpenTurn()
        output = ids.tobytes()
        turn.context_ids, turn.output_ids, turn.output_logprobs = prompt.added, output, logprobs.tobytes()
        turn.spans = spans if len(spans) != 1 else _one_span(spans[0].start, spans[0].end, spans[0].version)
        turn.stop_reason, turn.temperature, turn.reward = stop_reason, temperature, None
        turn.parent, turn.fork, turn.kept_thinking = parent, placed.fork, placed.kept_thinking
        turn.message = parsed.to_message()
        turn.prompt_digest = self._prompts.recorded(len(self._turns), prompt, output)
        turn.__class__ = Turn
        return self._add(turn, prompt, numbers, thought=parsed.reasoning is not None)

    def set_reward(self, turn: int, value: float) -> None:
        """Set the reward of a turn, replacing an earlier one.

        Raises:
            RewardError: if `value` is not a finite number.
            WorkflowError: if there is no such turn.
        """
        if not 0 <= turn < len(self._turns):
            raise WorkflowError(f"episode {self._episode_id}: no turn {turn} to reward; there are {len(self._turns)}")
        reward = check_reward(value, f"episode {self._episode_id}, turn {turn}")
        self._turns[turn] = replace(self._turns[turn], reward=reward)

    def trajectory(
        self,
        *,
        stop_reason: StopReason,
        final_reward: float | None = None,
        failure: EpisodeFailure | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Trajectory:
        """Return the record of the episode."""
        return Trajectory(
            episode_id=self._episode_id,
            task_id=self._task_id,
            turns=tuple(self._turns),
            stop_reason=stop_reason,
            final_reward=final_reward,
            failure=failure,
            metrics=metrics or {},
        )

    def _check(self, output_ids: Int32Array, logprobs: Float32Array) -> None:
        if len(logprobs) != len(output_ids):
            raise ReplyError(f"{self}: the server returned {len(output_ids)} ids but {len(logprobs)} log-probs")
        unsigned = output_ids.view(_UINT32)  # a negative one is a huge one
        if len(unsigned) and unsigned.item(unsigned.argmax()) >= self._renderer.vocab_size:
            raise ReplyError(f"{self}: the server returned an id outside the vocabulary of {self._renderer.vocab_size}")
        if len(unsigned) and not sound_logprobs(logprobs):
            head = logprobs.tolist()[:8]
            raise ReplyError(f"{self}: the server returned log-probs that are not finite, or above 0: {head}...")

    def _add(self, turn: Turn, prompt: Prompt, output: list[int], *, thought: bool) -> int:
        tree, match, fork, parent = self._tree, prompt.match, prompt.placed.fork, prompt.placed.parent
        tree.index.add(match, 0 if parent is None else tree.lengths[parent], turn.message, parent)
        tree.turns.append(turn)
        tree.tools.append(prompt.tools_key)
        tree.lengths.append(0 if match is None else match.size + 1)
        tree.last_ids.append(output[-1] if output else -1)
        tree.thought.append(thought or (parent is not None and tree.thought[parent]))
        if fork is not None:
            self._forks[fork] += 1
        return len(tree.turns) - 1


@lru_cache(maxsize=1024)
def _one_span(start: int, end: int, version: int) -> tuple[VersionSpan, ...]:
    """Return one object for equal spans: most turns were sampled by one version, and have one of few lengths."""
    return (VersionSpan(start=start, end=end, version=version),)
