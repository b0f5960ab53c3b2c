"""The code demo's tokenizer: programs are few tokens of Python."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from agentrl_workflows.code_demo.recipe import CODE
from agentrl_workflows.code_demo.tokenizer import CODE_PHRASES


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code-student") / "model"
    CODE.write_student(folder, seed=0)
    return folder


@pytest.mark.starts
def test_a_program_is_some_twenty_tokens_of_python_and_no_token_twice_in_the_vocabulary(student: Path) -> None:
    tokenizer = Tokenizer.from_file(str(student / "tokenizer.json"))
    program = "```python\ndef f(x):\n    return x + 7 if x % 2 == 0 else x * 4\n```"
    encoded = tokenizer.encode(program, add_special_tokens=False)
    assert tokenizer.decode(encoded.ids) == program
    assert len(encoded.ids) == 18
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert len(set(CODE_PHRASES)) == len(CODE_PHRASES)
