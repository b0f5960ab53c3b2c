"""A random model of the family of the pretrained one, made once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from tests.support.tiny import build_model, build_tokenizer

BYTES: Final = ("--inference.max_context_tokens", "2048", "--engine.steps", "1", "--algorithm.group_size", "2")
"""Flags of a run: the prompt is longer in the bytes of this model than in the tokens of the pretrained one."""


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    size = build_tokenizer(folder)
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    end = next(token["id"] for token in added if token["content"] == "<|im_end|>")
    build_model(folder, arch="llama", vocab_size=size, eos_id=end)
    return folder
