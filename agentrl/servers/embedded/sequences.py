"""A request inside the engine: its parameters, its output, as ids and as text, and its state.

Invariant: an `EngineSequence` is made only of a request that can be served: its ids lie in the vocabulary, prompt and output
fit the context, and its stop strings can be looked for. Text is derived from ids, and never turned back into ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

from agentrl.errors import ConfigError, RequestRejected
from agentrl.servers.embedded.low_rank import ServedAdapter
from agentrl.servers.embedded.spec import read_json
from agentrl.servers.engine import EngineRequest, Finish, RequestProgress, Sink
from agentrl.types import Int32Array

COARSE_STEP: Final = 50
"""SGLang's scheduler passes on the output of an unstreamed request in steps of this many tokens."""


class TextCodec:
    """The tokenizer of a model directory, which may have none."""

    def __init__(self, path: str | Path) -> None:
        directory = Path(path)
        file = directory / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        self.eos_ids: frozenset[int] = frozenset()
        if not file.exists():
            return
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
        settings = directory / "tokenizer_config.json"
        if settings.exists():
            self.eos_ids = self._eos(read_json(settings))

    @property
    def available(self) -> bool:
        """Return whether there is a tokenizer."""
        return self._tokenizer is not None

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without adding special tokens."""
        if self._tokenizer is None:
            raise RequestRejected("this server has no tokenizer: send input_ids instead of text", status=400)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`, or "" without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def _eos(self, settings: Mapping[str, Any]) -> frozenset[int]:
        token = settings.get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token  # pyright: ignore[reportUnknownVariableType]
        if self._tokenizer is None or not isinstance(content, str):
            return frozenset()
        token_id = self._tokenizer.token_to_id(content)
        return frozenset() if token_id is None else frozenset((token_id,))


@dataclass(slots=True, kw_only=True, eq=False)
class EngineSequence:
    """A request inside the engine."""

    request: EngineRequest
    sink: Sink
    progress: RequestProgress
    prompt: Int32Array
    seed: int
    stop_ids: frozenset[int]
    """Stop tokens of the request alone."""
    held_ids: tuple[int, ...]
    """Tokens that may not be sampled before the minimum length."""
    window: int
    """Output tokens that may hold a new stop string; 0 without stop strings."""
    penalized: bool
    adapter: ServedAdapter | None = None
    row: int = -1
    """Cache row; -1 while waiting."""
    marked: int = -1
    """Number of version changes when the last token was recorded; -1 before the first token."""
    scored: int = 0
    """Position in the prompt up to which log-probs have been reported."""
    admitted: bool = False
    parked: bool = False
    """It arrived during the current pause."""
    deaf: bool = False
    """Aborts by its id are ignored, because of `SGLangFault.LOST_ABORTS`."""

    @property
    def cache_key(self) -> tuple[str, str]:
        """Return the key of the prefixes that it may share: an adapter that is loaded again has others."""
        key, salt = self.request.cache_key
        return (key, salt) if self.adapter is None else (key, f"{salt}\0lora {self.adapter.serial}")

    def all_ids(self) -> Int32Array:
        """Return prompt and output so far, [n] int32."""
        output = self.progress.output_ids
        return np.concatenate((self.prompt, np.array(output, np.int32))) if output else self.prompt

    @property
    def scoring_from(self) -> int:
        """Return the first prompt position whose log-prob is still to be reported, or the prompt's length if none is."""
        start = self.request.logprob_start_len
        if start < 0 or self.scored >= len(self.prompt):
            return len(self.prompt)
        return start

    def forget_scores(self) -> None:
        """Restart the scoring of the prompt if a retraction interrupted it."""
        if self.scored < len(self.prompt) and self.progress.input_logprobs is not None:
            self.progress.input_logprobs = [None]
            self.scored = self.request.logprob_start_len + 1

    def drop_last(self) -> None:
        """Remove the last sampled token."""
        progress = self.progress
        progress.output_ids.pop()
        progress.output_logprobs.pop()
        if progress.versions and progress.versions[-1][1] == len(progress.output_ids):
            progress.versions.pop()

    def round_down(self) -> None:
        """Drop the output after the last full `COARSE_STEP`, as SGLang does for unstreamed requests."""
        progress, end = self.progress, len(self.progress.output_ids) // COARSE_STEP * COARSE_STEP
        del progress.output_ids[end:], progress.output_logprobs[end:]
        progress.versions[:] = [mark for mark in progress.versions if mark[1] < end]


def make_sequence(
    request: EngineRequest,
    sink: Sink,
    *,
    vocab_size: int,
    max_context: int,
    codec: TextCodec,
    eos_ids: frozenset[int],
    seed: int,
    adapter: ServedAdapter | None = None,
) -> EngineSequence:
    """Return the sequence of a request."""
    sampling, prompt = request.sampling, np.array(request.input_ids, np.int32)
    if not len(prompt) or int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        raise RequestRejected(f"input_ids must be 1 or more ids below {vocab_size}", status=400)
    if len(prompt) + sampling.max_new_tokens > max_context:
        raise RequestRejected(
            f"{len(prompt)} prompt tokens and {sampling.max_new_tokens} to sample exceed the context of {max_context}",
            status=400,
        )
    if sampling.stop and not codec.available:
        raise RequestRejected("this server has no tokenizer: use stop_token_ids instead of stop strings", status=400)
    start = request.logprob_start_len
    held = eos_ids | frozenset(sampling.stop_token_ids) if sampling.min_new_tokens else ()
    return EngineSequence(
        request=request,
        sink=sink,
        progress=RequestProgress(request=request, input_logprobs=[None] if 0 <= start < len(prompt) else None),
        prompt=prompt,
        seed=seed,
        adapter=adapter,
        stop_ids=frozenset() if sampling.ignore_eos else frozenset(sampling.stop_token_ids),
        held_ids=tuple(token for token in held if 0 <= token < vocab_size),
        window=max((len(stop.encode()) for stop in sampling.stop), default=-1) + 1,
        penalized=bool(sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1),
        scored=max(start, 0) + 1,
    )


def ending(sequence: EngineSequence, token: int, *, is_eos: bool, codec: TextCodec) -> Finish | None:
    """Return the reason if a sequence ends with its last token, else None; a stop string wins over a stop token."""
    output, sampling = sequence.progress.output_ids, sequence.request.sampling
    if sequence.window:
        tail = codec.decode(output[-sequence.window :], skip_special_tokens=False)
        match = next((stop for stop in sampling.stop if stop in tail), None)
        if match is not None:
            return Finish(kind="stop", matched=match)
    if is_eos or token in sequence.stop_ids:
        return Finish(kind="stop", matched=token)
    if len(output) >= sampling.max_new_tokens:
        return Finish(kind="length")
    return None
