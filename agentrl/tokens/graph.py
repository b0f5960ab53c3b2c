"""The token graph of one episode: which turn a request extends, the ids it adds, and the turns recorded so far.

Invariant: for every recorded turn, the context and output ids from the root to its own context are, joined, the ids that
were sent for it (`Turn.prompt_digest` proves it); sampled ids are kept as they came.

A request extends the deepest turn whose messages and output it begins with, compared by meaning, with the same tools.
Parallel calls and retries thus become siblings, other conversations new roots. A request that takes up earlier model
outputs in another form is a *fork*, with a reason code: its history is rendered again as context that is never trained.

Placing: from where a request meets the known conversations to its parent turn, its context ids and its fork reason.

Invariant: what a request adds is rendered from its new messages where the template allows it; where it does not, or where a
fork asks for it, from the whole conversation. Model outputs rendered again are context, never trained.

Prompts: what one model call sends, built from what the turns above already hold.

Invariant: a prompt's context holds the context and output ids from the root to the call's own context; `recorded` returns
the digest of its JSON. Building costs what is new, the output before it, and a list of pieces; for a call that does not
extend the last recorded turn, one pass over all its ids.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import msgspec
import numpy as np

from agentrl.errors import ReplyError, TokenError, WorkflowError
from agentrl.inference.backend import INT32, Context, json_of
from agentrl.tokens.history import Match, TurnIndex
from agentrl.tokens.messages import role_of, tools_key
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
from agentrl.validation import check_reward, check_spans, sound_logprobs


class Placed(msgspec.Struct, frozen=True):
    """The ids a model call adds, with their place."""

    parent: int | None
    """The turn it extends; None for a root."""
    ids: list[int]
    """What it adds to its parent's."""
    thinking_open: bool
    """Whether the context ends inside `<think>`."""
    fork: ForkReason | None
    """Why it is a fork; None if it is not."""
    kept_thinking: bool = False
    """Whether the template would drop earlier reasoning that this context keeps (`history="keep"`)."""


class Prompt(msgspec.Struct, frozen=True):
    """What one model call sends, and where its turn will stand in the graph."""

    placed: Placed
    added: bytes
    """The ids it adds to its parent's, int32."""
    context: Context
    """All ids."""
    tools: bool
    """Whether the request has tools, so that the output may hold tool calls."""
    match: Match | None
    """Where the request's messages met the known conversations; None for a call made of ids."""
    tools_key: bytes


class PromptBuilder:
    """Builds prompts over the turns of one episode; remembers the end of the last one, which most calls extend."""

    def __init__(self, turns: Sequence[Turn], bound: int) -> None:
        """Build over `turns`, which grows as turns are recorded and whose ids are below `bound`."""
        self._turns = turns
        self._bound = bound
        self._turn: int | None = None
        """The last recorded turn."""
        self._ids: list[bytes] = []
        """Ids from the root to its end, int32, in pieces; the last one is its output."""
        self._size = 0
        """How many there are."""
        self._json: tuple[bytes, ...] = ()
        """Those before its output, as in `Context`."""
        self._digest = hashlib.blake2b(digest_size=16)
        """Of that."""

    def path_ids(self, turn: int | None) -> Int32Array:
        """Return the ids from the root to the end of `turn`, [N] int32."""
        return np.frombuffer(b"".join(self._path(turn)), np.int32)

    def build(self, placed: Placed, *, tools: bool, match: Match | None, tools_key: bytes) -> Prompt:
        """Return the prompt of a call that stands at `placed`."""
        added = array("i", placed.ids).tobytes()
        if placed.parent == self._turn:
            ids, json, size = self._ids, self._json, self._size + len(placed.ids)
            packed, fresh = (*ids, added), ids[-1] + added if ids else added
        else:
            fresh = b"".join([*self._path(placed.parent), added])
            packed, json, size = (fresh,), (), len(fresh) // INT32.itemsize
        written = json_of(fresh)
        if written:
            json = (*json, b"," + written if json else written)
        return Prompt(placed, added, Context(packed, json, size, self._bound), tools, match, tools_key)

    def recorded(self, turn: int, prompt: Prompt, output: bytes) -> bytes:
        """Remember the end of a turn that is being recorded; return the digest of its context's JSON."""
        parent, written = prompt.placed.parent, prompt.context.json
        if self._turn == parent:  # and it was when the prompt was built, for turns come one after the other
            ids, digest, new = self._ids, self._digest, written[len(self._json) :]
        else:
            ids, digest, new = self._path(parent), hashlib.blake2b(digest_size=16), written
        digest.update(b"".join(new))
        ids += (prompt.added, output)
        self._turn, self._ids, self._json, self._digest = turn, ids, written, digest
        self._size = prompt.context.size + len(output) // INT32.itemsize
        return digest.digest()

    def _path(self, turn: int | None) -> list[bytes]:
        pieces: list[bytes] = []
        while turn is not None:
            record = self._turns[turn]
            pieces += (record.output_ids.tobytes(), record.context_ids.tobytes())
            turn = record.parent
        return pieces[::-1]


