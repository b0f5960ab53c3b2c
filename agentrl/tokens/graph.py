"""The token graph of one episode: which turn a request extends, the ids it adds, and the turns recorded so far.

Invariant: for every recorded turn, the context and output ids from the root to its own context are, joined, the ids that
were sent for it (`Turn.prompt_digest` proves it); sampled ids are kept as they came.

A request extends the deepest turn whose messages and output it begins with, compared by meaning, with the same tools.
Parallel calls and retries thus become siblings, other conversations new roots. A request that takes up earlier model
outputs in another form is a *fork*, with a reason code: its history is rendered again as context that is never trained.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import orjson

from agentrl.errors import ReplyError, TokenError, WorkflowError
from agentrl.tokens.match import Match, TurnIndex
from agentrl.tokens.messages import tools_key
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
    check_reward,
    check_turn,
)

Tools = Sequence[Mapping[str, Any]] | None

_THINKING = re.compile(r"<think>(?:.*?</think>\s*|\s*\Z)", re.DOTALL)


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def copy(self) -> _Digest: ...
    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What one model call sends, and where its turn will stand in the graph."""

    parent: int | None
    """The turn it extends; None for a root."""
    context_ids: Int32Array
    """[C] int32: the ids it adds to its parent's."""
    input_ids: Int32Array
    """[N] int32: the whole context."""
    input_json: bytes
    """The same ids, decimal and comma-joined."""
    fork: ForkReason | None
    """Why it is a fork; None if it is not."""
    tools: bool
    """Whether the request has tools, so that the output may hold tool calls."""
    thinking_open: bool
    """Whether the context ends inside `<think>`."""
    kept_thinking: bool
    """Whether the template would drop earlier reasoning that this context keeps (`history="keep"`)."""
    keys: tuple[bytes, ...] | None
    """Keys of the request's messages; None for a call made of ids."""
    tools_key: bytes
    digest: _Digest = field(repr=False, compare=False)
    """Running digest of `input_json`."""


class _Placed(NamedTuple):
    """A context with its place."""

    parent: int | None
    ids: list[int]
    thinking_open: bool
    fork: ForkReason | None
    kept_thinking: bool = False


