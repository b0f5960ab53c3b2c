"""Calls that stand alone, in any dialect: each is answered by the client of an episode that ends with it.

Invariant: an answer is what the client of a workflow gets for the same messages on the same weights. A call leaves nothing
behind.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from uuid import uuid4

from openai.types.chat import ChatCompletionChunk

from agentrl.client import EpisodeSettings, PolicyBackend, SamplingConfig
from agentrl.client.backend import Answer, AnswerStream, AskedCall
from agentrl.errors import AgentRLError
from agentrl.inference.backend import CONTEXT_HEADROOM
from agentrl.servers.engine import InferenceEngine
from agentrl.tokens.renderer import Renderer
from agentrl.types import Speaker
from agentrl_doors.gateway.backend import EngineBackend
from agentrl_doors.gateway.body import CallRefused, code_of, status_of
from agentrl_doors.gateway.dialect import Dialect, DialectCall, EventWriter


class SingleCalls:
    """Answers calls.

    Args:
        engine: samples the tokens.
        renderer: chat template and tokenizer of its model.
        sampling: the default of each sampling argument that a call leaves out.
        model: its name.
    """

    def __init__(self, engine: InferenceEngine, renderer: Renderer, sampling: SamplingConfig, *, model: str) -> None:
        self._engine = engine
        self._renderer = renderer.within(engine.info.max_context_tokens - CONTEXT_HEADROOM)
        self._sampling = sampling
        self._model = model

    def read(self, dialect: Dialect, body: bytes) -> DialectCall:
        """Return the body of a call.

        Raises:
            CallRefused: another model is named.
        """
        call = dialect.read(body, None)
        if call.model not in (None, self._model):
            raise CallRefused(
                f"there is no model {call.model!r:.80} here; this server has {self._model!r}: send that name",
                status=404,
                code="model_not_found",
            )
        return call

    async def complete(self, dialect: Dialect, call: DialectCall) -> Mapping[str, object]:
        """Return the body of the answer to a call.

        Cancellation: aborts it.
        """
        policy, _ = self._policy()
        return dialect.answer(call, await policy.answer(self._asked(call)))

    @asynccontextmanager
    async def stream(self, dialect: Dialect, call: DialectCall) -> AsyncGenerator[AsyncGenerator[bytes]]:
        """Yield the events of a call; leaving the block early aborts it.

        An error before the first token is raised by the first event, so that it can be the status of the response.
        """
        policy, engine = self._policy()
        answer = await policy.stream(self._asked(call))
        events = _events(dialect.events(call, answer.id), answer)
        try:
            yield events
        finally:
            engine.abort()
            await events.aclose()
            if answer.running is not None:
                answer.running.close()
            await answer.close()

    def count_tokens(self, call: DialectCall) -> int:
        """Return the tokens of a call's prompt."""
        policy, _ = self._policy()
        asked = self._asked(call)
        messages, arguments = policy.read(asked)
        return policy.prepare(messages, arguments, asked.speaker).context.size

    def _policy(self) -> tuple[PolicyBackend, EngineBackend]:
        engine = EngineBackend(self._engine, {})
        settings = EpisodeSettings(episode_id=uuid4().hex, task_id="")
        return PolicyBackend(engine, self._renderer, self._sampling, settings, counts_misses=False), engine

    def _asked(self, call: DialectCall) -> AskedCall:
        return AskedCall(call.messages, {**call.arguments, "model": self._model}, Speaker(), None)


async def _events(writer: EventWriter, answer: AnswerStream) -> AsyncGenerator[bytes]:
    pieces = await answer.next()
    yield b"".join(writer.begin())
    try:
        while True:
            for piece in pieces:
                if isinstance(piece, Answer):
                    yield b"".join(writer.finish(piece))
                    return
                if not isinstance(piece, ChatCompletionChunk) and (frames := writer.push(piece)):
                    yield b"".join(frames)
            pieces = await answer.next()
    except AgentRLError as error:
        yield b"".join(writer.fail(str(error), status=status_of(error), code=code_of(error)))
