"""The demo's tokenizer and chat template: round trips, numbers, boundaries, and agreement with transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agentrl.tokens.renderer import Renderer
from agentrl_envs.calculator import CalculatorEpisode
from agentrl_workflows.calculator.expert import demonstrations
from agentrl_workflows.calculator.recipe import FULL
from agentrl_workflows.calculator.tokenizer import write_tokenizer
from agentrl_workflows.demo.tokenizer import MARKERS, SPECIALS

TOOLS: list[dict[str, Any]] = [dict(CalculatorEpisode.schema)]


def conversations(count: int) -> list[list[dict[str, Any]]]:
    made = demonstrations(count=count, seed=11, demonstrator=FULL.demonstrator)
    return [[dict(message) for message in each["messages"]] for each in made]


@given(st.text())
def test_any_text_round_trips(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_integer_from_0_to_99_is_one_token_wherever_it_stands(tokenizer: Tokenizer):
    for number in range(100):
        token = tokenizer.encode(str(number)).ids
        assert len(token) == 1
        for text in (
            f"Compute {number} + {number}.",
            f'{{"a": {number}, "op": "-", "b": {number}}}',
            f"The answer is {number}.",
        ):
            assert tokenizer.encode(text).ids.count(token[0]) == text.count(str(number))


@given(text=st.text())
def test_content_never_yields_a_control_token(renderer: Renderer, text: str):
    for evil in (text, *SPECIALS, *MARKERS):
        ids = renderer.encode_content(evil)
        assert not renderer.control_ids.intersection(ids)
        assert renderer.decode(ids, skip_special=False) == evil


def test_numbers_and_phrases_are_no_control_tokens(renderer: Renderer, tokenizer: Tokenizer):
    assert renderer.control_ids == {tokenizer.token_to_id(token) for token in (*SPECIALS, *MARKERS)}


def test_the_template_is_the_one_transformers_applies(student: Path, renderer: Renderer):
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = AutoTokenizer.from_pretrained(student)
    for messages in conversations(100):
        for tools in (TOOLS, None):
            text = reference.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
            assert renderer.render_text(renderer.plain(messages), tools, generation_prompt=True) == text
            whole = reference.encode(text, add_special_tokens=False)
            assert renderer.start(renderer.plain(messages), tools).ids == whole


def test_a_conversation_encoded_piece_by_piece_gives_the_ids_of_the_whole(renderer: Renderer, tokenizer: Tokenizer):
    for messages in conversations(100):
        encoded = renderer.encode_conversation(messages, TOOLS)
        text = renderer.render_text(renderer.plain(messages), TOOLS, generation_prompt=False)
        whole = tokenizer.encode(text.removesuffix("\n"), add_special_tokens=False).ids
        assert encoded.token_ids.tolist() == whole


def test_prompts_and_episodes_are_short(renderer: Renderer):
    prompts = [renderer.start(renderer.plain(messages[:1]), TOOLS).ids for messages in conversations(50)]
    assert max(map(len, prompts)) <= 24
    longest = max(len(renderer.encode_conversation(messages, TOOLS).token_ids) for messages in conversations(200))
    assert longest < 250


def test_the_template_keeps_what_it_wrote(renderer: Renderer):
    assert renderer.text_prefix_preserving
    assert renderer.local


def test_the_files_are_the_same_each_time(tmp_path: Path, student: Path):
    write_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (student / name).read_bytes()


@pytest.mark.parametrize("text", ["100", "105", "1005"])
def test_larger_numbers_fall_to_pairs_and_digits(tokenizer: Tokenizer, text: str):
    assert all(len(token) <= 2 for token in tokenizer.encode(text).tokens)
