"""The token graph of one episode: the turns recorded so far, and the prompt of each model call.

A request extends the deepest turn whose messages and output it begins with, compared by meaning, with the same tools. So
parallel calls and retries become siblings, and other conversations become new roots. A request that repeats earlier model
outputs in another form is a *fork* with a reason code: its history is rendered again, as context that is never trained.

A prompt adds to its parent turn only what the request adds. Its context shares its pieces with the contexts before it, so a
prompt that extends the last recorded turn costs what is new; any other prompt costs one pass over all its ids.

Invariant: for each recorded turn, the context and output ids from the root to its own context are, joined, the ids that were
sent for it; `Turn.prompt_digest` proves it. Sampled ids are kept as they were sampled.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec
import numpy as np

from agentrl.episode.checks import check_spans, sound_logprobs
from agentrl.errors import ContextOverflow, ReplyError, TokenError
from agentrl.inference.backend import INT32, Context, json_of
from agentrl.tokens.history import HistoryMatch, TurnIndex
from agentrl.tokens.messages import plain_fields, role_of, tools_key
from agentrl.tokens.parse import ParsedMessage
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.template.rendering import PlainMessage, ToolSchemas
from agentrl.types import (
    BranchPath,
    Float32Array,
    ForkReason,
    Int32Array,
    Message,
    Speaker,
    StopReason,
    Turn,
    VersionSpan,
)

_KEPT_JSON: Final = 32_768
"""Longest context, tokens, whose JSON is kept for the next call. That of a longer one takes more memory than its ids and
log-probs together, and is written again in a millisecond."""
_THINKING = re.compile(r"<think>(?:.*?</think>\s*|\s*\Z)", re.DOTALL)


class Extension(msgspec.Struct, frozen=True):
    """The ids and pieces that a model call adds to the turn that it extends."""

    parent: int | None
    """The extended turn; None for a root."""
    ids: list[int]
    """The context ids between the end of the parent and where the model writes."""
    thinking_open: bool = False
    """Whether the context ends inside `<think>`."""
    fork: ForkReason | None = None
    """The reason of a fork; None without one."""
    kept_thinking: bool = False
    """Whether the context keeps earlier reasoning that the template would drop (`history="keep"`)."""


class Prompt(msgspec.Struct, frozen=True):
    """The ids that one model call sends, and the place of its turn in the graph."""

    extension: Extension
    added: bytes
    """The ids of the extension, int32."""
    context: Context
    """All ids."""
    match: HistoryMatch | None
    """The meeting point of request and recorded conversations; None for a call made of ids."""
    tools_key: bytes
    tools: ToolSchemas | None
    """The tools of the request, so that the output may hold tool calls."""
    sent_after: int
    """The number of turns complete when the request was prepared."""
    sent_at: int
    """When the request was prepared, by the episode's clock of events."""
    messages: tuple[Message, ...] = ()
    """The messages that the request adds to the conversation of the extended turn."""
    schemas: ToolSchemas | None = None
    """The tools of the request, if it starts a conversation; the turn that it extends has the same tools."""
    started_s: float = 0.0
    """When the request was made, before it was rendered, seconds of `time.perf_counter`."""


@dataclass(frozen=True, slots=True)
class RecordedTurns:
    """The recorded turns and what rendering needs to know about each; `TokenGraph` appends to all lists together."""

    turns: list[Turn]
    index: TurnIndex
    last_ids: array[int]
    """The last sampled id of the turn; -1 for a turn that sampled none."""
    has_reasoning: list[bool]
    """Whether the ids from the root to the turn's end hold reasoning."""


