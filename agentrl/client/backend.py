"""The seam of the client: the backend of the model calls of one episode, and its answers before they have a dialect.

Invariant: a call is asked for with messages and the arguments of chat completions. Its answer is a recorded turn, whole or
in pieces; a front end such as `Client` writes it in the API that the caller speaks.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentrl.client.arguments import MessageLike
from agentrl.client.config import SamplingConfig
from agentrl.client.episode import Episode, RunningCall
from agentrl.inference.backend import Generation
from agentrl.tokens.graph import TokenGraph
from agentrl.tokens.renderer import Renderer
from agentrl.types import EpisodeFailure, Int32Array, Message, Speaker, Turn


class AskedCall(NamedTuple):
    """A call of a chat model."""

    messages: Iterable[MessageLike]
    arguments: Mapping[str, object]
    """Of `chat.completions.create`, as they were given."""
    speaker: Speaker
    timeout: object
    """The deadline of a call that gives none, as an openai client has it."""


class Delta(NamedTuple):
    """New text; empty where there is none."""

    reasoning: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A recorded turn, as front ends read it."""

    id: str
    """Unique over all episodes."""
    model: str
    message: Message
    generation: Generation
    """Without ids where the model is out of sight."""
    num_context: int = 0
    """Context tokens."""
    logprobs: Mapping[str, object] | None = None
    """In OpenAI's shape, where the call asked for them."""
    prompt_ids: Int32Array | None = None
    """The ids of the prompt, if the call asked for them."""
    native: ChatCompletion | None = None
    """The completion that an endpoint sent."""


Piece: TypeAlias = Delta | ChatCompletionChunk | Answer
"""New text, an endpoint's own chunk, or at last the whole answer, whose turn is recorded then."""


class AnswerStream(ABC):
    """An answer in pieces; of a stream that is left before its `Answer`, the pieces that came are recorded as a turn."""

    running: RunningCall | None = None
    """Counts the call; None before sampling begins."""
    response: object = None
    """The HTTP response, where there is one."""

    def __init__(self, identity: str, model: str, *, include_usage: bool) -> None:
        self.id = identity
        self.model = model
        self.include_usage = include_usage

    @abstractmethod
    async def next(self) -> Sequence[Piece]:
        """Return the pieces that have come, perhaps none."""

    @abstractmethod
    async def close(self, error: BaseException | None = None) -> None:
        """Stop sampling, because the stream is left or because of `error`."""


class PolicyTokenizer:
    """Text to token ids and back, by the tokenizer of the policy; only the chat template writes control tokens."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    @property
    def vocab_size(self) -> int:
        """Rows of the model's vocabulary; ids are below it."""
        return self._renderer.vocab_size

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an output."""
        return self._renderer.eos_ids

    def encode(self, text: str) -> Int32Array:
        """Return the ids of text, [N] int32; never a control token, whatever the text says."""
        return np.asarray(self._renderer.encode_content(text), np.int32)

    def decode(self, ids: Sequence[int] | Int32Array, *, skip_special: bool = False) -> str:
        """Return the text of ids, with or without special tokens; invalid UTF-8 becomes U+FFFD."""
        return self._renderer.decode(ids, skip_special=skip_special)


class ClientBackend(ABC):
    """Answers the calls of one episode, and records each as a turn.

    `PolicyBackend` samples from servers by token ids, `EndpointBackend` asks an OpenAI-compatible endpoint, `ReplayBackend`
    repeats a record.
    """

    connection: AsyncOpenAI | None = None
    """The connection to the model's API, where there is one."""
    is_replay: bool = False
    """Whether answers come from a record, those of other models included."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode

    @property
    def run_sampling(self) -> SamplingConfig | None:
        """The sampling arguments of the run; None: calls have nothing but their own."""
        return None

    @abstractmethod
    async def answer(self, asked: AskedCall) -> Answer:
        """Return the answer of a call, whose turn is recorded.

        Cancellation: the request is aborted. What the policy had sampled is recorded as a turn, unless the episode ends.
        """

    @abstractmethod
    async def stream(self, asked: AskedCall) -> AnswerStream:
        """Return the answer of a call in pieces."""

    @abstractmethod
    async def generate(
        self, input_ids: Sequence[int] | Int32Array, speaker: Speaker, timeout: float | None, sampling: Mapping[str, object]
    ) -> Generation:
        """Return the output of a context of token ids, whose turn is recorded."""

    @property
    @abstractmethod
    def tokenizer(self) -> PolicyTokenizer:
        """The tokenizer of the model."""

    @property
    @abstractmethod
    def graph(self) -> TokenGraph:
        """The tokens of the turns."""

    def adopt(self, turn: Turn) -> None:
        """Add a turn that another model answered, which has no tokens; `Episode.announce` is left to the caller."""
        self.episode.turns.append(turn)

    async def settle(self) -> None:  # noqa: B027 - most have nothing to do
        """Close the streams that the workflow has left open, before it returns its result."""

    def finish(self, failure: EpisodeFailure | None) -> None:  # noqa: B027 - most have nothing to do
        """Take note that the episode is about to close."""

    def over(self, connection: AsyncOpenAI) -> Self:
        """Return a backend of the same episode over another connection."""
        other = copy.copy(self)
        other.connection = connection
        return other
