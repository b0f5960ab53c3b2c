"""Model output taken apart: never an exception, never lost text."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.tokens.formats import TOOL_FORMATS
from agentrl.tokens.parse import (
    ParsedCalls,
    ParsedMessage,
    parse_text,
)
from agentrl.tokens.renderer import Renderer
from tests.tokens.families import FAMILIES

GOOD = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


TOOLS = [{"type": "function", "function": {"name": "f"}}]


def read(name: str, text: str) -> ParsedCalls:
    return TOOL_FORMATS[name].read(text, TOOLS)


def hermes(text: str, *, thinking_open: bool = False) -> ParsedMessage:
    return parse_text(text, form=TOOL_FORMATS["hermes"], tools=TOOLS, thinking_open=thinking_open, salt="s")


def names_and_arguments(parsed: ParsedMessage) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain text \n", "plain text \n", []),
        (GOOD, "", [("f", {"a": 1})]),
        (f"See:\n{GOOD}\n{GOOD} after", "See:\n\n after", [("f", {"a": 1})] * 2),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', "", [("f", {"a": "</tool_call>"})]),
        (GOOD.removesuffix("</tool_call>"), "", [("f", {"a": 1})]),
    ],
)
def test_hermes_calls(text: str, content: str, calls: list[tuple[str, object]]):
    parsed = hermes(text)
    assert (parsed.content, names_and_arguments(parsed), parsed.malformed) == (content, calls, False)


@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>' % ("1" * 5000),
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_malformed_calls_stay_in_the_content(block: str):
    parsed = hermes("a " + block)
    assert (parsed.content, parsed.tool_calls, parsed.malformed) == ("a " + block, (), True)
    mixed = hermes(GOOD + block + "</tool_call>")
    assert len(mixed.tool_calls) == 1
    assert mixed.malformed
    assert mixed.content.startswith(block)


def test_reasoning_is_split_off_and_calls_in_it_do_not_count():
    parsed = hermes(f"<think>\nmaybe {GOOD}\n</think>\n\nthe answer")
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == (f"maybe {GOOD}", "the answer", ())
    opened = hermes("so be it\n</think>\n\n" + GOOD, thinking_open=True)
    assert (opened.reasoning, opened.content, len(opened.tool_calls)) == ("so be it", "", 1)
    assert hermes("<think>\n\n</think>\n\nx") == ParsedMessage(content="x")
    assert hermes("a <think> b") == ParsedMessage(content="a <think> b")


def test_reasoning_after_white_space_is_reasoning():
    parsed = parse_text(" \n<think>x</think>y", form=None, tools=None, thinking_open=False, salt="")
    assert (parsed.reasoning, parsed.content) == ("x", "y")


def test_unfinished_reasoning_is_flagged():
    assert hermes("<think>never end") == ParsedMessage(content="", reasoning="never end", malformed=True)
    assert hermes("never end", thinking_open=True) == ParsedMessage(content="", reasoning="never end", malformed=True)


def test_a_call_with_half_a_character_which_no_template_renders_is_text():
    text = '<tool_call>{"name": "f", "arguments": {"a": "\\ud800 é"}}</tool_call>'
    parsed = hermes(text)
    assert (parsed.content, parsed.tool_calls, parsed.malformed) == (text, (), True)


def test_mistral_calls():
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    assert [call.name for call in read("mistral", "x " + text).calls] == ["f", "g"]
    for bad in ("[TOOL_CALLS] [{]", "[TOOL_CALLS] {}", "[TOOL_CALLS] []", '[TOOL_CALLS] [{"name": "f"}, 3]', "[TOOL_CALLS]"):
        assert read("mistral", bad) == (bad, [], True)
    assert read("mistral", "text") == ("text", [], False)


def test_llama_calls():
    one = '{"name": "f", "parameters": {"a": 1}}'
    assert read("llama", one).calls == [("f", '{"a": 1}', None)]
    assert read("llama", f"<|python_tag|>{one}; {one}").calls == [("f", '{"a": 1}', None)] * 2
    assert read("llama", '{"name": "f", "parameters": 1}') == ('{"name": "f", "parameters": 1}', [], True)
    assert read("llama", '{"name": "f", ') == ('{"name": "f", ', [], True)
    assert read("llama", "text") == ("text", [], False)
    assert read("llama", one.replace("parameters", "arguments")).calls == [("f", '{"a": 1}', None)]
    assert read("llama", '{"name": "f"}') == ('{"name": "f"}', [], True)
    assert read("llama", '{"a": 1}') == ('{"a": 1}', [], False)


def test_the_form_is_chosen_by_the_template(renderer_of: Callable[..., Renderer]):
    chosen = {name: form.name if (form := renderer_of(name).tool_format) else None for name in FAMILIES}
    assert chosen == {
        "qwen25": "hermes",
        "qwen3": "hermes",
        "llama31": "llama",
        "llama32": "llama",
        "mistral": "mistral",
        "deepseek_r1": None,
    }


def test_call_ids_are_nine_letters_and_follow_from_salt_and_place():
    first, second = hermes(GOOD + GOOD).tool_calls
    assert first.id != second.id
    assert len(first.id) == 9
    assert first.id.isalnum()
    assert hermes(GOOD).tool_calls[0].id == first.id
    assert (
        parse_text(GOOD, form=TOOL_FORMATS["hermes"], tools=TOOLS, thinking_open=False, salt="t").tool_calls[0].id
        != first.id
    )


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "{", "}", "[", "x", "\n",
     '"name": "f"', GOOD, '{"name": "f", "parameters": {}}']
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=8).map("".join), st.sampled_from([None, *TOOL_FORMATS]), st.booleans())
def test_parsing_never_raises_and_says_what_it_could_not_read(text: str, format_name: str | None, thinking_open: bool):
    form = None if format_name is None else TOOL_FORMATS[format_name]
    parsed = parse_text(text, form=form, tools=TOOLS, thinking_open=thinking_open, salt="")
    if not parsed.tool_calls and not thinking_open and not text.lstrip().startswith("<think>"):
        assert parsed.content == text
    for call in parsed.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)


def test_outputs_are_parsed_without_their_end(renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("qwen3")
    end = renderer.end_of_turn_id or 0
    ids = renderer.encode_content("The answer is 42. STOP")
    assert renderer.parse([*ids, end], tools=None).content == "The answer is 42. STOP"
    assert renderer.parse(ids, tools=None, stopped_on="STOP").content == "The answer is 42. "
    assert renderer.parse(ids, tools=None, stopped_on=ids[-1]).content == renderer.decode(ids[:-1], skip_special=False)
    assert renderer.parse([], tools=TOOLS) == ParsedMessage(content="")
    assert renderer.parse([end], tools=TOOLS) == ParsedMessage(content="")


def test_without_tools_nothing_is_a_tool_call(renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("qwen3")
    ids = renderer._codec.encode_rendered(GOOD)  # pyright: ignore[reportPrivateUsage]
    assert renderer.parse(ids, tools=None).content == GOOD
    assert len(renderer.parse(ids, tools=TOOLS).tool_calls) == 1
