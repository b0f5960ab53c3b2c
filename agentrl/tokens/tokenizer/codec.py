"""Encoding: control tokens come from the template only; text of the conversation never yields one.

The vocabulary is split in two. *Control tokens* are the added tokens that steer a model: everything registered as special,
and everything that is, or contains, a marker such as `<tool_call>`, `<|im_end|>` or `[INST]`. Other added tokens (numbers,
runs of spaces, frequent phrases) are ordinary vocabulary that text may use.

A *twin* of the tokenizer knows control tokens not at all, or only under secret names. Rendered text is cut at the control
tokens the template wrote, and what stands between them is encoded by the twin. Where cutting would change ids (a tokenizer
that marks the start of a text, or strips spaces around tokens), the twin encodes the whole, with secret names in the places
of the control tokens. So honest text gets exactly the ids of the plain tokenizer, and content gets no control id.

Invariant: `encode_content` never returns an id of `control_ids`; `encode_rendered` returns as many as there are control
tokens outside of content (see `agentrl.tokens.template.guard`).

Decoding a streamed output piece by piece.

Invariant: what `push` and `flush` return, joined, is the decoded text of all ids pushed, and no piece ends inside a
character, nor where a later id may still change it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import cast

from tokenizers import Tokenizer

from agentrl.errors import ConfigError, TokenError
from agentrl.tokens.tokenizer.bytelevel import ByteDecoder, word_encoder
from agentrl.types import Int32Array

_MARKER = re.compile(r"<[^<>\s][^<>\n]*>|\[/?[A-Z_][A-Z_0-9 ]+\]|<\||\|>|<｜|｜>")
_MARK_OPEN, _MARK_CLOSE = "\ufdd0", "\ufdd1"


class TokenCodec:
    """A tokenizer and its twin; immutable, safe to share between episodes and threads."""

    def __init__(self, tokenizer_json: str, *, eos_ids: Iterable[int] = (), where: str = "tokenizer.json") -> None:
        """Build both tokenizers.

        Args:
            tokenizer_json: the content of a `tokenizer.json`.
            eos_ids: ids that end a sequence; control tokens, however they are registered.
            where: names the file in messages.

        Raises:
            ConfigError: if it is not a tokenizer, or a twin with the same ids cannot be made.
        """
        data = _load(tokenizer_json, where)
        self._full = _tokenizer(tokenizer_json, where)
        self.control = _control_tokens(data, frozenset(eos_ids), self._full)
        """Control token texts and their ids."""
        self._mark_prefix = _MARK_OPEN + _private(str(10**15 + secrets.randbelow(9 * 10**15)))
        self._marks = {text: f"{self._mark_prefix}{_private(str(at))}{_MARK_CLOSE}" for at, text in enumerate(self.control)}
        twin = _renamed(data, self._marks)
        self.separable: bool = _separable(data)
        """Whether text between control tokens gets the same ids alone as within the whole."""
        self._bare = self.separable and len(self.control) == len(cast("list[object]", twin["added_tokens"]))
        """Whether the twin has no added tokens: all of them are control tokens, which it does not meet. It is the faster."""
        twin = {**twin, "added_tokens": []} if self._bare else twin
        self._twin = _tokenizer(json.dumps(twin, ensure_ascii=False), where)
        self._check_twin(where)
        self._words = word_encoder(twin, self._twin) if self._bare else None
        self.cuts_lines: bool = self._words is not None
        """Whether text that begins with a visible ASCII character has the same ids after a line's end as alone."""
        self.control_pattern = re.compile("|".join(map(re.escape, sorted(self.control, key=len, reverse=True))) or "(?!)")
        """Matches any control token text, the longest first."""
        self._splitter = re.compile(f"({self.control_pattern.pattern})")
        unknown = _unknown_token(data)
        unknown_id = self._full.token_to_id(unknown) if unknown is not None else None
        self.control_ids = frozenset(self.control.values()) - ({unknown_id} - frozenset(eos_ids))
        """Ids no text can yield. The model's own stand-in for unknown characters, if it has one, is not among them."""
        self.size: int = max(self._full.get_vocab().values(), default=-1) + 1
        """One more than the largest id."""
        self._anchor = "" if self.separable else self._find_anchor()
        level = isinstance(decoder := data.get("decoder"), dict) and decoder.get("type") == "ByteLevel"
        whole: Callable[[Sequence[int]], str] = partial(self._full.decode, skip_special_tokens=False)
        self.text_of = ByteDecoder(self._full.id_to_token).decode if level else whole
        """Returns the text of ids, special tokens included; invalid UTF-8 becomes U+FFFD."""

    def _check_twin(self, where: str) -> None:
        vocabulary, twin = self._full.get_vocab(), self._twin.get_vocab()
        expected = {self._marks.get(text, text): number for text, number in vocabulary.items()}
        if self._bare:
            expected = {text: number for text, number in expected.items() if text in twin or not text.startswith(_MARK_OPEN)}
        if twin != expected:
            wrong = sorted(text for text in expected.keys() | twin.keys() if expected.get(text) != twin.get(text))
            raise ConfigError(
                f"{where}: cannot separate control tokens from text: {len(wrong)} ids change, such as {wrong[:3]}; "
                "added tokens must be listed in order of id"
            )
        for text, mark in self._marks.items() if not self.separable else ():
            if self._twin.encode(mark, add_special_tokens=False).ids != [self.control[text]]:
                raise ConfigError(f"{where}: control token {text!r} is not matched as a whole; its flags are not supported")

    def _find_anchor(self) -> str:
        """Return a token to encode before text that follows other text, for tokenizers that mark the start of a text."""
        for text, mark in self._marks.items():
            after = self._twin.encode(mark + "a", add_special_tokens=False).ids
            if after[0] == self.control[text] and after[1:] != self._twin.encode("a", add_special_tokens=False).ids:
                return mark
        return ""

    def token_id(self, text: str) -> int | None:
        """Return the id of a token by its text; None if there is none."""
        return self._full.token_to_id(text)

    def token_text(self, number: int) -> str | None:
        """Return the text of a token by its id; None if there is none."""
        return self._full.id_to_token(number)

    def encode_content(self, text: str) -> list[int]:
        """Return the ids of text as content: no control token, whatever it says.

        Raises:
            TokenError: if it is not valid Unicode text.
        """
        if self._words is not None and text.isascii():  # so it holds no secret name
            return self._words.encode(text)
        return self._encode(text)

    def encode_rendered(self, text: str, *, nonce: str = "", inside: bool = False) -> list[int]:
        """Return the ids of a template's output, in which every control token text counts as a control token.

        Args:
            text: the rendered text.
            nonce: removed from the text after control tokens have been recognised; `ContentGuard` breaks the control
                tokens in content with it.
            inside: the text follows other text, as opposed to standing at the start of a prompt.

        Raises:
            TokenError: if it is not valid Unicode text.
        """
        if not self.separable:
            return self._encode_whole(text, nonce=nonce, inside=inside)
        ids: list[int] = []
        for at, piece in enumerate(self.split(text)):
            if at & 1:
                ids.append(self.control[piece])
            elif piece:
                ids += self._encode(piece.replace(nonce, "") if nonce else piece)
        return ids

    def split(self, text: str) -> list[str]:
        """Return text cut at control tokens: what stands between them and, at odd places, the tokens."""
        return self._splitter.split(text)

    def _encode_whole(self, text: str, *, nonce: str, inside: bool) -> list[int]:
        marks = self._marks
        if self._mark_prefix in text:
            raise TokenError("text contains the secret name of a control token; this cannot happen by chance")
        marked = self.control_pattern.sub(lambda match: marks[match.group()], text)
        marked = marked.replace(nonce, "") if nonce else marked
        if inside and self._anchor:
            return self._encode(self._anchor + marked, checked=True)[1:]
        return self._encode(marked, checked=True)

    def _encode(self, text: str, *, checked: bool = False) -> list[int]:
        if not checked and self._mark_prefix in text:
            raise TokenError("text contains the secret name of a control token; this cannot happen by chance")
        try:
            if self._words is not None:
                return self._words.encode(text)
            return self._twin.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise TokenError(f"text cannot be encoded: {error}; remove lone surrogates before sending it") from error

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD."""
        return self._full.decode(ids, skip_special_tokens=True) if skip_special else self.text_of(ids)


def _load(tokenizer_json: str, where: str) -> dict[str, object]:
    try:
        data: object = json.loads(tokenizer_json)
    except ValueError as error:
        raise ConfigError(f"{where}: expected JSON: {error}") from error
    if not isinstance(data, dict) or "model" not in data:
        raise ConfigError(f"{where}: expected the JSON of a fast tokenizer with a 'model'")
    return cast("dict[str, object]", data)


def _tokenizer(text: str, where: str) -> Tokenizer:
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


def _private(digits: str) -> str:
    """Return digits as private-use characters, which no ordinary added token holds."""
    return "".join([chr(0xE000 + int(digit)) for digit in digits])


def _separable(data: Mapping[str, object]) -> bool:
    """Return whether no step of the tokenizer looks over a control token; False if in doubt."""
    added = [cast("dict[str, object]", token) for token in cast("list[object]", data.get("added_tokens") or [])]
    if any(token.get(flag) for token in added for flag in ("lstrip", "rstrip", "single_word")):
        return False
    steps = [*_steps(data.get("normalizer"), "normalizers"), *_steps(data.get("pre_tokenizer"), "pretokenizers")]
    return all(
        step.get("type") in ("NFC", "NFD", "NFKC", "NFKD", "Split", "Digits")
        or (step.get("type") == "ByteLevel" and not step.get("add_prefix_space"))
        for step in steps
    )


def _steps(step: object, parts: str) -> list[dict[str, object]]:
    if not isinstance(step, dict):
        return []
    fields = cast("dict[str, object]", step)
    if fields.get("type") != "Sequence":
        return [fields]
    return [inner for part in cast("list[object]", fields.get(parts) or []) for inner in _steps(part, parts)]


def _unknown_token(data: Mapping[str, object]) -> str | None:
    model = cast("dict[str, object]", data["model"])
    unknown = model.get("unk_token")
    if isinstance(unknown, str):
        return unknown
    number = model.get("unk_id")
    if isinstance(number, int) and isinstance(model.get("vocab"), list):
        return str(cast("list[list[object]]", model["vocab"])[number][0])
    return None


def _renamed(data: Mapping[str, object], marks: Mapping[str, str]) -> dict[str, object]:
    """Return the tokenizer with every control token known by its secret name only, ids unchanged.

    Ids of added tokens follow from their order and from the model's vocabulary, so tokens are renamed in place, not removed.
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


