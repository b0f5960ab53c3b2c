"""The twin of a tokenizer: the same vocabulary, in which no text yields a control token.

*Control tokens* are the added tokens that steer a model: each one registered as special, and each one that is, or contains,
a marker such as `<tool_call>`, `<|im_end|>` or `[INST]`. Other added tokens (numbers, runs of spaces, frequent phrases) are
ordinary vocabulary that text may use.

The twin knows control tokens by secret names only. Where all added tokens are control tokens and no step of the tokenizer
looks across them, the twin has no added tokens at all, which makes it faster.

Invariant: the twin has the ids of the tokenizer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from tokenizers import Tokenizer

from agentrl.errors import ConfigError

_MARKER = re.compile(r"<[^<>\s][^<>\n]*>|\[/?[A-Z_][A-Z_0-9 ]+\]|<\||\|>|<｜|｜>")
_MARK_OPEN, _MARK_CLOSE = "\ufdd0", "\ufdd1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinTokenizers:
    """A tokenizer and its twin."""

    full: Tokenizer
    twin: Tokenizer
    data: Mapping[str, object]
    """The `tokenizer.json` of the tokenizer."""
    twin_data: Mapping[str, object]
    """The `tokenizer.json` of the twin."""
    control: Mapping[str, int]
    """Control token texts and their ids."""
    marks: Mapping[str, str]
    """The secret names of the control tokens, by text."""
    mark_prefix: str
    """The first characters of each secret name."""
    separable: bool
    """Whether text between control tokens gets the same ids alone as within the whole."""
    bare: bool
    """Whether the twin has no added tokens."""
    unknown_id: int | None
    """The id of the model's stand-in for unknown characters; None if it has none."""


def make_twin(tokenizer_json: str, eos_ids: frozenset[int], where: str) -> TwinTokenizers:
    """Return the tokenizer of a `tokenizer.json` and its twin."""
    data = _load_tokenizer_json(tokenizer_json, where)
    full = _make_tokenizer(tokenizer_json, where)
    control = _control_tokens(data, eos_ids, full)
    mark_prefix = _MARK_OPEN + _private_use(str(10**15 + secrets.randbelow(9 * 10**15)))
    marks = {text: f"{mark_prefix}{_private_use(str(at))}{_MARK_CLOSE}" for at, text in enumerate(control)}
    twin_data = _with_secret_names(data, marks)
    separable = _is_separable(data)
    bare = separable and len(control) == len(cast("list[object]", twin_data["added_tokens"]))
    twin_data = {**twin_data, "added_tokens": []} if bare else twin_data
    unknown = _unknown_token(data)
    tokenizers = TwinTokenizers(
        full=full,
        twin=_make_tokenizer(json.dumps(twin_data, ensure_ascii=False), where),
        data=data,
        twin_data=twin_data,
        control=control,
        marks=marks,
        mark_prefix=mark_prefix,
        separable=separable,
        bare=bare,
        unknown_id=full.token_to_id(unknown) if unknown is not None else None,
    )
    _check_ids(tokenizers, where)
    return tokenizers


def _check_ids(made: TwinTokenizers, where: str) -> None:
    twin = made.twin.get_vocab()
    expected = {made.marks.get(text, text): number for text, number in made.full.get_vocab().items()}
    if made.bare:
        expected = {text: number for text, number in expected.items() if text in twin or not text.startswith(_MARK_OPEN)}
    if twin != expected:
        wrong = sorted(text for text in expected.keys() | twin.keys() if expected.get(text) != twin.get(text))
        raise ConfigError(
            f"{where}: cannot separate control tokens from text: {len(wrong)} ids change, such as {wrong[:3]}; "
            "added tokens must be listed in order of id"
        )
    for text in made.control:
        if len(text) == 1 and not made.twin.encode(text, add_special_tokens=False).ids:
            raise ConfigError(
                f"{where}: special token {text!r} is the only token for that character, so content could not hold it; "
                "register it as an ordinary token"
            )
    for text, mark in made.marks.items() if not made.separable else ():
        if made.twin.encode(mark, add_special_tokens=False).ids != [made.control[text]]:
            raise ConfigError(f"{where}: control token {text!r} is not matched as a whole; its flags are not supported")


def _load_tokenizer_json(tokenizer_json: str, where: str) -> dict[str, object]:
    try:
        data: object = json.loads(tokenizer_json)
    except ValueError as error:
        raise ConfigError(f"{where}: expected JSON: {error}") from error
    if not isinstance(data, dict) or "model" not in data:
        raise ConfigError(f"{where}: expected the JSON of a fast tokenizer with a 'model'")
    return cast("dict[str, object]", data)


