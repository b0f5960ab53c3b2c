"""Replies to `/generate` in SGLang's format.

Invariant: a reply has as many log-probs as output ids, and the version spans of a finished request cover its output ids.
Pure, no I/O.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.servers.engine import Finish, RequestProgress

_UNDECODED = "\ufffd"


def reply(
    progress: RequestProgress,
    decode: Callable[[Sequence[int]], str],
    *,
    logprobs: bool,
    prompt_ids: bool,
    weight_version: str,
    seconds: float,
    stamped: bool = True,
) -> dict[str, Any]:
    """Return the JSON object for the output of a request so far, `seconds` after the call began.

    `weight_version`, the server's own, is reported for a request without output. A `stamped` object has the time of sending,
    as the first object of a call does.
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
    out: dict[str, Any] = {"text": output_text(progress, decode), "output_ids": ids, "meta_info": meta}
    if prompt_ids:
        out["prompt_token_ids"] = list(progress.request.input_ids)
    return out


def _meta(progress: RequestProgress, weight_version: str) -> dict[str, Any]:
    """Return the `meta_info` that every request has; for one aborted in the queue, SGLang's short form."""
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


def version_spans(progress: RequestProgress, weight_version: str) -> list[dict[str, Any]]:
    """Return half-open `{version, start, end}` spans over the output ids; without output ids, one empty span."""
    spans: list[dict[str, Any]] = []
    end = len(progress.output_ids)
    if not end:
        return [{"version": weight_version, "start": 0, "end": 0}]
    for version, start in reversed(progress.versions):
        if end > start:
            spans.append({"version": version, "start": start, "end": end})
        end = start
    return spans[::-1]


def output_text(progress: RequestProgress, decode: Callable[[Sequence[int]], str]) -> str:
    """Return the output as text, without the stop that ended it and, before the end, without an incomplete character."""
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


def _input_logprobs(progress: RequestProgress) -> list[tuple[float | None, int, None]]:
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
