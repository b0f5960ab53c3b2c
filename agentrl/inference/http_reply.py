"""What `/generate` answers: SGLang's `meta_info`, its finish reasons, and text cut where a stop matched.

Invariant: as many log-probs and version labels as output ids; spans appear once a request has finished, and cover its
ids. Pure, no I/O.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.inference.engine import Finish, Progress

_UNDECODED = "\ufffd"
Decode = Callable[[Sequence[int]], str]


def reply(
    progress: Progress,
    decode: Decode,
    *,
    logprobs: bool,
    prompt_ids: bool,
    weight_version: str,
    seconds: float,
    stamped: bool = True,
) -> dict[str, Any]:
    """Return the JSON object for what a request has produced so far.

    Args:
        progress: the request's state.
        decode: turns output ids into text.
        logprobs: report log-probs.
        prompt_ids: report the prompt.
        weight_version: the server's, for a request without output.
        seconds: since the call began.
        stamped: say when the object was sent, as the first of a call does.
    """
    ids = progress.output_ids
    meta = _meta(progress, weight_version)
    if logprobs:
        meta["input_token_logprobs"] = _input_logprobs(progress)
        meta["output_token_logprobs"] = [
            (logprob, token, None) for logprob, token in zip(progress.output_logprobs, ids, strict=True)
        ]
        meta["output_token_logprobs_length"] = len(ids)
    if progress.finish is not None:
        meta["weight_versions"] = version_spans(progress, weight_version)
        meta["e2e_latency"] = seconds
    if stamped:
        meta["response_sent_to_client_ts"] = time.time()
    out: dict[str, Any] = {"text": text_of(progress, decode), "output_ids": ids, "meta_info": meta}
    if prompt_ids:
        out["prompt_token_ids"] = list(progress.request.input_ids)
    return out


def _meta(progress: Progress, weight_version: str) -> dict[str, Any]:
    """Return what is said of every request; of one aborted in the queue, SGLang's short form."""
    request, finish, cached = progress.request, progress.finish, progress.cached_tokens
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": None if finish is None else _finish_reason(finish, len(progress.output_ids)),
        "weight_version": progress.versions[-1][0] if progress.versions else weight_version,
        "completion_tokens": len(progress.output_ids),
    }
    if finish is not None and finish.reduced:
        return meta
    return meta | {
        "prompt_tokens": len(request.input_ids),
        "cached_tokens": cached,
        "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
        "reasoning_tokens": 0,
        "num_retractions": progress.num_retractions,
        "dp_rank": None,
    }


def version_spans(progress: Progress, weight_version: str) -> list[dict[str, Any]]:
    """Return half-open `{version, start, end}` spans over the output ids; one empty span where there are none."""
    spans: list[dict[str, Any]] = []
    end = len(progress.output_ids)
    if not end:
        return [{"version": weight_version, "start": 0, "end": 0}]
    for version, start in reversed(progress.versions):
        if end > start:
            spans.append({"version": version, "start": start, "end": end})
        end = start
    return spans[::-1]


def text_of(progress: Progress, decode: Decode) -> str:
    """Return the output as text: without the stop that ended it, and, before the end, without half a character."""
    finish, ids = progress.finish, progress.output_ids
    if finish is None:
        return decode(ids).rstrip(_UNDECODED)
    keep = progress.request.sampling.no_stop_trim
    if finish.kind != "stop":
        return decode(ids)
    if isinstance(finish.matched, str):
        text = decode(ids)
        at = text.find(finish.matched)
        return text if at < 0 else text[: at + len(finish.matched) if keep else at]
    return decode(ids if keep else ids[:-1])


def _input_logprobs(progress: Progress) -> list[tuple[float | None, int, None]]:
    values = progress.input_logprobs
    if values is None:
        return []
    start = progress.request.logprob_start_len
    ids = progress.request.input_ids[start : start + len(values)]
    return [(value, token, None) for value, token in zip(values, ids, strict=True)]


def _finish_reason(finish: Finish, length: int) -> dict[str, Any]:
    if finish.kind == "length":
        return {"type": "length", "length": length}
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.reduced:
        return {"type": "abort", "message": finish.message}
    return {"type": "abort", "message": finish.message, "status_code": None, "err_type": None}