class TokenGraph:
    """The turns of one episode, as a tree; used by one task at a time, although its calls in flight may overlap.

    Example:
        prompt = graph.prepare([{"role": "user", "content": "2 + 2 = ?"}])
        turn = graph.append(prompt, output_ids=ids, output_logprobs=logprobs, spans=spans,
                            stop_reason=StopReason.STOP, matched_stop=None, temperature=1.0)
        assert graph.turns[turn].message["content"] == "4"
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        episode_id: str,
        history: Literal["keep", "as_template"] = "keep",
        max_context: int | None = None,
        clock: Iterator[int] | None = None,
        turns: list[Turn] | None = None,
    ) -> None:
        """Start with no turns, or with the list `turns`, to which new turns are added.

        Where the template rewrites earlier turns, `history` keeps the sampled ids as context (marked by
        `Turn.kept_thinking`) or forks as the template demands. Messages that cannot fit into `max_context` tokens are
        refused before they are encoded. `clock` numbers the requests and turn rewards.
        """
        self._renderer = renderer
        self._episode_id = episode_id
        self._clock = itertools.count() if clock is None else clock
        self._turns: list[Turn] = [] if turns is None else turns
        self._recorded = RecordedTurns(self._turns, TurnIndex(self._turns), array("i"), [])
        self._max_context = max_context
        self._contexts = ContextBuilder(self._turns, renderer.vocab_size)
        self._extensions = ExtensionRenderer(
            renderer, self._recorded, self._contexts, history=history, max_context=max_context
        )
        self._forks: Counter[ForkReason] = Counter()

    def __str__(self) -> str:
        """Return where the next turn will stand, for error messages about it."""
        return f"episode {self._episode_id}, turn {len(self._turns)}"

    @property
    def turns(self) -> Sequence[Turn]:
        """The recorded turns, in order of completion; do not change it."""
        return self._turns

    @property
    def forks(self) -> Mapping[ForkReason, int]:
        """Recorded forks by reason."""
        return self._forks

    def prepare(self, messages: Sequence[Message], tools: ToolSchemas | None = None, branch: BranchPath = ()) -> Prompt:
        """Return the prompt of a request sent in a declared branch; nothing is recorded until `append`.

        Raises:
            ContextOverflow: if the messages cannot fit into the context.
            TokenError: if the messages cannot be rendered exactly, or the model's tool calls could not be read.
        """
        started_s = time.perf_counter()
        # Every message takes at least one token, so this many cannot fit; rendering them would take seconds.
        if self._max_context is not None and len(messages) > self._max_context:
            raise ContextOverflow(
                f"{len(messages)} messages do not fit into {self._max_context} tokens; they were not encoded"
            )
        if not messages:
            raise TokenError(f"episode {self._episode_id}: a request needs at least one message")
        if tools:
            self._renderer.check_tools()
        key = tools_key(tools)
        match = self._recorded.index.find(messages, key, branch)
        extension = self._extensions.render(match, messages, tools)
        shown, as_read, parent = tools or None, match.request.messages, extension.parent
        if parent is None:
            return self._prompt(started_s, extension, match, key, plain_fields(as_read), shown, starts=True)
        new = plain_fields(as_read[self._recorded.index.lengths[parent] :])
        return self._prompt(started_s, extension, match, key, new, shown)

    def prepare_ids(self, context_ids: Sequence[int] | Int32Array, parent: int | None = None) -> Prompt:
        """Return the prompt of a token-level call: `context_ids`, which are in the vocabulary, after the turn `parent`."""
        started_s, ids = time.perf_counter(), np.asarray(context_ids, np.int32).tolist()
        fork = ForkReason.NEW_CONVERSATION if parent is None and self._turns else None
        return self._prompt(started_s, Extension(parent, ids, fork=fork), None, b"")

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
        truncated_by: Mapping[str, float] | None = None,
        cached_tokens: int | None = None,
        speaker: Speaker = Speaker(),  # noqa: B008 - an immutable tuple
    ) -> int:
        """Record a finished model call; return the index of its turn.

        Args:
            prompt: the result of `prepare`.
            output_ids: [T] the ids the server sampled, the stop token included.
            output_logprobs: [T] nats.
            spans: policy versions of the output.
            stop_reason: STOP, LENGTH or ABORT.
            matched_stop: the token id or stop string that ended it.
            temperature: of the call.
            truncated_by: the settings of the call that kept tokens from being sampled; None: there are none.
            cached_tokens: how many of the prompt the server had computed before; None: not known.
            speaker: the agent that took the turn.
        """
        extension, parent = prompt.extension, prompt.extension.parent
        # Copies: a turn must not change when the caller uses its arrays again.
        ids, logprobs = np.array(output_ids, np.int32), np.array(output_logprobs, np.float32)
        self._check_output(ids, logprobs)
        check_spans(spans, len(ids), None if parent is None else self._turns[parent], self)
        numbers, output = ids.tolist(), ids.tobytes()
        parsed = self._parsed(prompt, numbers, matched_stop, is_cut=stop_reason is StopReason.ABORT)
        turn = Turn(
            context_ids=np.frombuffer(prompt.added, INT32),
            output_ids=np.frombuffer(output, INT32),
            output_logprobs=np.frombuffer(logprobs.tobytes(), np.float32),
            spans=spans,
            stop_reason=stop_reason,
            **speaker._asdict(),
            sent_after=prompt.sent_after,
            sent_at=prompt.sent_at,
            parent=parent,
            message=parsed.to_message(),
            temperature=temperature,
            truncated_by=truncated_by,
            cached_tokens=cached_tokens,
            fork=extension.fork,
            kept_thinking=extension.kept_thinking,
            prompt_digest=self._contexts.record(len(self._turns), prompt, output),
            messages=prompt.messages,
            tools=prompt.schemas,
            started_s=prompt.started_s,
            ended_s=time.perf_counter(),
        )
        self._record(turn, prompt, numbers[-1] if numbers else -1, has_reasoning=parsed.reasoning is not None)
        return len(self._turns) - 1

    def _parsed(self, prompt: Prompt, ids: list[int], stopped_on: int | str | None, *, is_cut: bool) -> ParsedMessage:
        thinking_open = prompt.extension.thinking_open
        return self._renderer.parse(
            ids, tools=prompt.tools, stopped_on=stopped_on, thinking_open=thinking_open, salt=self, is_cut=is_cut
        )

    def add_shown(self, prompt: Prompt, shown: Message) -> None:
        """Let a request with the answer `shown` continue the turn recorded last, whose output goes on after it.

        It is what an agent got of an output that it gave up: what may be a tool call, or part of a character, is held back.
        """
        self._recorded.index.add_shown(prompt.match, shown)

    def adopt(self, turn: Turn) -> None:
        """Record a turn without tokens, which another model answered; no request continues it."""
        recorded = self._recorded
        recorded.turns.append(replace(turn, prompt_digest=hashlib.blake2b(digest_size=16).digest()))
        recorded.index.add(None, b"", turn.message)
        recorded.last_ids.append(-1)
        recorded.has_reasoning.append(False)

    def _record(self, turn: Turn, prompt: Prompt, last_id: int, *, has_reasoning: bool) -> None:
        recorded = self._recorded
        recorded.turns.append(turn)
        recorded.index.add(prompt.match, prompt.tools_key, turn.message)
        recorded.last_ids.append(last_id)
        recorded.has_reasoning.append(has_reasoning or (turn.parent is not None and recorded.has_reasoning[turn.parent]))
        if turn.fork is not None:
            self._forks[turn.fork] += 1

    def _prompt(
        self,
        started_s: float,
        extension: Extension,
        match: HistoryMatch | None,
        key: bytes,
        messages: tuple[Message, ...] = (),
        tools: ToolSchemas | None = None,
        *,
        starts: bool = False,
    ) -> Prompt:
        added = array("i", extension.ids).tobytes()
        context = self._contexts.build(extension.parent, added)
        sent_after, sent_at = len(self._turns), next(self._clock)
        schemas = tools if starts else None
        return Prompt(extension, added, context, match, key, tools, sent_after, sent_at, messages, schemas, started_s)

    def _check_output(self, output_ids: Int32Array, logprobs: Float32Array) -> None:
        if len(logprobs) != len(output_ids):
            raise ReplyError(f"{self}: the server returned {len(output_ids)} ids but {len(logprobs)} log-probs")
        if not len(output_ids):
            return
        if not 0 <= int(output_ids.min()) <= int(output_ids.max()) < self._renderer.vocab_size:
            raise ReplyError(f"{self}: the server returned an id outside the vocabulary of {self._renderer.vocab_size}")
        if not sound_logprobs(logprobs):
            head = logprobs.tolist()[:8]
            raise ReplyError(f"{self}: the server returned log-probs that are not finite, or above 0: {head}...")


class ExtensionRenderer:
    """Renders the new messages of a request, or the whole conversation where the template or a fork requires it.

    Model outputs that are rendered again are context, which is never trained.
    """

    def __init__(
        self,
        renderer: Renderer,
        recorded: RecordedTurns,
        contexts: ContextBuilder,
        *,
        history: Literal["keep", "as_template"],
        max_context: int | None,
    ) -> None:
        self._renderer = renderer
        self._recorded = recorded
        self._contexts = contexts
        self._history = history
        self._max_context = max_context

    def render(self, match: HistoryMatch, messages: Sequence[Message], tools: ToolSchemas | None) -> Extension:
        """Return the ids that a request adds to the turn at `match`."""
        fork: ForkReason | None = None
        if match.length_any_tools > match.length:
            fork = ForkReason.TOOLS_CHANGED
        elif match.edited:
            fork = ForkReason.HISTORY_EDITED
        turn, renderer, recorded = match.turn, self._renderer, self._recorded
        if turn is None:
            return self._start(match, messages, tools, fork)
        new = renderer.plain(messages[match.length :], self._reasoning(match, messages, start=match.length))
        self._check_length(new)
        traits = renderer.traits(new, bool(tools))
        # The template cannot write these messages without those before them, so the ids cannot be extended.
        if not traits.complete:
            return self._start(match, messages, tools, fork or ForkReason.TEMPLATE_CHANGED)
        kept = recorded.turns[turn].kept_thinking
        if traits.rewrites and self._history == "as_template":
            change = self._rewritten(match, turn, messages, tools)
            if change is not None:
                return self._fork_as_template(match, turn, messages, tools, fork or change)
        elif traits.rewrites_thinking:
            kept = kept or recorded.has_reasoning[turn]
        history = [] if traits.local else renderer.plain(messages[: match.length], self._reasoning(match, messages))
        tokens = renderer.extend(history, new, tools, last_output_id=recorded.last_ids[turn])
        return Extension(turn, tokens.ids, tokens.thinking_open, fork, kept)

    def _start(
        self, match: HistoryMatch, messages: Sequence[Message], tools: ToolSchemas | None, fork: ForkReason | None
    ) -> Extension:
        plain = self._renderer.plain(messages, self._reasoning(match, messages))
        self._check_length(plain)
        tokens = self._renderer.start(plain, tools)
        if fork is None and self._recorded.turns:
            fork = ForkReason.NEW_CONVERSATION
        return Extension(None, tokens.ids, tokens.thinking_open, fork)

    def _check_length(self, messages: Sequence[PlainMessage]) -> None:
        if self._max_context is not None:
            self._renderer.check_length(messages, self._max_context)

    def _reasoning(self, match: HistoryMatch, messages: Sequence[Message], start: int = 0) -> dict[int, str]:
        """Return the recorded reasoning of the model outputs among `messages[start:]`, by position from `start`."""
        found: dict[int, str] = {}
        recorded = self._recorded
        if not any(recorded.has_reasoning):
            return found
        for at in range(start, len(messages)):
            if role_of(messages[at]) == "assistant":
                turn = recorded.index.turn_of_output(messages[at])
                text = None if turn is None else recorded.turns[turn].message.get("reasoning_content")
                if text:
                    found[at - start] = text
        if start >= match.length:
            return found
        turn = match.turn
        while turn is not None:  # the outputs of the extended turns are known for certain
            at = recorded.index.lengths[turn] - 1 - start
            text = recorded.turns[turn].message.get("reasoning_content")
            if at >= 0 and text:
                found[at] = text
            else:
                found.pop(at, None)
            turn = recorded.turns[turn].parent
        return found

    def _rewritten(
        self, match: HistoryMatch, turn: int, messages: Sequence[Message], tools: ToolSchemas | None
    ) -> ForkReason | None:
        """Return why the template no longer writes the ids up to the end of `turn`; None if it does."""
        renderer = self._renderer
        plain = renderer.plain(messages, self._reasoning(match, messages))
        whole = renderer.render_text(plain, tools, generation_prompt=True)
        length = self._recorded.index.lengths[turn]
        prompt = renderer.render_text(plain[: length - 1], tools, generation_prompt=True)
        answered = renderer.render_text(plain[:length], tools, generation_prompt=False)
        recorded = renderer.decode(self._contexts.path_ids(turn), skip_special=False)
        if (whole.startswith(prompt) and whole.startswith(answered)) or whole.startswith(recorded):
            return None
        bare = _THINKING.sub("", whole)
        if bare.startswith(_THINKING.sub("", prompt)) and bare.startswith(_THINKING.sub("", answered)):
            return ForkReason.THINKING_STRIPPED
        return ForkReason.TEMPLATE_CHANGED

    def _fork_as_template(
        self, match: HistoryMatch, turn: int, messages: Sequence[Message], tools: ToolSchemas | None, fork: ForkReason
    ) -> Extension:
        """Fork from the deepest ancestor whose text the template still writes."""
        recorded, renderer = self._recorded, self._renderer
        parent = recorded.turns[turn].parent
        while parent is not None and (
            recorded.index.lengths[parent] == 0 or self._rewritten(match, parent, messages, tools) is not None
        ):
            parent = recorded.turns[parent].parent
        if parent is None:
            return self._start(match, messages, tools, fork)
        length = recorded.index.lengths[parent]
        new = renderer.plain(messages[length:], self._reasoning(match, messages, start=length))
        if not renderer.traits(new, bool(tools)).complete:
            return self._start(match, messages, tools, fork)
        history = renderer.plain(messages[:length], self._reasoning(match, messages))
        tokens = renderer.extend(history, new, tools, last_output_id=recorded.last_ids[parent])
        return Extension(parent, tokens.ids, tokens.thinking_open, fork)


class ContextBuilder:
    """Builds contexts over the turns of one episode; remembers the end of the last turn, which most calls extend."""

    def __init__(self, turns: Sequence[Turn], bound: int) -> None:
        self._turns = turns
        self._bound = bound
        self._last: int | None = None
        """The last recorded turn."""
        self._pieces: list[bytes] = []
        """The ids from the root to its end, int32; the last piece is its output."""
        self._size = 0
        """Number of these ids."""
        self._json: tuple[bytes, ...] = ()
        """The JSON of the ids before its output, in pieces as in `Context`; empty where it is not kept."""
        self._is_long = False
        """Whether it is not kept."""
        self._digest = hashlib.blake2b(digest_size=16)
        """The digest of that JSON."""

    def path_ids(self, turn: int | None) -> Int32Array:
        """Return the ids from the root to the end of `turn`, [N] int32."""
        return np.frombuffer(b"".join(self._path(turn)), np.int32)

    def build(self, parent: int | None, added: bytes) -> Context:
        """Return the context of a call that adds the int32 ids `added` to the end of `parent`."""
        # Most calls extend the last turn: its ids and their JSON are kept, so a call costs only what it adds.
        if parent == self._last:
            pieces, json = (*self._pieces, added), self._json
            if self._is_long:
                json = (json_of(b"".join(self._pieces[:-1])),)
            size, fresh = self._size + len(added) // INT32.itemsize, b"".join([*self._pieces[-1:], added])
        else:
            fresh = b"".join([*self._path(parent), added])
            pieces, json, size = (fresh,), (), len(fresh) // INT32.itemsize
        written = json_of(fresh)
        if written:
            json = (*json, b"," + written if json else written)
        return Context(pieces, json, size, self._bound)

    def record(self, turn: int, prompt: Prompt, output: bytes) -> bytes:
        """Remember the end of `turn`, which is recorded now; return the digest of its context's JSON."""
        parent, json = prompt.extension.parent, prompt.context.json
        if parent == self._last:  # also when the prompt was built, because a parent precedes its children
            pieces, digest, new = self._pieces, self._digest, json[1 if self._is_long else len(self._json) :]
        else:
            pieces, digest, new = self._path(parent), hashlib.blake2b(digest_size=16), json
        digest.update(b"".join(new))
        self._is_long = prompt.context.size > _KEPT_JSON
        self._json = () if self._is_long else json
        self._last, self._pieces, self._digest = turn, [*pieces, prompt.added, output], digest
        self._size = prompt.context.size + len(output) // INT32.itemsize
        return digest.digest()

    def _path(self, turn: int | None) -> list[bytes]:
        pieces: list[bytes] = []
        while turn is not None:
            record = self._turns[turn]
            pieces += (record.output_ids.tobytes(), record.context_ids.tobytes())
            turn = record.parent
        return pieces[::-1]
