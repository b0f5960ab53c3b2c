"""Calls that stand alone, in any dialect: each is answered by the client of an episode that ends with it.

Invariant: an answer is what the client of a workflow gets for the same messages on the same weights. A call leaves nothing
behind.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from uuid import uuid4

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from agentrl.client import EpisodeSettings, PolicyBackend, SamplingConfig
from agentrl.client.backend import Answer, AnswerStream, AskedCall, Piece
from agentrl.inference.backend import CONTEXT_HEADROOM
from agentrl.servers.engine import InferenceEngine
from agentrl.support.concurrency import task_group
from agentrl.tokens.renderer import Renderer
from agentrl.types import Speaker
from agentrl_doors.gateway.backend import EngineBackend
from agentrl_doors.gateway.dialect import Dialect, DialectCall, EventWriter
from agentrl_doors.gateway.dialects.chat import choice_events, completion_of_choices
from agentrl_doors.gateway.event_stream import frames_of
from agentrl_doors.gateway.fields import check_model


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
        """Return the body of a call; one without a model's name means the one that is served.

        Raises:
            CallRefused: another model is named.
        """
        call = dialect.read(body, None)
        check_model(call.model, self._model)
        return replace(call, model=self._model)

    async def complete(self, dialect: Dialect, call: DialectCall) -> Mapping[str, object]:
        """Return the body of the answer to a call.

        Cancellation: aborts it.
        """
        engine, found = self._backend(call), dict[int, Answer]()

        async def sample(choice: int) -> None:
            found[choice] = await self._policy(engine).answer(_asked(call, choice))

        async with task_group() as tasks:
            for choice in range(call.n):
                tasks.start_soon(sample, choice)
        bodies = [dialect.answer(call, found[choice]) for choice in range(call.n)]
        return bodies[0] if call.n == 1 else completion_of_choices(bodies)

    @asynccontextmanager
    async def stream(self, dialect: Dialect, call: DialectCall) -> AsyncGenerator[tuple[AsyncGenerator[bytes], EventWriter]]:
        """Yield the frames of a call, those of several choices as they come, and their writer.

        Leaving the block early aborts the call. An error before the first token is raised by the first frame, so that it can
        be the status of the response.
        """
        engine = self._backend(call)
        answers = [await self._policy(engine).stream(_asked(call, choice)) for choice in range(call.n)]
        identity = answers[0].id
        writers = [dialect.events(call, identity)] if call.n == 1 else choice_events(call, identity)
        send, receive = anyio.create_memory_object_stream[bytes | Exception]()
        async with task_group() as tasks, receive:
            async with send:
                for answer, writer in zip(answers, writers, strict=True):
                    tasks.start_soon(_forward_frames, answer, writer, send.clone())
            try:
                yield _received(receive), writers[0]
            finally:
                # An engine that steps in this event loop wakes the tasks before each step, and a task that is awake takes no
                # cancellation: without this it would sample to the end.
                engine.abort()
                tasks.cancel_scope.cancel()

    def count_tokens(self, call: DialectCall) -> int:
        """Return the tokens of a call's prompt."""
        policy, asked = self._policy(self._backend(call)), _asked(call, 0)
        messages, arguments = policy.read(asked)
        return policy.prepare(messages, arguments, asked.speaker).context.size

    def _backend(self, call: DialectCall) -> EngineBackend:
        return EngineBackend(self._engine, call.server_sampling)

    def _policy(self, engine: EngineBackend) -> PolicyBackend:
        settings = EpisodeSettings(episode_id=uuid4().hex, task_id="")
        return PolicyBackend(engine, self._renderer, self._sampling, settings, counts_misses=False)


def _asked(call: DialectCall, choice: int) -> AskedCall:
    """Return what one choice asks: each has a seed of its own, counted up from that of the call."""
    arguments, seed = {**call.arguments, "model": call.model}, call.arguments.get("seed")
    if choice and isinstance(seed, int) and not isinstance(seed, bool):
        arguments["seed"] = seed + choice
    return AskedCall(call.messages, arguments, Speaker(), None)


async def _pieces(answer: AnswerStream) -> AsyncGenerator[Piece]:
    """Yield the pieces of an answer; leaving them early stops its sampling."""
    try:
        while True:
            for piece in await answer.next():
                yield piece
                if isinstance(piece, Answer):
                    return
    finally:
        if answer.running is not None:
            answer.running.close()
        await answer.close()


async def _forward_frames(
    answer: AnswerStream, writer: EventWriter, send: MemoryObjectSendStream[bytes | Exception]
) -> None:
    """Send the frames of one choice, and an error in place of the next one."""
    async with send, aclosing(_pieces(answer)) as pieces, aclosing(frames_of(pieces, lambda: writer)) as frames:
        with suppress(anyio.BrokenResourceError):  # the call was left
            try:
                async for frame in frames:
                    await send.send(frame)
            except Exception as error:  # noqa: BLE001 - the reader of the frames gets it
                await send.send(error)


async def _received(frames: MemoryObjectReceiveStream[bytes | Exception]) -> AsyncGenerator[bytes]:
    async for frame in frames:
        if isinstance(frame, Exception):
            raise frame
        yield frame
