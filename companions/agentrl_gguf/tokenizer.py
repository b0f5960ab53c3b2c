"""tokenizer.json, tokenizer_config.json and the chat templates from the keys of a file.

Invariant: ids are those of the file. A control token is special, so text of a conversation never yields it; a token of
users (`<tool_call>`) is found in text and is not special.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentrl_gguf.header import GgufHeader
from agentrl_gguf.pieces import CONTROL, NORMAL, OWN, UNKNOWN, UNUSED
from agentrl_gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from agentrl_gguf.sentencepiece import piece_texts, piece_tokenizer

_MODEL: Final = "tokenizer.ggml.model"
_NAMED: Final = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "mask": "mask_token",
}
"""Fields of tokenizer_config.json by the names of their keys."""
_ENDS: Final = ("eos", "eot", "eom")
_KEYS: Final = frozenset({
    "model", "pre", "tokens", "token_type", "scores", "merges", "added_tokens", "add_bos_token", "add_eos_token",
    "add_sep_token", "add_space_prefix", "remove_extra_whitespaces",
    *(f"{name}_token_id" for name in (*_NAMED, *_ENDS, "seperator", "separator", "cls", "prefix", "suffix", "middle")),
    *(f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
})  # fmt: skip
"""Keys after `tokenizer.ggml.` that are used, or that say nothing about how text becomes tokens."""
_MARKUP: Final = re.compile(r"<\|[^\s<>|'\"{}]+\|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The tokenizer's files of a model directory, as JSON and text."""

    tokenizer: Mapping[str, Any]
    config: Mapping[str, Any]
    templates: Mapping[str, str]
    """Jinja source by name; `default` is the one of conversations."""
    special_ids: Mapping[str, int]
    """`bos_token_id` and its like, for config.json."""
    end_ids: tuple[int, ...]
    """Ids that end an output, the model's own first."""


def read_tokenizer(header: GgufHeader, rows: int, *, template: str | None = None) -> TokenizerFiles:
    """Return the files of the tokenizer of a model with `rows` rows of embeddings.

    Args:
        header: of the file.
        rows: tokens that the model has embeddings of.
        template: a chat template in place of that of the file.

    Raises:
        ConfigError: there is no tokenizer, it is of an unknown kind, or names tokens that are not there.
    """
    tokens = header.strings("tokenizer.ggml.tokens")
    if tokens is None or header.get(_MODEL, str) is None:
        raise header.error(
            f"no tokenizer: the key {_MODEL} or tokenizer.ggml.tokens is missing; convert the model with its tokenizer"
        )
    if len(tokens) > rows:
        raise header.error(f"{len(tokens)} tokens, and embeddings for {rows}; tokenizer and model do not belong together")
    _check_keys(header)
    kinds = header.integers("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise header.error(f"{len(tokens)} tokens with {len(kinds)} types; convert the file again")
    if len(set(tokens)) != len(tokens):
        twice = next(text for number, text in enumerate(tokens) if text in tokens[:number])
        raise header.error(f"the token {twice!r} is there twice; convert the file again")
    if header.get(_MODEL, str) == "llama":
        tokens = piece_texts(tokens, kinds)
    data = _tokenizer(header, tokens, kinds)
    ids = _special_ids(header, len(tokens))
    templates = _templates(header, template)
    _check_templates(header, templates, frozenset(tokens))
    named = {field: tokens[ids[name]] for name, field in _NAMED.items() if name in ids}
    return TokenizerFiles(
        tokenizer=data,
        config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
            "clean_up_tokenization_spaces": False,
            "model_max_length": header.need(f"{header.architecture}.context_length", int),
        },
        templates=templates,
        special_ids={f"{short}_token_id": ids[name] for name, short in _SHORT.items() if name in ids},
        end_ids=tuple(dict.fromkeys(ids[name] for name in _ENDS if name in ids)),
    )


_SHORT: Final = {"bos": "bos", "eos": "eos", "padding": "pad"}


def _check_keys(header: GgufHeader) -> None:
    prefix = "tokenizer.ggml."
    if unknown := sorted(key for key in header.values if key.startswith(prefix) and key.removeprefix(prefix) not in _KEYS):
        raise header.error(
            f"unknown keys {', '.join(unknown[:5])}: they may change how text becomes tokens, so it is not imported; use "
            "the Hugging Face directory of the model"
        )


def _tokenizer(header: GgufHeader, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    match header.get(_MODEL, str):
        case "gpt2":
            pre = _pre_tokenizer(header)
            parts, offsets, adds_bos = _byte_level_parts(header, pre, tokens, kinds), _OFFSETS, pre.adds_bos
        case "llama":
            parts, offsets, adds_bos = piece_tokenizer(header, tokens, kinds), None, True
        case other:
            raise header.error(
                f"{_MODEL} is {other!r}: expected gpt2, a byte-level BPE, or llama, of SentencePiece; use the Hugging Face "
                "directory of the model"
            )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(text, number, special=kinds[number] != OWN)
            for number, text in enumerate(tokens)
            if kinds[number] in (CONTROL, UNKNOWN, OWN)
        ],
        **parts,
        "post_processor": _post_processor(offsets, *_added_by_default(header, tokens, adds_bos=adds_bos)),
    }