Tools = Sequence[Mapping[str, Any]] | None

_THINKING = re.compile(r"<think>(?:.*?</think>\s*|\s*\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TurnTree:
    """The recorded turns with what placing needs to know of each; the graph appends to all lists together."""

    turns: list[Turn]
    index: TurnIndex
    tools: list[bytes]
    """Key of the tools of the turn's request."""
    lengths: list[int]
    """Messages of the turn's conversation, its output included; 0 for a call made of ids."""
    last_ids: array[int]
    """The last sampled id of the turn; -1 where it sampled none."""
    thought: list[bool]
    """Whether the ids up to the turn's end hold reasoning."""


class Placer:
    """Places the requests of one episode."""

    def __init__(
        self, renderer: Renderer, tree: TurnTree, prompts: PromptBuilder, *, history: Literal["keep", "as_template"]
    ) -> None:
        """Place over `tree`.

        Args:
            renderer: the model's renderer.
            tree: the recorded turns; grows as turns are recorded.
            prompts: knows the ids from the root to the end of a turn.
            history: see `TokenGraph`.
        """
        self._renderer = renderer
        self._tree = tree
        self._history = history
        self._prompts = prompts

    def place(self, match: Match, messages: Sequence[Message], tools: Tools) -> Placed:
        """Return the context of a request and the turn it follows.

        Args:
            match: where its messages meet the known conversations.
            messages: its messages.
            tools: its tools.

        Raises:
            TokenError: if the template refuses the messages.
        """
        fork: ForkReason | None = None
        if match.length_any_tools > match.length:
            fork = ForkReason.TOOLS_CHANGED
        elif match.edited:
            fork = ForkReason.HISTORY_EDITED
        turn = match.turn
        if turn is None:
            return self._root(match, messages, tools, fork)
        renderer, tree, new = self._renderer, self._tree, match.new
        if new is None:
            new = renderer.plain(messages[match.length :], self._reasoning(match, messages, start=match.length))
        kept, last_id = tree.turns[turn].kept_thinking, tree.last_ids[turn]
        if self._history == "keep" and not tree.thought[turn]:
            filled = renderer.fill(new, bool(tools), last_output_id=last_id)
            if filled is not None:
                return Placed(turn, *filled, fork, kept)
        shape = renderer.shape(new, bool(tools))
        if not shape.complete:
            return self._root(match, messages, tools, fork or ForkReason.TEMPLATE_CHANGED)
        if shape.rewrites and self._history == "as_template":
            stripped = self._rewritten(match, turn, messages, tools)
            if stripped is not None:
                return self._as_template(match, turn, messages, tools, fork or stripped)
        elif shape.rewrites_thinking:
            kept = kept or tree.thought[turn]
        history = [] if shape.local else renderer.plain(messages[: match.length], self._reasoning(match, messages))
        context = renderer.extend(history, new, tools, last_output_id=last_id)
        return Placed(turn, context.ids, context.thinking_open, fork, kept)

    def _root(self, match: Match, messages: Sequence[Message], tools: Tools, fork: ForkReason | None) -> Placed:
        plain = self._renderer.plain(messages, self._reasoning(match, messages))
        context = self._renderer.start(plain, tools)
        return Placed(None, context.ids, context.thinking_open, fork)

    def _reasoning(self, match: Match, messages: Sequence[Message], start: int = 0) -> dict[int, str]:
        """Return the recorded reasoning of model outputs among `messages[start:]`, by position from `start`."""
        found: dict[int, str] = {}
        if not any(self._tree.thought):
            return found
        for at in range(start, len(messages)):
            turn = self._tree.index.output_turn(match.keys(), at) if role_of(messages[at]) == "assistant" else None
            text = None if turn is None else self._tree.turns[turn].message.get("reasoning_content")
            if text:
                found[at - start] = text
        if start >= match.length:
            return found
        for turn in self._ancestors(match.turn):
            at = self._tree.lengths[turn] - 1 - start
            text = self._tree.turns[turn].message.get("reasoning_content")
            if at >= 0 and text:
                found[at] = text
            else:
                found.pop(at, None)
        return found

    def _ancestors(self, turn: int | None) -> list[int]:
        found: list[int] = []
        while turn is not None:
            found.append(turn)
            turn = self._tree.turns[turn].parent
        return found

    def _rewritten(self, match: Match, turn: int, messages: Sequence[Message], tools: Tools) -> ForkReason | None:
        """Return why the template no longer writes what `turn` and its context hold; None if it does."""
        plain = self._renderer.plain(messages, self._reasoning(match, messages))
        whole = self._renderer.render_text(plain, tools, generation_prompt=True)
        length = self._tree.lengths[turn]
        asked = self._renderer.render_text(plain[: length - 1], tools, generation_prompt=True)
        answered = self._renderer.render_text(plain[:length], tools, generation_prompt=False)
        held = self._renderer.decode(self._prompts.path_ids(turn), skip_special=False)
        if (whole.startswith(asked) and whole.startswith(answered)) or whole.startswith(held):
            return None
        bare = _THINKING.sub("", whole)
        if bare.startswith(_THINKING.sub("", asked)) and bare.startswith(_THINKING.sub("", answered)):
            return ForkReason.THINKING_STRIPPED
        return ForkReason.TEMPLATE_CHANGED

    def _as_template(self, match: Match, turn: int, messages: Sequence[Message], tools: Tools, fork: ForkReason) -> Placed:
        """Fork from the deepest ancestor whose text the template still writes."""
        parent = self._tree.turns[turn].parent
        while parent is not None and (
            self._tree.lengths[parent] == 0 or self._rewritten(match, parent, messages, tools) is not None
        ):
            parent = self._tree.turns[parent].parent
        if parent is None:
            return self._root(match, messages, tools, fork)
        length = self._tree.lengths[parent]
        new = self._renderer.plain(messages[length:], self._reasoning(match, messages, start=length))
        if not self._renderer.shape(new, bool(tools)).complete:
            return self._root(match, messages, tools, fork)
        history = self._renderer.plain(messages[:length], self._reasoning(match, messages))
        context = self._renderer.extend(history, new, tools, last_output_id=self._tree.last_ids[parent])
        return Placed(parent, context.ids, context.thinking_open, fork)


__all__ = ["Prompt", "TokenGraph"]

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
            InvariantError: if the version spans are wrong (see `agentrl.validation.check_spans`).
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
        output = ids.tobytes()
        turn = Turn(
            context_ids=np.frombuffer(prompt.added, INT32),
            output_ids=np.frombuffer(output, INT32),
            output_logprobs=np.frombuffer(logprobs.tobytes(), _FLOAT32),
            spans=spans if len(spans) != 1 else _one_span(spans[0].start, spans[0].end, spans[0].version),
            stop_reason=stop_reason,
            parent=parent,
            message=parsed.to_message(),
            temperature=temperature,
            fork=placed.fork,
            kept_thinking=placed.kept_thinking,
            prompt_digest=self._prompts.recorded(len(self._turns), prompt, output),
        )
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
