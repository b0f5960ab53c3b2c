"""A tokenizer without a model, with room for long conversations, and the player of bundled workflows."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from agentrl.tokens.renderer import Renderer
from tests.support.player import Player
from tests.support.tiny import build_tokenizer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def play(tmp_path_factory: pytest.TempPathFactory) -> Player:
    """Return what plays an episode: `await play(workflow, task, *texts)`, one text for each model call."""
    folder = tmp_path_factory.mktemp("workflows")
    vocab_size = build_tokenizer(folder)
    eos = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|im_end|>")
    config = {"model_type": "qwen3", "vocab_size": vocab_size, "eos_token_id": eos, "max_position_embeddings": 65_536}
    (folder / "config.json").write_text(json.dumps(config))
    return Player(folder, Renderer.load(folder))
