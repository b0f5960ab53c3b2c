"""The code demo's tokenizer: programs are few tokens, and a conversation is encoded the same in pieces and as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from agentrl.tokens.renderer import Renderer
from agentrl_workflows.code_demo.expert import code_demonstrations
from agentrl_workflows.code_demo.recipe import CODE
from agentrl_workflows.code_demo.tokenizer import CODE_PHRASES


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code-student") / "model"
    CODE.write_student(folder, seed=0)
    return folder


def conversations(count: int) -> list[list[dict[str, Any]]]:
    made = code_demonstrations(count=count, seed=11, demonstrator=CODE.demonstrator)
    return [[dict(message) for message in each["messages"]] for each in made]


def test_a_conversation_encoded_piece_by_piece_gives_the_ids_of_the_whole(student: Path) -> None:
    renderer, tokenizer = Renderer.load(student), Tokenizer.from_file(str(student / "tokenizer.json"))
    for messages in conversations(200):
        encoded = renderer.encode_conversation(messages)
        text = renderer.render_text(renderer.plain(messages), None, generation_prompt=False)
        assert encoded.token_ids.tolist() == tokenizer.encode(text.removesuffix("\n"), add_special_tokens=False).ids
        assert len(encoded.token_ids) < 150


def test_a_program_is_some_twenty_tokens_of_python_and_no_token_twice_in_the_vocabulary(student: Path) -> None:
    tokenizer = Tokenizer.from_file(str(student / "tokenizer.json"))
    program = "```python\ndef f(x):\n    return x + 7 if x % 2 == 0 else x * 4\n```"
    encoded = tokenizer.encode(program, add_special_tokens=False)
    assert tokenizer.decode(encoded.ids) == program
    assert len(encoded.ids) == 18
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert len(set(CODE_PHRASES)) == len(CODE_PHRASES)
