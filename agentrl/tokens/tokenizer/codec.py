"""Text to token ids and back: control tokens come from the template only, never from the text of a conversation.

Rendered text is cut at the control tokens that the template wrote, and the twin of the tokenizer
(`agentrl.tokens.tokenizer.twin`) encodes what stands between them. Where cutting would change ids (a tokenizer that marks
the start of a text, or strips spaces around tokens), the twin encodes the whole text, with secret names in place of the
control tokens. So ordinary text gets exactly the ids of the plain tokenizer, and content gets no control id.

A byte-level BPE encodes each piece (about a word) separately. For ASCII text, the cuts of the usual model families need no
Unicode tables, so `WordEncoder` cuts such text itself and remembers the ids of each piece.

Nothing is downloaded: the files of a local model directory are JSON and template text, and a missing or broken one raises a
`ConfigError` that names it.

Invariant: `TokenCodec.encode_content` never returns an id of `control_ids`; `TokenCodec.encode_rendered` returns as many of
them as there are control tokens outside of content (see `agentrl.tokens.template.rendering`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Annotated, TypeVar, cast

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import Model

from agentrl.errors import ConfigError, TokenError
from agentrl.tokens.breaks import restored
from agentrl.tokens.tokenizer.twin import COMPOSITION, longest_token, make_twin
from agentrl.types import Int32Array

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_T = TypeVar("_T")


class _Numbers(msgspec.Struct):
    """The numbers that are read from config.json, from its `text_config`, and from generation_config.json."""

    eos_token_id: _Id | list[_Id] | None = None
    vocab_size: _Count | None = None
    max_position_embeddings: _Count | None = None
    text_config: _Numbers | None = None

    @property
    def eos_ids(self) -> list[int]:
        ids = self.eos_token_id
        return ids if isinstance(ids, list) else [] if ids is None else [ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The tokenizer-side content of a model directory."""

    tokenizer_json: str
    templates: Mapping[str, str]
    """Jinja source by name."""
    special_tokens: Mapping[str, str]
    """The texts of `bos_token`, `eos_token`, ..., those that the tokenizer names."""
    eos_ids: frozenset[int]
    """End-of-sequence ids in generation_config.json and config.json; may be empty."""
    vocab_size: int | None
    """Vocabulary size of the model; None without config.json."""
    max_context: int | None
    """Longest context in tokens; None if config.json has none."""


def read_model_files(path: Path) -> ModelFiles:
    """Return the tokenizer files of a model directory."""
    if not path.is_dir():
        raise ConfigError(f"model directory {path}: expected a local directory with tokenizer.json; it does not exist")
    tokenizer = path / "tokenizer.json"
    if not tokenizer.is_file():
        raise ConfigError(
            f"model directory {path}: tokenizer.json is missing (it has {_listing(path)}); "
            "save the model with a fast tokenizer: tokenizer.save_pretrained(directory)"
        )
    tokenizer_config = _json(path / "tokenizer_config.json", dict[str, object])
    config, generation = (_json(path / name, _Numbers) for name in ("config.json", "generation_config.json"))
    text_config = config.text_config or config
    return ModelFiles(
        tokenizer_json=_text(tokenizer),
        templates=_templates(path, tokenizer_config),
        special_tokens=_special_tokens(_json(path / "special_tokens_map.json", dict[str, object]), tokenizer_config),
        eos_ids=frozenset([*generation.eos_ids, *config.eos_ids, *text_config.eos_ids]),
        vocab_size=text_config.vocab_size or config.vocab_size,
        max_context=text_config.max_position_embeddings or config.max_position_embeddings,
    )


