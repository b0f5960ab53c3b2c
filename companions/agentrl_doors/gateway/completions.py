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
from agentrl_doors.gateway.backend import SERVER_NAMES, engine_parameters
from agentrl_doors.gateway.dialects.answers import DONE, frame
from agentrl_doors.gateway.fields import Fields, check_model, read_choices, read_object
from agentrl_doors.gateway.refusals import CallRefused

Json = dict[str, Any]
DEFAULT_MAX_TOKENS = 16
"""As at OpenAI, where a chat call has no such limit."""
_SAMPLING_NAMES = frozenset(
    {"max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "ignore_eos", "stop_token_ids"}
)
_UNSERVED = {"suffix": "the model continues text only", "logit_bias": "the engine has no such option"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCall:
    """A checked call."""

    requests: tuple[EngineRequest, ...]
    """Ordered by prompt, then by choice."""
    n: int
    """Choices for each prompt."""
    stream: bool
    include_usage: bool
    """Send the usage of a stream as its last event."""
    echo: bool
    """Put the prompt in front of its continuation."""
    logprobs: bool
    ignored: tuple[str, ...]
    """Fields that have no effect, by name."""


class TextCalls:
    """Answers calls of `/v1/completions`.

    Args:
        engine: samples the tokens.
        sampling: the default of each sampling argument that a call leaves out, except for `max_tokens`.
        model: its name.
    """

    def __init__(self, engine: InferenceEngine, sampling: SamplingConfig, *, model: str) -> None:
        self._engine, self._sampling, self._model = engine, sampling, model

    def read(self, body: bytes) -> TextCall:
        """Return the checked call of a body.

        Raises:
            CallRefused: another model is named, or the call asks for what this server cannot do.
        """
        sent = read_object(body)
        fields = Fields(sent)
        check_model(fields.read("model", str), self._model)
        stream, n = fields.read("stream", bool) or False, read_choices(fields)
        options = Fields(fields.read("stream_options", dict) or {}, "stream_options")
        for name, why in _UNSERVED.items():
            if fields.any(name):
                raise CallRefused(f"{name} is not served: {why}; leave it out")
        if fields.any("best_of") not in (None, n):
            raise CallRefused(f"best_of must be n, which is {n}, got {sent['best_of']!r:.80}; leave it out")
        echo, logprobs = sent.get("echo", False), fields.any("logprobs")
        if not isinstance(echo, bool) or (echo and stream):
            raise CallRefused(f"echo must be true or false, and false with stream, got {echo!r:.80}")
        if logprobs not in (None, 0) or logprobs is False:
            raise CallRefused(f"logprobs must be 0, the log-probs of the sampled tokens alone, got {logprobs!r:.80}")
        fields.skip(("prompt", "echo", "user", *_SAMPLING_NAMES, *SERVER_NAMES))
        if logprobs is None:
            fields.skip(("top_logprobs",))  # of log-probs that the call does not ask for
        return TextCall(
            requests=self._requests(sent, n=n, stream=stream, scores_prompt=echo and logprobs is not None),
            n=n,
            stream=stream,
            include_usage=options.read("include_usage", bool) or False,
            echo=echo,
            logprobs=logprobs is not None,
            ignored=fields.unread,
        )

    def _requests(
        self, sent: Mapping[str, object], *, n: int, stream: bool, scores_prompt: bool
    ) -> tuple[EngineRequest, ...]:
        given = {name: value for name, value in sent.items() if name in _SAMPLING_NAMES}
        only_scores = scores_prompt and given.get("max_tokens") == 0
        if only_scores:
            del given["max_tokens"]
        defaults = self._sampling.model_copy(update={"max_tokens": DEFAULT_MAX_TOKENS})
        info = self._engine.info
        of_server = {name: sent[name] for name in SERVER_NAMES if name in sent}
        sampling = engine_parameters(read_sampling(given, defaults, vocab_size=info.vocab_size), of_server)
        sampling.n = n
        if only_scores:
            sampling.max_new_tokens = 0
        prompt = sent.get("prompt")
        if prompt is None:
            raise CallRefused("prompt is missing: send text, token ids, or a list of either")
        is_text = isinstance(prompt, str) or (isinstance(prompt, list) and isinstance((*prompt, "")[0], str))
        asked = {"text" if is_text else "input_ids": prompt, "stream": stream, "return_logprob": True}
        if scores_prompt:
            asked["logprob_start_len"] = 0
        try:
            converted = msgspec.convert(asked, GenerateBody)
        except msgspec.ValidationError as error:
            raise CallRefused(f"prompt must be text, token ids, or a list of either: {error}") from None
        requests = plan_generate(converted, sampling, info, self._engine.encode).requests
        return tuple(_seeded(request, index % n) for index, request in enumerate(requests))

    async def complete(self, call: TextCall) -> Json:
        """Return the completion of a call.

        Cancellation: aborts every request.
        """
        wakeup = Wakeup()
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
        return {**self._header(), "choices": choices, "usage": _usage(call, results)}

    async def stream(self, call: TextCall) -> AsyncGenerator[bytes]:
        """Yield the frames of a completion, those of several choices as they come.

        Cancellation: aborts every request.
        """
        wakeup, header = Wakeup(), self._header()
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
                        yield frame({**header, "choices": [piece]})
            results = [_finished(sink) for sink in sinks]
        if call.include_usage:
            yield frame({**header, "choices": [], "usage": _usage(call, results)})
        yield DONE

    def _header(self) -> Json:
        made = int(time.time())
        return {"id": f"cmpl-{uuid4().hex}", "object": "text_completion", "created": made, "model": self._model}

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


def _choice(index: int, text: str, logprobs: Json | None, progress: RequestProgress) -> Json:
    finish = None if progress.finish is None else progress.finish.kind
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _usage(call: TextCall, results: Sequence[RequestProgress]) -> Mapping[str, int]:
    prompt = sum(len(progress.request.input_ids) for progress in results[:: call.n])
    sampled = sum(len(progress.output_ids) for progress in results)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
