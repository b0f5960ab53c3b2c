"""Search the texts of the recorded episodes, newest first.

Invariant: an episode matches where one of its messages, or its task, contains the text, whatever the case; names of fields
and numbers of its record do not match.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import orjson

from agentrl.episode.summary import EpisodeSummary
from agentrl.observe.runs.reading import read_index, read_record_lines
from agentrl.types import JsonValue

MAX_MATCHES: Final = 2000


class TurnTexts(msgspec.Struct, frozen=True):
    """The messages of one turn."""

    message: Any = None
    messages: Any = None
    closing: Any = None
    """Of a file of another program: what followed the last answer."""


class EpisodeTexts(msgspec.Struct, frozen=True):
    """What of a record is searched."""

    task: Any = None
    turns: list[TurnTexts] = []


def search_texts(
    run_dir: Path, text: str, limit: int = MAX_MATCHES, *, may_go_on: Callable[[], bool] = lambda: True
) -> Generator[dict[str, JsonValue]]:
    """Yield the ids that match, file by file: `matches`, `files_read`, `files`, `is_complete`, `is_cut`.

    A search that finds more than `limit` episodes ends with `is_cut`; else the last answer has `is_complete`.

    Args:
        run_dir: directory of a run.
        text: to look for.
        limit: of the matches.
        may_go_on: asked before each record; it may wait, and False ends the search without a further answer.
    """
    by_file: dict[str, list[EpisodeSummary]] = {}
    for summary in read_index(run_dir):
        by_file.setdefault(summary.file, []).append(summary)
    names = sorted(by_file, reverse=True)
    left = limit
    for number, name in enumerate(names, 1):
        found = list(islice(_matching(run_dir, by_file[name], text, may_go_on), left + 1))
        if not may_go_on():
            return
        matches, is_cut = found[:left], len(found) > left
        left -= len(matches)
        is_complete = number == len(names) and not is_cut
        yield {"matches": matches, "files_read": number, "files": len(names), "is_complete": is_complete, "is_cut": is_cut}
        if is_cut:
            return
    if not names:
        yield {"matches": [], "files_read": 0, "files": 0, "is_complete": True, "is_cut": False}


def _matching(run_dir: Path, summaries: Sequence[EpisodeSummary], text: str, may_go_on: Callable[[], bool]) -> Iterator[str]:
    """Yield the ids of the episodes whose texts contain `text`."""
    wanted = text.casefold()
    written = orjson.dumps(text).decode()[1:-1].casefold()
    decode = msgspec.json.Decoder(EpisodeTexts).decode
    for found in read_record_lines(run_dir, summaries):
        if not may_go_on():
            return
        # Most records do not match, and looking for the text as JSON writes it costs less than decoding them.
        if written not in found.record.decode().casefold():
            continue
        texts = _texts_of(msgspec.to_builtins(decode(found.record)))
        if any(wanted in text_found.casefold() for text_found in texts):
            yield found.summary.episode_id


def _texts_of(value: object) -> Iterator[str]:
    """Yield every string value inside JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in cast("dict[str, object]", value).values():
            yield from _texts_of(item)
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            yield from _texts_of(item)