class _Leaf(NamedTuple):
    """The end of the last recorded turn, ready to be extended."""

    turn: int
    prompt_json: bytes
    output_json: bytes
    digest: _Digest
    """After the output."""


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
            history: what to do where the template rewrites earlier turns: keep the sampled ids as context (counted in
                `num_kept_thinking`), or fork as the template says.
        """
        self._renderer = renderer
        self._episode_id = episode_id
        self._task_id = task_id
        self._history = history
        self._turns: list[Turn] = []
        self._tools_of: list[bytes] = []
        self._lengths: list[int] = []
        self._thought: list[bool] = []
        self._index = TurnIndex()
        self._forks: Counter[ForkReason] = Counter()
        self._leaf: _Leaf | None = None
        self.num_kept_thinking: int = 0
        """Recorded turns whose context keeps reasoning that the template would have dropped."""

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
        match = self._index.find(messages, key, self._turns, self._tools_of)
        placed = self._place(match, messages, tools)
        return self._prompt(placed, tools=bool(tools), keys=tuple(match.keys), key=key)

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
        placed = _Placed(parent, ids.tolist(), False, None)
        return self._prompt(placed, tools=False, keys=None, key=b"")

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
            InvariantError: if the arrays contradict each other (see `agentrl.types.check_turn`).
            ReplyError: if an id is outside the vocabulary.
        """
        index = len(self._turns)
        where = f"episode {self._episode_id}, turn {index}"
        ids = np.array(output_ids, np.int32)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._renderer.vocab_size:
            raise ReplyError(f"{where}: the server returned an id outside the vocabulary of {self._renderer.vocab_size}")
        parsed = self._renderer.parse(
            ids,
            tools=prompt.tools,
            stopped_on=matched_stop,
            thinking_open=prompt.thinking_open,
            salt=f"{self._episode_id}/{index}".encode(),
        )
        turn = Turn(
            context_ids=prompt.context_ids,
            output_ids=ids,
            output_logprobs=np.array(output_logprobs, np.float32),
            spans=spans,
            stop_reason=stop_reason,
            parent=prompt.parent,
            message=parsed.to_message(),
            temperature=temperature,
            fork=prompt.fork,
            prompt_digest=prompt.digest.digest(),
        )
        check_turn(turn, None if prompt.parent is None else self._turns[prompt.parent], where)
        self._turns.append(turn)
        self._tools_of.append(prompt.tools_key)
        self._lengths.append(0 if prompt.keys is None else len(prompt.keys) + 1)
        above = prompt.parent is not None and self._thought[prompt.parent]
        self._thought.append(above or parsed.reasoning is not None)
        if prompt.keys is not None:
            self._index.add(prompt.keys, turn.message, index)
        if prompt.fork is not None:
            self._forks[prompt.fork] += 1
        self.num_kept_thinking += prompt.kept_thinking
        self._leaf = _leaf(index, prompt, ids)
        return index

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

    # ---- where a request belongs

    def _place(self, match: Match, messages: Sequence[Message], tools: Tools) -> _Placed:
        fork: ForkReason | None = None
        if match.length_any_tools > match.length:
            fork = ForkReason.TOOLS_CHANGED
        elif match.edited:
            fork = ForkReason.HISTORY_EDITED
        if match.turn is None:
            return self._root(match, messages, tools, fork)
        return self._extension(match, match.turn, messages, tools, fork)

    def _extension(
        self, match: Match, turn: int, messages: Sequence[Message], tools: Tools, fork: ForkReason | None
    ) -> _Placed:
        renderer = self._renderer
        reasoning = self._reasoning(match, messages, start=match.length)
        new = renderer.plain(messages[match.length :], reasoning)
        shape = renderer.shape(new, bool(tools))
        if not shape.complete:
            return self._root(match, messages, tools, fork or ForkReason.TEMPLATE_CHANGED)
        kept = False
        if shape.rewrites and self._history == "as_template":
            stripped = self._rewritten(match, turn, messages, tools)
            if stripped is not None:
                return self._as_template(match, turn, messages, tools, fork or stripped)
        elif shape.rewrites_thinking:
            kept = self._thought[turn]
        history = [] if shape.local else renderer.plain(messages[: match.length], self._reasoning(match, messages))
        output = self._turns[turn].output_ids
        last = int(output[-1]) if len(output) else None
        context = renderer.extend(history, new, tools, last_output_id=last)
        return _Placed(turn, context.ids, context.thinking_open, fork, kept)

    def _root(self, match: Match, messages: Sequence[Message], tools: Tools, fork: ForkReason | None) -> _Placed:
        plain = self._renderer.plain(messages, self._reasoning(match, messages))
        context = self._renderer.start(plain, tools)
        return _Placed(None, context.ids, context.thinking_open, fork)

    def _reasoning(self, match: Match, messages: Sequence[Message], start: int = 0) -> dict[int, str]:
        """Return the recorded reasoning of model outputs among `messages[start:]`, by position from `start`."""
        found: dict[int, str] = {}
        for at, key in enumerate(match.keys[start:]):
            turn = self._index.output_turn(key)
            text = None if turn is None else self._turns[turn].message.get("reasoning_content")
            if text:
                found[at] = text
        for turn in self._ancestors(match.turn):
            at = self._lengths[turn] - 1 - start
            text = self._turns[turn].message.get("reasoning_content")
            if at >= 0 and text:
                found[at] = text
            else:
                found.pop(at, None)
        return found

    def _ancestors(self, turn: int | None) -> list[int]:
        found: list[int] = []
        while turn is not None:
            found.append(turn)
            turn = self._turns[turn].parent
        return found

    # ---- history="as_template"

    def _rewritten(self, match: Match, turn: int, messages: Sequence[Message], tools: Tools) -> ForkReason | None:
        """Return why the template no longer writes what `turn` and its context hold; None if it does."""
        plain = self._renderer.plain(messages, self._reasoning(match, messages))
        whole = self._renderer.render_text(plain, tools, generation_prompt=True)
        length = self._lengths[turn]
        asked = self._renderer.render_text(plain[: length - 1], tools, generation_prompt=True)
        answered = self._renderer.render_text(plain[:length], tools, generation_prompt=False)
        if (whole.startswith(asked) and whole.startswith(answered)) or whole.startswith(self._recorded_text(turn)):
            return None
        bare = _THINKING.sub("", whole)
        if bare.startswith(_THINKING.sub("", asked)) and bare.startswith(_THINKING.sub("", answered)):
            return ForkReason.THINKING_STRIPPED
        return ForkReason.TEMPLATE_CHANGED

    def _as_template(self, match: Match, turn: int, messages: Sequence[Message], tools: Tools, fork: ForkReason) -> _Placed:
        """Fork from the deepest ancestor whose text the template still writes."""
        parent = self._turns[turn].parent
        while parent is not None and (
            self._lengths[parent] == 0 or self._rewritten(match, parent, messages, tools) is not None
        ):
            parent = self._turns[parent].parent
        if parent is None:
            return self._root(match, messages, tools, fork)
        length = self._lengths[parent]
        new = self._renderer.plain(messages[length:], self._reasoning(match, messages, start=length))
        if not self._renderer.shape(new, bool(tools)).complete:
            return self._root(match, messages, tools, fork)
        history = self._renderer.plain(messages[:length], self._reasoning(match, messages))
        output = self._turns[parent].output_ids
        last = int(output[-1]) if len(output) else None
        context = self._renderer.extend(history, new, tools, last_output_id=last)
        return _Placed(parent, context.ids, context.thinking_open, fork)

    def _recorded_text(self, turn: int) -> str:
        return self._renderer.decode(self._path_ids(turn), skip_special=False)

    # ---- ids

    def _path_ids(self, turn: int | None, context: Int32Array | None = None) -> Int32Array:
        pieces: list[Int32Array] = [] if context is None else [context]
        while turn is not None:
            record = self._turns[turn]
            pieces += (record.output_ids, record.context_ids)
            turn = record.parent
        return np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.int32)

    def _prompt(self, placed: _Placed, *, tools: bool, keys: tuple[bytes, ...] | None, key: bytes) -> Prompt:
        context = np.array(placed.ids, np.int32)
        added = orjson.dumps(placed.ids)[1:-1]
        leaf = self._leaf
        if placed.parent is None:
            pieces, digest = [added], hashlib.blake2b(added, digest_size=16)
        else:
            if leaf is not None and leaf.turn == placed.parent:
                pieces, digest = [leaf.prompt_json, leaf.output_json, added], leaf.digest.copy()
            else:
                known = _ids_json(self._path_ids(placed.parent))
                pieces, digest = [known, added], hashlib.blake2b(known, digest_size=16)
            if added:
                digest.update(b"," + added)
        return Prompt(
            parent=placed.parent,
            context_ids=context,
            input_ids=self._path_ids(placed.parent, context),
            input_json=b",".join(filter(None, pieces)),
            fork=placed.fork,
            tools=tools,
            thinking_open=placed.thinking_open,
            kept_thinking=placed.kept_thinking,
            keys=keys,
            tools_key=key,
            digest=digest,
        )


def _ids_json(ids: Int32Array) -> bytes:
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def _leaf(turn: int, prompt: Prompt, output_ids: Int32Array) -> _Leaf:
    output = _ids_json(output_ids)
    digest = prompt.digest.copy()
    if output:
        digest.update(b"," + output if prompt.input_json else output)
    return _Leaf(turn, prompt.input_json, output, digest)
