"""An inference engine of this process as a `Backend`, so that the client's own code answers calls over HTTP.

Invariant: every request passes the checks of `/generate` before the engine gets it, and none outlives the call that made it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import fields
from typing import NamedTuple

import msgspec
import numpy as np

from agentrl.inference.backend import GenerateRequest, Generation, GenerationChunk, SamplingParams
from agentrl.inference.sglang.wire import parse_version
from agentrl.servers.engine import InferenceEngine, RequestProgress
from agentrl.servers.http.errors import BadSampling
from agentrl.servers.http.generate import RequestSink, Wakeup
from agentrl.servers.http.replies import version_spans
from agentrl.servers.http.requests import GenerateBody, Sampling, plan_generate
from agentrl.types import StopReason, VersionSpan

SERVER_NAMES = {
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
}
"""Sampling arguments that a server honours and training refuses, by their names in the API; values are SGLang's names."""


def engine_parameters(sampling: SamplingParams, extra: Mapping[str, object]) -> Sampling:
    """Return sampling parameters, and arguments of `SERVER_NAMES`, as `/generate` takes them.

    Raises:
        BadSampling: a value has the wrong type.
    """
    values = {field.name: getattr(sampling, field.name) for field in fields(SamplingParams)}
    values["sampling_seed"] = values.pop("seed")
    values |= {SERVER_NAMES[name]: value for name, value in extra.items()}
    try:
        return msgspec.convert(values, Sampling)
    except msgspec.ValidationError as error:
        raise BadSampling(f"a sampling argument is wrong: {error}", status=400) from None


class _Running(NamedTuple):
    sink: RequestSink
    wakeup: Wakeup


class EngineBackend:
    """Implements `Backend` over an engine that runs in this event loop.

    Args:
        engine: samples the tokens.
        extra: arguments of `SERVER_NAMES` for every request.
    """

    def __init__(self, engine: InferenceEngine, extra: Mapping[str, object]) -> None:
        self._engine = engine
        self._extra = extra
        self._running: set[str] = set()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the completion of a request.

        Cancellation: the request is aborted.
        """
        with self._submitted(request, stream=False) as running:
            while not running.sink.done:
                await running.wakeup.wait()
            return self._generation(running.sink)

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[GenerationChunk]]:
        """Yield the completion of a request as it is sampled; leaving the block early aborts it."""
        with self._submitted(request, stream=True) as running:
            async with aclosing(self._chunks(running)) as chunks:
                yield chunks

    def abort(self) -> None:
        """End every request in flight with its partial output."""
        for request_id in tuple(self._running):
            self._engine.abort(request_id, exact=True)

    async def _chunks(self, running: _Running) -> AsyncGenerator[GenerationChunk]:
        sink, sent, generation = running.sink, 0, None
        while generation is None:
            await running.wakeup.wait()
            ids = sink.latest.output_ids if sink.latest is not None else []
            new, sent = ids[sent:], len(ids)
            generation = self._generation(sink) if sink.done else None
            yield GenerationChunk(output_ids=np.array(new, np.int32), generation=generation)

    @contextmanager
    def _submitted(self, request: GenerateRequest, *, stream: bool) -> Generator[_Running]:
        body = GenerateBody(input_ids=request.input_ids.tolist(), rid=request.request_id, stream=stream)
        call = plan_generate(body, engine_parameters(request.sampling, self._extra), self._engine.info, self._engine.encode)
        running = _Running(RequestSink(wakeup := Wakeup()), wakeup)
        self._engine.submit(call.requests[0], running.sink)
        self._running.add(request.request_id)
        try:
            yield running
        finally:
            self._running.discard(request.request_id)
            if not running.sink.done:
                self._engine.abort(request.request_id, exact=True)

    def _generation(self, sink: RequestSink) -> Generation:
        progress = sink.latest
        assert progress is not None
        assert progress.finish is not None
        return Generation(
            output_ids=np.array(progress.output_ids, np.int32),
            output_logprobs=np.array(progress.output_logprobs, np.float32),
            spans=self._spans(progress),
            stop_reason=StopReason(progress.finish.kind),
            matched_stop=progress.finish.matched,
            cached_tokens=progress.cached_tokens,
            num_retractions=progress.num_retractions,
        )

    def _spans(self, progress: RequestProgress) -> tuple[VersionSpan, ...]:
        info = self._engine.info
        return tuple(
            VersionSpan(start=span["start"], end=span["end"], version=parse_version(span["version"], info.model_path))
            for span in version_spans(progress, info.weight_version)
            if span["end"] > span["start"]
        )
