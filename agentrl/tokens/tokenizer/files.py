"""Reads the tokenizer files of a local model directory in Hugging Face layout.

Invariant: nothing is downloaded, and only JSON and template text are read; a missing or broken file raises a `ConfigError`
that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar, cast

import msgspec

from agentrl.errors import ConfigError

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
        given = self.eos_token_id
        return given if isinstance(given, list) else [] if given is None else [given]


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
