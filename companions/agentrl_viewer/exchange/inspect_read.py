"""Logs of Inspect (`inspect eval`), in JSON or as `.eval` archives: each sample is an episode.

An assistant message that the model generated is a turn, and what stands before it its messages. The first score is the final
reward: a number, or `C`, `P` and `I` as 1, 0.5 and 0. A sample that an error ended is a failed episode. Written to the log
format 2 of inspect-ai 0.3.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from agentrl.errors import ConfigError
from agentrl_viewer.exchange.atif_messages import WireMessage
from agentrl_viewer.exchange.foreign_record import EpisodeRecord, ReadEpisode, foreign_record

INSPECT_MARKS: Final = (b'"eval"', b'"plan"', b'"status"')
"""What a JSON log of Inspect holds; an archive has a file of the same fields."""
_GRADES: Final = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_ATTACHMENT: Final = "attachment://"


class InspectCall(msgspec.Struct):
    """A tool call."""

    id: str
    function: str
    arguments: dict[str, Any] = {}


class InspectMessage(msgspec.Struct):
    """A message of a sample."""

    role: str
    content: str | list[dict[str, Any]] = ""
    source: str | None = None
    tool_calls: list[InspectCall] | None = None
    tool_call_id: str | list[str] | None = None
    error: dict[str, Any] | None = None


class InspectScore(msgspec.Struct):
    """What a scorer said."""

    value: Any = None


class InspectSample(msgspec.Struct):
    """One sample of a log."""

    id: int | str
    epoch: int
    messages: list[InspectMessage] = []
    target: str | list[str] = ""
    metadata: dict[str, Any] = {}
    scores: dict[str, InspectScore] | None = None
    error: dict[str, Any] | None = None
    total_time: float | None = None
    attachments: dict[str, str] = {}


class InspectSpec(msgspec.Struct):
    """What was evaluated."""

    task: str
    model: str


class InspectLog(msgspec.Struct):
    """A log; an archive has its samples in files of their own."""

    eval: InspectSpec
    samples: list[InspectSample] | None = None


def read_inspect(file: Path) -> Iterator[ReadEpisode]:
    """Yield the episodes of a log; raises ConfigError where it is damaged."""
    try:
        if not zipfile.is_zipfile(file):
            log = msgspec.json.decode(file.read_bytes(), type=InspectLog)
            yield from (_episode(sample, log.eval) for sample in log.samples or ())
            return
        with zipfile.ZipFile(file) as archive:
            spec = msgspec.json.decode(archive.read("header.json"), type=InspectLog).eval
            for name in sorted(name for name in archive.namelist() if name.startswith("samples/")):
                yield _episode(msgspec.json.decode(archive.read(name), type=InspectSample), spec)
    except (msgspec.DecodeError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{file} is no finished log of Inspect: {error}") from error
    except NotImplementedError as error:
        raise ConfigError(f"{file}: {error}; write it as JSON with `inspect log convert --to json`") from error


def _episode(sample: InspectSample, spec: InspectSpec) -> ReadEpisode:
    turns: list[EpisodeRecord] = []
    pending: list[WireMessage] = []
    for each in sample.messages:
        message = _sample_message(each, sample.attachments)
        if each.role != "assistant" or each.source == "input":
            pending.append(message)
            continue
        at = len(turns)
        turns.append(
            {
                "sent_after": at,
                "sent_at": at,
                "parent": at - 1 if at else None,
                "stop_reason": "stop",
                "messages": pending,
                "message": message,
                "context_ids": [],
                "output_ids": [],
                "output_logprobs": [],
                "spans": [],
            }
        )
        pending = []
    closing = {len(turns) - 1: pending} if turns and pending else {}
    return ReadEpisode(_sample_record(sample, spec, turns), closing)


def _sample_record(sample: InspectSample, spec: InspectSpec, turns: Sequence[EpisodeRecord]) -> EpisodeRecord:
    scores = {name: _reward(score.value) for name, score in (sample.scores or {}).items()}
    known = {name: value for name, value in scores.items() if value is not None}
    message = sample.error
    failure = message and {"kind": "InspectError", **{name: str(message.get(name, "")) for name in ("message", "traceback")}}
    return foreign_record(
        f"{spec.task}.{sample.id}.{sample.epoch}",
        str(sample.id),
        task={"target": sample.target, "metadata": sample.metadata, "eval": spec.task, "model": spec.model},
        turns=turns,
        reward=None if failure else next(iter(known.values()), None),
        metrics=known,
        seconds=sample.total_time,
        failure=failure or None,
    )


def _reward(value: object) -> float | None:
    if isinstance(value, str):
        return _GRADES.get(value)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _sample_message(found: InspectMessage, attachments: Mapping[str, str]) -> WireMessage:
    parts = [found.content] if isinstance(found.content, str) else [_sample_part(part) for part in found.content]
    text = "\n".join(_attached(part, attachments) for part in parts if part)
    message: WireMessage = {"role": found.role, "content": text}
    if found.role == "assistant":
        thoughts = [] if isinstance(found.content, str) else [str(part.get("reasoning", "")) for part in found.content]
        if reasoning := "\n".join(_attached(each, attachments) for each in thoughts if each):
            message["reasoning_content"] = reasoning
        if found.tool_calls:
            message["tool_calls"] = [_sample_call(call, attachments) for call in found.tool_calls]
    if found.role == "tool":
        message["tool_call_id"] = found.tool_call_id
        if found.error:
            message["content"] = text or f"Error: {found.error.get('message', '')}"
    return message


def _sample_part(part: Mapping[str, Any]) -> str:
    kind = part.get("type", "part")
    return "" if kind == "reasoning" else str(part["text"]) if "text" in part else f"[{kind}]"


def _sample_call(call: InspectCall, attachments: Mapping[str, str]) -> WireMessage:
    given = {
        name: _attached(value, attachments) if isinstance(value, str) else value for name, value in call.arguments.items()
    }
    arguments = json.dumps(given, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.function, "arguments": arguments}}


def _attached(text: str, attachments: Mapping[str, str]) -> str:
    """Return a text with what the log keeps apart because it is long, or there twice."""
    return attachments.get(text.removeprefix(_ATTACHMENT), text) if text.startswith(_ATTACHMENT) else text
