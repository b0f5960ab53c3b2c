"""The demo's student: its tokenizer and random model, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from agentrl.tokens.renderer import Renderer
from agentrl_workflows.calculator.tokenizer import write_tokenizer
from agentrl_workflows.demo.model import write_random_model


@pytest.fixture(scope="session")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    write_random_model(folder, vocab_size=write_tokenizer(folder), seed=0)
    return folder


@pytest.fixture(scope="session")
def renderer(student: Path) -> Renderer:
    return Renderer.load(student)


@pytest.fixture(scope="session")
def tokenizer(student: Path) -> Tokenizer:
    return Tokenizer.from_file(str(student / "tokenizer.json"))