def _make_tokenizer(text: str, where: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:
        raise ConfigError(f"{where}: not a tokenizer this version of `tokenizers` can read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _control_tokens(data: Mapping[str, object], eos_ids: frozenset[int], tokenizer: Tokenizer) -> dict[str, int]:
    added = [cast("dict[str, object]", token) for token in cast("list[object]", data.get("added_tokens") or [])]
    control: dict[str, int] = {}
    for token in added:
        text = str(token["content"])
        number = tokenizer.token_to_id(text)
        if number is not None and text and (token.get("special") or number in eos_ids or _MARKER.search(text)):
            control[text] = number
    while True:
        more = {
            text: number
            for token in added
            if (text := str(token["content"])) not in control
            and (number := tokenizer.token_to_id(text)) is not None
            and any(part in text for part in control)
        }
        if not more:
            return control
        control |= more


def _private_use(digits: str) -> str:
    """Return digits as private-use characters, which no ordinary added token holds."""
    return "".join([chr(0xE000 + int(digit)) for digit in digits])


def _is_separable(data: Mapping[str, object]) -> bool:
    """Return whether no step of the tokenizer looks over a control token; False if in doubt."""
    added = [cast("dict[str, object]", token) for token in cast("list[object]", data.get("added_tokens") or [])]
    if any(token.get(flag) for token in added for flag in ("lstrip", "rstrip", "single_word")):
        return False
    steps = [*_steps_of(data.get("normalizer"), "normalizers"), *_steps_of(data.get("pre_tokenizer"), "pretokenizers")]
    return all(
        step.get("type") in ("NFC", "NFD", "NFKC", "NFKD", "Split", "Digits")
        or (step.get("type") == "ByteLevel" and not step.get("add_prefix_space"))
        for step in steps
    )


COMPOSITION = 4
"""The most characters that NFC and NFKC compose into one."""


def longest_token(data: Mapping[str, object], texts: Iterable[str]) -> int | None:
    """Return the most characters of ASCII text for which a tokenizer can write one token, a lower bound of other text's.

    None where steps of the tokenizer drop text, or join unknown characters, so that there is no such number.
    """
    steps = [*_steps_of(data.get("normalizer"), "normalizers"), *_steps_of(data.get("pre_tokenizer"), "pretokenizers")]
    lossless = {"NFC", "NFD", "NFKC", "NFKD", "Prepend", "Split", "Digits", "ByteLevel", "Metaspace"}
    model = cast("dict[str, object]", data["model"])
    byte_level = any(step.get("type") == "ByteLevel" for step in steps) or bool(model.get("byte_fallback"))
    for step in steps:
        pattern = cast("dict[str, str]", step["pattern"]) if step.get("type") == "Replace" else {}
        keeps = step.get("type") in lossless or len(pattern.get("String", "")) == len(str(step.get("content"))) > 0
        if not keeps or step.get("behavior") == "Removed":
            return None
    if not byte_level:
        return None
    return max(map(len, texts), default=1)


def _steps_of(step: object, parts: str) -> list[dict[str, object]]:
    if not isinstance(step, dict):
        return []
    fields = cast("dict[str, object]", step)
    if fields.get("type") != "Sequence":
        return [fields]
    return [inner for part in cast("list[object]", fields.get(parts) or []) for inner in _steps_of(part, parts)]


def _unknown_token(data: Mapping[str, object]) -> str | None:
    model = cast("dict[str, object]", data["model"])
    unknown = model.get("unk_token")
    if isinstance(unknown, str):
        return unknown
    number = model.get("unk_id")
    if isinstance(number, int) and isinstance(model.get("vocab"), list):
        return str(cast("list[list[object]]", model["vocab"])[number][0])
    return None


def _with_secret_names(data: Mapping[str, object], marks: Mapping[str, str]) -> dict[str, object]:
    """Return the tokenizer with its control tokens renamed to their secret names, ids unchanged.

    The order of added tokens and the model's vocabulary determine their ids, so tokens are renamed in place, not removed.
    """
    added = [cast("dict[str, object]", token) for token in cast("list[object]", data.get("added_tokens") or [])]
    renamed = [{**token, "content": marks.get(str(token["content"]), token["content"])} for token in added]
    model = dict(cast("dict[str, object]", data["model"]))
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        names = cast("dict[str, int]", vocabulary)
        model["vocab"] = {marks.get(text, text): number for text, number in names.items()}
    elif isinstance(vocabulary, list):
        entries = cast("list[list[object]]", vocabulary)
        model["vocab"] = [[marks.get(str(entry[0]), entry[0]), *entry[1:]] for entry in entries]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = marks.get(str(model["unk_token"]), model["unk_token"])
    if isinstance(model.get("merges"), list):
        model["merges"] = [merge for merge in cast("list[object]", model["merges"]) if not _makes_control(merge, marks)]
    return {**data, "added_tokens": renamed, "model": model, "post_processor": None, "truncation": None, "padding": None}


def _makes_control(merge: object, marks: Mapping[str, str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else cast("list[str]", merge)
    return left in marks or right in marks or left + right in marks