_OFFSETS: Final[Mapping[str, Any]] = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": False,
    "use_regex": True,
}


def _byte_level_parts(header: GgufHeader, pre: PreTokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    kept = {text: number for number, text in enumerate(tokens) if not _is_padding(text, number, kinds[number])}
    return {
        "normalizer": pre.normalizer,
        "pre_tokenizer": pre.steps[0] if len(pre.steps) == 1 else {"type": "Sequence", "pretokenizers": list(pre.steps)},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": kept,
            "merges": _merges(header, kept),
        },
    }


def _pre_tokenizer(header: GgufHeader) -> PreTokenizer:
    name = header.get("tokenizer.ggml.pre", str)
    if name is None or name not in PRE_TOKENIZERS:
        what = "no key tokenizer.ggml.pre" if name is None else f"tokenizer.ggml.pre is {name!r}"
        raise header.error(
            f"{what}: expected one of {', '.join(sorted(PRE_TOKENIZERS))}; another pre-tokenizer would give some texts "
            "other tokens, so use the Hugging Face directory of the model"
        )
    return PRE_TOKENIZERS[name]


def _is_padding(text: str, number: int, kind: int) -> bool:
    """Return whether a token only fills the table: converters name the rows without a token by their number."""
    return kind == UNUSED and text == f"[PAD{number}]"


def _merges(header: GgufHeader, vocabulary: Mapping[str, int]) -> list[list[str]]:
    merges = header.strings("tokenizer.ggml.merges")
    if merges is None:
        raise header.error(
            "no key tokenizer.ggml.merges, which a byte-level BPE needs; convert the model with its tokenizer"
        )
    pairs: list[list[str]] = []
    for text in merges:
        pair = text.split(" ")
        if len(pair) != 2 or not vocabulary.keys() >= {*pair, "".join(pair)}:
            raise header.error(f"the merge {text!r} is no pair of tokens that make a token; convert the file again")
        pairs.append(pair)
    return pairs


def _added_token(text: str, number: int, *, special: bool) -> dict[str, Any]:
    return {
        "id": number,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _added_by_default(
    header: GgufHeader, tokens: Sequence[str], *, adds_bos: bool
) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    """Return the tokens that begin and end a text; None: none does."""
    ids, added = _special_ids(header, len(tokens)), {"bos": adds_bos, "eos": False}
    for name in added:
        said = header.get(f"tokenizer.ggml.add_{name}_token", bool)
        added[name] = added[name] if said is None else said
        if added[name] and name not in ids:
            raise header.error(f"tokenizer.ggml.add_{name}_token is true, and no tokenizer.ggml.{name}_token_id says which")
    bos, eos = ((tokens[ids[name]], ids[name]) if added[name] else None for name in ("bos", "eos"))
    return bos, eos


def _post_processor(
    offsets: Mapping[str, Any] | None, bos: tuple[str, int] | None, eos: tuple[str, int] | None
) -> Mapping[str, Any] | None:
    if bos is None and eos is None:
        return offsets

    def sides(sequence: str, number: int) -> list[dict[str, Any]]:
        before = [] if bos is None else [{"SpecialToken": {"id": bos[0], "type_id": number}}]
        after = [] if eos is None else [{"SpecialToken": {"id": eos[0], "type_id": number}}]
        return [*before, {"Sequence": {"id": sequence, "type_id": number}}, *after]

    template = {
        "type": "TemplateProcessing",
        "single": sides("A", 0),
        "pair": [*sides("A", 0), *sides("B", 1)],
        "special_tokens": {
            text: {"id": text, "ids": [number], "tokens": [text]} for text, number in filter(None, (bos, eos))
        },
    }
    return template if offsets is None else {"type": "Sequence", "processors": [offsets, template]}


def _special_ids(header: GgufHeader, count: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in (*_NAMED, *_ENDS):
        number = header.get(f"tokenizer.ggml.{name}_token_id", int)
        if number is None:
            continue
        if not 0 <= number < count:
            raise header.error(
                f"tokenizer.ggml.{name}_token_id is {number}, and there are {count} tokens; convert the file again"
            )
        found[name] = number
    return found


def _templates(header: GgufHeader, given: str | None) -> dict[str, str]:
    main = given if given is not None else header.get("tokenizer.chat_template", str)
    found = {} if main is None else {"default": main}
    for name in header.strings("tokenizer.chat_templates") or ():
        if not re.fullmatch(r"[\w-]+", name):
            raise header.error(f"tokenizer.chat_templates names {name!r}: expected letters, digits, - and _")
        if name != "default":
            found[name] = header.need(f"tokenizer.chat_template.{name}", str)
    return found


def _check_templates(header: GgufHeader, templates: Mapping[str, str], tokens: frozenset[str]) -> None:
    for name, source in templates.items():
        if absent := sorted(set(_MARKUP.findall(source)) - tokens):
            raise header.error(
                f"the chat template {name!r} writes {', '.join(absent[:5])}, which the vocabulary does not have: the model "
                "was made for another template; give it with agentrl import FILE DIRECTORY --chat-template FILE.jinja"
            )
