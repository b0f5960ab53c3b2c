"""Streamed text: what was handed out is always how the parsed message begins."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.client.deltas import DeltaSplitter
from agentrl.errors import TokenError
from agentrl.tokens.formats import TOOL_FORMATS
from agentrl.tokens.parse import parse_text

PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "\n", "\n\n", " ",
     "STOP", "ST", "a", "Hello there", '{"name": "f", "arguments": {}}',
     '[{"name": "f", "arguments": {"a": 1}}]', '{"name": "f", "parameters": {}}',
     "<|tool_call|>", "<|tool_call_start|>", "<function=f>", "<minimax:tool_call>", "[f(a=1)]",
     "<|channel|>final<|message|>", "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant",
     "<", "{", "[", "<think", "</thi", "é", "\ufffd"]
)  # fmt: skip


def stream(text: str, cuts: list[int], splitter: DeltaSplitter) -> tuple[str, str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    deltas = [splitter.push(text[start:end]) for start, end in pairwise(bounds)]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)


@given(
    st.lists(PIECES, max_size=8).map("".join),
    st.lists(st.integers(0, 200), max_size=6),
    st.sampled_from([None, *TOOL_FORMATS]),
    st.booleans(),
    st.sampled_from([(), ("STOP",), ("STOP", "ere")]),
)
def test_deltas_are_a_prefix_of_the_parsed_message_for_every_parser(
    text: str, cuts: list[int], parser: str | None, thinking_open: bool, stops: tuple[str, ...]
):
    form = None if parser is None else TOOL_FORMATS[parser]
    tools = None if parser is None else [{"type": "function", "function": {"name": "f"}}]
    splitter = DeltaSplitter(form, tools=parser is not None, stops=stops, thinking_open=thinking_open)
    reasoning, content = stream(text, cuts, splitter)
    ends = [text.find(stop) for stop in stops if stop in text]
    parsed = parse_text(text[: min(ends, default=None)], form=form, tools=tools, thinking_open=thinking_open, salt="")
    rest = splitter.rest(parsed.reasoning or "", parsed.content)
    assert (reasoning + rest.reasoning, content + rest.content) == (parsed.reasoning or "", parsed.content)


def test_plain_text_streams_as_it_comes():
    splitter = DeltaSplitter(TOOL_FORMATS["hermes"], tools=True, stops=("END",), thinking_open=False)
    assert [splitter.push(text).content for text in ("It", " is", " four", ".E", "ND")] == ["It", " is", " four", ".", ""]


def test_a_message_that_is_not_what_was_streamed_is_an_error():
    splitter = DeltaSplitter(None, tools=False, stops=(), thinking_open=False)
    splitter.push("hello")
    with pytest.raises(TokenError, match="is not how the parsed message begins"):
        splitter.rest("", "other")
