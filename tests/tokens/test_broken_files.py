"""A model directory that is broken, or means harm, is one `ConfigError` that names the file, at little cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.template.rendering import ChatTemplate
from tests.rollout.harness import make_renderer

BOUNDED = r"""
import re, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4_000_000_000, 4_000_000_000))
from agentrl.errors import TokenError
from agentrl.tokens.template.rendering import ChatTemplate
try:
    template = ChatTemplate({"default": sys.argv[1]}, special_tokens={}, options={})
    template.render([{"role": "user", "content": "a"}], None, generation_prompt=True)
except TokenError as error:
    peak_kb = re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]  # unlike ru_maxrss, not inherited over exec
    print(error, int(peak_kb) // 1024, sep="|")
"""


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("config.json", "eos_token_id", -1),
        ("config.json", "eos_token_id", [1, -1]),
        ("config.json", "eos_token_id", 2**40),
        ("config.json", "eos_token_id", "</s>"),
        ("generation_config.json", "eos_token_id", -1),
        ("config.json", "max_position_embeddings", -1),
        ("config.json", "max_position_embeddings", 0),
        ("config.json", "max_position_embeddings", "many"),
        ("config.json", "vocab_size", -5),
        ("config.json", "text_config", {"max_position_embeddings": 0}),
    ],
)
def test_a_number_that_cannot_be_is_named_with_its_file(tmp_path: Path, file: str, field: str, value: object) -> None:
    make_renderer(tmp_path)
    path = tmp_path / file
    given = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**given, field: value}))
    with pytest.raises(ConfigError, match=rf"{file}: expected a JSON object .*Expected .* at `\$\.{field}"):
        Renderer.load(tmp_path)


def test_a_template_is_tried_out_before_it_is_used(tmp_path: Path) -> None:
    make_renderer(tmp_path)
    template = tmp_path / "chat_template.jinja"
    assert template.is_file()
    template.write_text("{{ 'x' | center(4000000000) }}" + template.read_text())
    with pytest.raises(ConfigError, match=rf"{tmp_path}: the chat template takes too much memory"):
        Renderer.load(tmp_path)


def test_numbers_that_can_be_are_read_from_the_text_part_of_a_config_first(tmp_path: Path) -> None:
    make_renderer(tmp_path)
    config = {"text_config": {"max_position_embeddings": 77, "eos_token_id": [3]}, "vocab_size": 400, "eos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    renderer = Renderer.load(tmp_path)
    assert (renderer.max_context, renderer.vocab_size) == (77, 400)
    assert 3 in renderer.eos_ids


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json", "generation_config.json"])
def test_brackets_without_end_are_a_config_error(tmp_path: Path, file: str) -> None:
    make_renderer(tmp_path)
    (tmp_path / file).write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=f"{file}: expected JSON"):
        Renderer.load(tmp_path)


@pytest.mark.starts
@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * (10**10) }}",
        "{% set x = 10**10 * 'a' %}",
        "{% set n = 10**10 %}{{ messages[0].content * n }}",
        "{{ [1] * (10**9) }}",
        "{{ 10**(10**10) }}",
    ],
)
def test_a_template_cannot_repeat_a_text_until_the_memory_is_gone(source: str) -> None:
    result = subprocess.run([sys.executable, "-c", BOUNDED, source], capture_output=True, text=True, timeout=60, check=True)
    message, megabytes = result.stdout.split("|")
    assert "makes more than 64000000 characters" in message
    assert int(megabytes) < 200


def test_products_and_powers_of_usual_size_are_what_they_are_in_python() -> None:
    source = "{{ 'ab' * 3 }} {{ 2 * 'x' }} {{ 6 * 7 }} {{ 2 ** 10 }} {{ 2.5 * 2 }} {{ 10**10 * 10**10 }} {{ -1 * 'a' }}"
    template = ChatTemplate({"default": source}, special_tokens={}, options={})
    rendered = template.render([{"role": "user", "content": "a"}], None, generation_prompt=True)
    assert rendered == "ababab xx 42 1024 5.0 100000000000000000000 "


@pytest.mark.parametrize("source", ["{% for a in b %}" * 30 + "{% endfor %}" * 30, "{{ " + "(" * 20_000 + "1"])
def test_blocks_deep_in_blocks_are_a_config_error(source: str) -> None:
    with pytest.raises(ConfigError, match="'default' is not valid Jinja"):
        ChatTemplate({"default": source}, special_tokens={}, options={})
