"""`/v1/completions`: text or token ids continued as they are, without a chat template.

Invariant: prompts are checked as those of `/generate`, and none of their requests outlives the call. The pieces of a stream
add up to the text of the whole reply.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast
from uuid import uuid4

import msgspec

from agentrl.client.arguments import read_sampling
from agentrl.client.config import SamplingConfig
from agentrl.errors import ServerUnavailable
from agentrl.servers.engine import EngineRequest, InferenceEngine, RequestProgress
from agentrl.servers.http.generate import RequestSink, Wakeup
from agentrl.servers.http.replies import output_text
from agentrl.servers.http.requests import GenerateBody, plan_generate
from agentrl_doors.gateway.backend import engine_parameters
from agentrl_doors.gateway.body import CallRefused, OpenAICall

Json = dict[str, Any]
DEFAULT_MAX_TOKENS = 16
"""As at OpenAI, where a chat call has no such limit."""
_SAMPLING_NAMES = frozenset(
    {"max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "ignore_eos", "stop_token_ids"}
)
TEXT_FIELDS = _SAMPLING_NAMES | frozenset({"prompt", "echo", "logprobs", "best_of", "suffix", "logit_bias", "user"})
"""Fields of a call that have an effect or are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCall:
    """A checked call."""

    requests: tuple[EngineRequest, ...]
    """Ordered by prompt, then by choice."""
    n: int
    echo: bool
    """Put the prompt in front of its continuation."""
    logprobs: bool