class IncrementalDecoder:
    """Turns a stream of ids into text, holding back bytes that are not yet a whole character.

    Tokenizers with byte fallback decode a run of byte tokens (`<0xE2>`) as a whole: one wrong byte makes each byte of the
    run a U+FFFD. Their bytes are held back until the run is over.

    Example: three `push` calls with the three bytes of "€" return "", "" and "€".
    """

    __slots__ = ("_codec", "_ids", "_shown", "_start")

    def __init__(self, codec: TokenCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._start = 0
        self._shown = 0

    def push(self, ids: Sequence[int] | Int32Array) -> str:
        """Return the text that `ids` complete; it may be empty."""
        # Ids without a token are no part of the text, so a run goes on across them.
        self._ids += [number for number in map(int, ids) if self._codec.token_text(number) is not None]
        in_run = self._ids and str(self._codec.token_text(self._ids[-1])).startswith("<0x")
        return "" if in_run else self._advance(final=False)

    def flush(self) -> str:
        """Return what was held back; an unfinished character becomes U+FFFD."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        known = self._codec.decode(self._ids[self._start : self._shown], skip_special=False)
        text = self._codec.decode(self._ids[self._start :], skip_special=False)
        if len(text) <= len(known) or (text.endswith("�") and not final):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text[len(known) :]