def _templates(path: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    templates: dict[str, str] = {}
    named = tokenizer_config.get("chat_template")
    if isinstance(named, str):
        templates["default"] = named
    elif isinstance(named, list):
        for entry in cast("list[object]", named):
            item = _object(entry)
            if not (isinstance(item.get("name"), str) and isinstance(item.get("template"), str)):
                raise ConfigError(f"{path / 'tokenizer_config.json'}: chat_template: expected name and template")
            templates[str(item["name"])] = str(item["template"])
    for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = _text(extra)
    main = path / "chat_template.jinja"
    if main.is_file():
        templates["default"] = _text(main)
    if "default" not in templates:
        raise ConfigError(
            f"model directory {path}: no chat template: expected chat_template.jinja, or chat_template in "
            f"tokenizer_config.json (found templates: {sorted(templates)}); base models need one to be added"
        )
    return templates


def _special_tokens(*sources: Mapping[str, object]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for source in sources:
        for name in _NAMED_TOKENS:
            value = source.get(name)
            text = value if isinstance(value, str) else _object(value).get("content")
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def _json(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(json.loads(_text(path)) if path.is_file() else {}, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: expected a JSON object with fields of the right kind: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected JSON: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _object(value: object) -> dict[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _listing(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    return ", ".join(names[:8]) or "no files"


class TokenCodec:
    """A tokenizer and its twin; immutable, safe to share between episodes and threads."""

    def __init__(self, tokenizer_json: str, *, eos_ids: Iterable[int] = (), where: str = "tokenizer.json") -> None:
        """Build both tokenizers from the text of a file; `eos_ids` are control tokens, however they are registered."""
        tokenizers = make_twin(tokenizer_json, frozenset(eos_ids), where)
        self._full, self._twin = tokenizers.full, tokenizers.twin
        self._marks, self._mark_prefix = tokenizers.marks, tokenizers.mark_prefix
        self.control: Mapping[str, int] = tokenizers.control
        """Control token texts and their ids."""
        self.separable: bool = tokenizers.separable
        """Whether text between control tokens gets the same ids alone as within the whole."""
        self._words = word_encoder(tokenizers.twin_data, self._twin) if tokenizers.bare else None
        self.control_pattern = re.compile("|".join(map(re.escape, sorted(self.control, key=len, reverse=True))) or "(?!)")
        """Matches any control token text, the longest first."""
        self._splitter = re.compile(f"({self.control_pattern.pattern})")
        self.control_ids = frozenset(self.control.values()) - ({tokenizers.unknown_id} - frozenset(eos_ids))
        """Ids no text can yield. The model's own stand-in for unknown characters, if it has one, is not among them."""
        self.size: int = max(self._full.get_vocab().values(), default=-1) + 1
        """One more than the largest id."""
        self._longest = longest_token(tokenizers.data, self._full.get_vocab())
        self._anchor = "" if self.separable else self._find_anchor()
        level = isinstance(decoder := tokenizers.data.get("decoder"), dict) and decoder.get("type") == "ByteLevel"
        whole: Callable[[Sequence[int]], str] = partial(self._full.decode, skip_special_tokens=False)
        self.text_of = ByteDecoder(self._full.id_to_token).decode if level else whole
        """Returns the text of ids, special tokens included; invalid UTF-8 becomes U+FFFD."""

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

    def min_tokens(self, text: str) -> int:
        """Return a number of tokens that text takes at least, without encoding it; 0 where the tokenizer gives no bound."""
        if self._longest is None:
            return 0
        return len(text) // (self._longest if text.isascii() else COMPOSITION * self._longest)

    def encode_content(self, text: str) -> list[int]:
        """Return the ids of text as content: never a control token."""
        if self._words is not None and text.isascii():  # so it holds no secret name
            return self._words.encode(text)
        return self._encode(text)

    def encode_rendered(self, text: str, *, nonce: str = "", inside: bool = False) -> list[int]:
        """Return the ids of a template's output, in which every control token text counts as a control token.

        The nonce, with which `GuardedTemplate` has broken control tokens in content, is removed. `inside` says that the
        text follows other text, so that it does not start the prompt.
        """
        if not self.separable:
            return self._encode_whole(text, nonce=nonce, inside=inside)
        ids: list[int] = []
        for at, piece in enumerate(self._splitter.split(text)):
            if at & 1:  # a control token
                ids.append(self.control[piece])
            elif piece:
                ids += self._encode(restored(piece, nonce) if nonce else piece)
        return ids

    def _encode_whole(self, text: str, *, nonce: str, inside: bool) -> list[int]:
        marks = self._marks
        if self._mark_prefix in text:
            raise TokenError("text contains the secret name of a control token; this cannot happen by chance")
        marked = self.control_pattern.sub(lambda match: marks[match.group()], text)
        marked = restored(marked, nonce) if nonce else marked
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
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust; it is no `Exception`, and no module exports it
                raise
            raise TokenError(f"the tokenizer cannot encode a text of {len(text)} characters: {error}") from error

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD."""
        return self._full.decode(ids, skip_special_tokens=True) if skip_special else self.text_of(ids)


class IncrementalDecoder:
    """Turns a stream of ids into text and holds back bytes that are not yet a whole character.

    Tokenizers with byte fallback decode a run of byte tokens (`<0xE2>`) as a whole: one wrong byte turns each byte of the
    run into U+FFFD. The decoder holds back such bytes until the run is over.

    Invariant: what `push` and `flush` return, joined, is the decoded text of all pushed ids. No returned piece ends inside
    a character, or where a later id can still change it.

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
        # Ids without a token have no text, so they do not end a run.
        self._ids += [number for number in map(int, ids) if self._codec.token_text(number) is not None]
        in_run = self._ids and str(self._codec.token_text(self._ids[-1])).startswith("<0x")
        return "" if in_run else self._advance(final=False)

    def flush(self) -> str:
        """Return the held-back text; an unfinished character becomes U+FFFD."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        known = self._codec.decode(self._ids[self._start : self._shown], skip_special=False)
        text = self._codec.decode(self._ids[self._start :], skip_special=False)
        if len(text) <= len(known) or (text.endswith("�") and not final):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text[len(known) :]


CHARACTERS = {byte: 256 + at for at, byte in enumerate([*range(33), *range(127, 161), 173])}
"""The characters that byte-level vocabularies write for the bytes they do not write as themselves."""
_BYTE_OF = {chr(CHARACTERS.get(byte, byte)): byte for byte in range(256)}
_MAX_TOKENS = 16_384
"""Number of remembered tokens (2 MB), after which the memory is cleared."""


class ByteDecoder(dict[int, bytes]):
    """The bytes of byte-level tokens, looked up on demand; safe to share between threads.

    Invariant: `decode` returns what `tokenizers` returns for a tokenizer whose decoder is `ByteLevel`.
    """

    def __init__(self, text_of: Callable[[int], str | None]) -> None:
        super().__init__()
        self._text_of = text_of
        self._known: Callable[[int], bytes] = self.__getitem__

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self._known, ids)).decode("utf-8", "replace")

    def __missing__(self, number: int) -> bytes:
        text = self._text_of(number) or ""
        if len(self) >= _MAX_TOKENS:
            self.clear()
        found = self[number] = bytes(map(_BYTE_OF.__getitem__, text)) if _BYTE_OF.keys() >= set(text) else text.encode()
        return found


_MAX_PIECES = 16_384
"""Number of remembered pieces (4 to 6 MB of words, at most 10 MB), after which the memory is cleared."""
_MAX_LENGTH = 32
"""Longest remembered piece in characters; longer pieces rarely repeat."""

_LINE = re.compile(r"(?<=\n)(?=[ \t]*[!-~])")
"""Matches where each known pre-tokenizer cuts, so that no text before a match depends on text after it."""
_SPACE, _OTHER = r"[\t-\r ]", r"[^\t-\r A-Za-z0-9]"


def _piece_pattern(digits: str) -> re.Pattern[str]:
    return re.compile(
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|{digits}| ?{_OTHER}+[\r\n]*"
        rf"|{_SPACE}*[\r\n]+|{_SPACE}+(?!{_OTHER}|[A-Za-z0-9])|{_SPACE}+"
    )


_SUFFIXES, _ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?", r"+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PIECES = {
    _SUFFIXES + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]" + _ENDS: _piece_pattern("[0-9]"),  # Qwen2 to Qwen3
    _SUFFIXES + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]" + _ENDS: _piece_pattern("[0-9]"),  # Qwen3.5
    _SUFFIXES + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]" + _ENDS: _piece_pattern("[0-9]{1,3}"),  # Llama 3
}
"""Patterns that match the pieces of ASCII text, by the regular expression in `tokenizer.json`."""


class WordEncoder:
    """Encodes text as a byte-level BPE without added tokens does; its memory is bounded and safe to share between threads.

    Invariant: `encode` returns the ids of the whole tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, pieces: re.Pattern[str]) -> None:
        self._tokenizer = tokenizer
        self._pieces: Callable[[str], list[str]] = pieces.findall
        self._ids_of = _PieceIds(tokenizer.model).__getitem__

    def encode(self, text: str) -> list[int]:
        """Return the ids of text; a lone surrogate raises the tokenizer's own error."""
        if text.isascii():
            return list(chain.from_iterable(map(self._ids_of, self._pieces(text))))
        ids: list[int] = []
        for plain, lines in groupby(_LINE.split(text), str.isascii):
            part = "".join(lines)
            ids += self.encode(part) if plain else self._tokenizer.encode_batch_fast([part], add_special_tokens=False)[0].ids
        return ids


def word_encoder(data: Mapping[str, object], tokenizer: Tokenizer) -> WordEncoder | None:
    """Return an encoder for a tokenizer, which neither truncates nor pads; None where its cuts are not known."""
    match data:
        case {
            "normalizer": None | {"type": "NFC" | "NFD" | "NFKC" | "NFKD"},  # they leave ASCII as it is
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": str(cut)}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ],
            },
            "model": {"type": "BPE", "dropout": None},
            "added_tokens": [],
        } if cut in _PIECES:
            return WordEncoder(tokenizer, _PIECES[cut])
        case _:
            return None


class _PieceIds(dict[str, tuple[int, ...]]):
    """The ids of pieces, looked up on demand."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    def __missing__(self, piece: str) -> tuple[int, ...]:
        ids = tuple([token.id for token in self._model.tokenize(piece.translate(CHARACTERS))])
        if len(piece) <= _MAX_LENGTH:
            if len(self) >= _MAX_PIECES:
                self.clear()
            self[piece] = ids
        return ids