class TextCalls:
    """Answers calls of `/v1/completions`.

    Args:
        engine: samples the tokens.
        sampling: the default of each sampling argument that a call leaves out, except for `max_tokens`.
    """

    def __init__(self, engine: InferenceEngine, sampling: SamplingConfig) -> None:
        self._engine = engine
        self._sampling = sampling

    def read(self, body: OpenAICall) -> TextCall:
        """Return the checked call of a body."""
        given = body.rest
        for name, why in (("suffix", "the model continues text only"), ("logit_bias", "the engine has no such option")):
            if given.get(name):
                raise CallRefused(f"{name} is not served: {why}; leave it out")
        if given.get("best_of", body.n) != body.n:
            raise CallRefused(f"best_of must be n, which is {body.n}, got {given['best_of']!r:.80}; leave it out")
        echo, logprobs = given.get("echo", False), given.get("logprobs")
        if not isinstance(echo, bool) or (echo and body.stream):
            raise CallRefused(f"echo must be true or false, and false with stream, got {echo!r:.80}")
        if logprobs not in (None, 0) or logprobs is False:
            raise CallRefused(f"logprobs must be 0, the log-probs of the sampled tokens alone, got {logprobs!r:.80}")
        requests = self._requests(body, scores_prompt=echo and logprobs is not None)
        return TextCall(requests=requests, n=body.n, echo=echo, logprobs=logprobs is not None)

    def _requests(self, body: OpenAICall, *, scores_prompt: bool) -> tuple[EngineRequest, ...]:
        given = {name: value for name, value in body.rest.items() if name in _SAMPLING_NAMES}
        only_scores = scores_prompt and given.get("max_tokens") == 0
        if only_scores:
            del given["max_tokens"]
        defaults = self._sampling.model_copy(update={"max_tokens": DEFAULT_MAX_TOKENS})
        info = self._engine.info
        sampling = engine_parameters(read_sampling(given, defaults, vocab_size=info.vocab_size), body.server_sampling)
        sampling.n = body.n
        if only_scores:
            sampling.max_new_tokens = 0
        prompt = body.rest.get("prompt")
        if prompt is None:
            raise CallRefused("prompt is missing: send text, token ids, or a list of either")
        is_text = isinstance(prompt, str) or (isinstance(prompt, list) and isinstance((*prompt, "")[0], str))
        sent = {"text" if is_text else "input_ids": prompt, "stream": body.stream, "return_logprob": True}
        if scores_prompt:
            sent["logprob_start_len"] = 0
        try:
            converted = msgspec.convert(sent, GenerateBody)
        except msgspec.ValidationError as error:
            raise CallRefused(f"prompt must be text, token ids, or a list of either: {error}") from None
        requests = plan_generate(converted, sampling, info, self._engine.encode).requests
        return tuple(_seeded(request, index % body.n) for index, request in enumerate(requests))

    async def complete(self, body: OpenAICall) -> Json:
        """Return the completion of a call.

        Cancellation: aborts every request.
        """
        call, wakeup = self.read(body), Wakeup()
        with self._submitted(call, wakeup) as sinks:
            while not all(sink.done for sink in sinks):
                await wakeup.wait()
            results = [_finished(sink) for sink in sinks]
        choices: list[Json] = []
        for index, progress in enumerate(results):
            text = self._text(progress)
            if call.echo:
                text = self._decode(progress.request.input_ids) + text
            logprobs = self._logprobs(progress, 0, echo=call.echo) if call.logprobs else None
            choices.append(_choice(index, text, logprobs, progress))
        return {**_header(body.model), "choices": choices, "usage": _usage(call, results)}

    async def stream(self, body: OpenAICall) -> AsyncGenerator[Json]:
        """Yield the pieces of a completion, those of several choices as they come.

        Cancellation: aborts every request.
        """
        call, wakeup, header = self.read(body), Wakeup(), _header(body.model)
        held = max((len(stop) for stop in call.requests[0].sampling.stop), default=1) - 1
        with self._submitted(call, wakeup) as sinks:
            texts, counts = [""] * len(sinks), [0] * len(sinks)
            while not all(sink.done for sink in sinks) or any(sink.due(1) for sink in sinks):
                await wakeup.wait()
                for index, sink in enumerate(sinks):
                    if not sink.due(1):
                        continue
                    progress = _finished(sink) if sink.done else cast("RequestProgress", sink.latest)
                    text = self._text(progress)
                    if not sink.done:
                        text = text[: max(len(texts[index]), len(text) - held)]
                    logprobs = self._logprobs(progress, counts[index], echo=False) if call.logprobs else None
                    piece = _choice(index, text[len(texts[index]) :], logprobs, progress)
                    texts[index], counts[index] = text, len(progress.output_ids)
                    sink.sent = counts[index] + sink.done
                    if piece["text"] or sink.done or logprobs:
                        yield {**header, "choices": [piece]}
            results = [_finished(sink) for sink in sinks]
        if body.include_usage:
            yield {**header, "choices": [], "usage": _usage(call, results)}

    @contextmanager
    def _submitted(self, call: TextCall, wakeup: Wakeup) -> Generator[list[RequestSink]]:
        sinks: list[RequestSink] = []
        try:
            for request in call.requests:
                sink = RequestSink(wakeup)
                self._engine.submit(request, sink)
                sinks.append(sink)
            yield sinks
        finally:
            for request, sink in zip(call.requests, sinks, strict=False):
                if not sink.done:
                    self._engine.abort(request.rid, exact=True)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._engine.decode(ids, skip_special_tokens=False)

    def _text(self, progress: RequestProgress) -> str:
        return output_text(progress, lambda ids: self._engine.decode(ids, skip_special_tokens=True))

    def _logprobs(self, progress: RequestProgress, start: int, *, echo: bool) -> Json:
        """Return the log-probs of the output from `start` on, with those of the prompt in front for `echo`."""
        ids, values = list(progress.output_ids[start:]), list[float | None](progress.output_logprobs[start:])
        at = len(self._decode(progress.output_ids[:start]))
        if echo:
            prompt = progress.request.input_ids
            at, ids, values = 0, [*prompt, *ids], [*(progress.input_logprobs or [None] * len(prompt)), *values]
        tokens = [self._decode([token]) for token in ids]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(at)
            at += len(token)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def _seeded(request: EngineRequest, choice: int) -> EngineRequest:
    """Return the request of one choice: each has a seed of its own, counted up from that of the call."""
    seed = request.sampling.seed
    if seed is None or not choice:
        return request
    return replace(request, sampling=replace(request.sampling, seed=seed + choice))


def _finished(sink: RequestSink) -> RequestProgress:
    """Return the output of a request that has ended."""
    progress = sink.latest
    assert progress is not None
    if progress.finish is not None and progress.finish.kind == "abort":
        raise ServerUnavailable(
            f"the server aborted the call after {len(progress.output_ids)} tokens: {progress.finish.message}; call again"
        )
    return progress


def _header(model: str) -> Json:
    return {"id": f"cmpl-{uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model}


def _choice(index: int, text: str, logprobs: Json | None, progress: RequestProgress) -> Json:
    finish = None if progress.finish is None else progress.finish.kind
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _usage(call: TextCall, results: Sequence[RequestProgress]) -> Mapping[str, int]:
    prompt = sum(len(progress.request.input_ids) for progress in results[:: call.n])
    sampled = sum(len(progress.output_ids) for progress in results)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
