"""Tool calls in the form of each maker: found by a round trip at load, read, rendered again, never half streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.client.deltas import DeltaSplitter
from agentrl.errors import ConfigError, TokenError
from agentrl.tokens.formats import TOOL_FORMATS
from agentrl.tokens.formats.tagged import typed_value
from agentrl.tokens.renderer import Renderer
from agentrl.types import ToolFormatName
from tests.tokens.dialogues import ONE, TOOL, TWO, assistant, call, calls, result, system, user
from tests.tokens.stand_ins import WITHOUT_CALLS, WITHOUT_TOOLS, source_of, without_quotes, write_model

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "items": {"type": "array"},
                "table": {"type": "object"},
                "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            },
        },
    },
}
WHOLE = ("harmony", "functools", "xlam", "llama", "pythonic")
"""Formats in which a call is the whole message."""
LETTERS = st.characters(exclude_categories=["Cs", "Co", "Cn", "Mn", "Mc", "Me"])  # the tokenizer composes characters
TEXTS = st.text(LETTERS, max_size=12).map(partial(normalize, "NFC")) | st.sampled_from(
    [
        "</tool_call>",
        "<tool_call>",
        '"',
        "\\",
        "\n\n",
        "</parameter>",
        "{",
        "[f()]",
        "<|im_end|>",
        "<think>",
        "'",
        "null",
        "12",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "count": st.integers(-(2**70), 2**70),
        "items": st.lists(VALUES, max_size=3),
        "table": st.dictionaries(TEXTS, VALUES, max_size=3),
        "flag": st.none() | st.booleans(),
    },
)


@pytest.fixture(scope="module")
def renderer_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Renderer]:
    """Returns the renderer of a format's stand-in."""
    made: dict[str, Renderer] = {}

    def load(name: str) -> Renderer:
        if name not in made:
            made[name] = Renderer.load(write_model(tmp_path_factory.mktemp(name), source_of(name)))
        return made[name]

    return load


def sampled(renderer: Renderer, message: dict[str, Any]) -> list[int]:
    """Return an assistant message as the model would sample it."""
    return renderer._assistant_ids(renderer.plain([message])[0], [SCHEMA])  # pyright: ignore[reportPrivateUsage]


def asked(*arguments: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    made = [call(at, json.dumps(each), "edit") for at, each in enumerate(arguments)]
    for at, each in enumerate(made):
        each["id"] = f"functions.edit:{at}"
    return {"role": "assistant", "content": content, "tool_calls": made}


def test_each_format_has_a_name_for_the_run_file() -> None:
    assert set(get_args(ToolFormatName)) == {"auto", *TOOL_FORMATS}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_template_is_read_in_the_form_that_it_writes(name: str, renderer_for: Callable[[str], Renderer]) -> None:
    renderer = renderer_for(name)
    renderer.check_tools()
    assert renderer.tool_format is TOOL_FORMATS[name]


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=25, deadline=None)
@given(arguments=ARGUMENTS)
def test_calls_survive_rendering_sampling_and_reading(
    name: str, renderer_for: Callable[[str], Renderer], arguments: dict[str, Any]
) -> None:
    renderer = renderer_for(name)
    ids = sampled(renderer, asked(arguments))
    parsed = renderer.parse(ids, tools=[SCHEMA])
    assert [(each.name, json.loads(each.arguments)) for each in parsed.tool_calls] == [("edit", arguments)]
    assert (parsed.content.strip(), parsed.malformed) == ("", False)
    assert sampled(renderer, parsed.to_message()) == ids


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name not in WHOLE])
def test_two_calls_and_the_text_before_them_come_back(name: str, renderer_for: Callable[[str], Renderer]) -> None:
    renderer = renderer_for(name)
    both = {"text": "a"}, {"text": "</tool_call>", "count": 3}
    ids = sampled(renderer, asked(*both, content="Let me see."))
    parsed = renderer.parse(ids, tools=[SCHEMA])
    assert [json.loads(each.arguments) for each in parsed.tool_calls] == list(both)
    assert (parsed.content, parsed.malformed) == ("Let me see.", False)
    assert renderer.parse(ids, tools=None).tool_calls == ()


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_no_piece_of_a_call_is_streamed(name: str, renderer_for: Callable[[str], Renderer]) -> None:
    renderer = renderer_for(name)
    ids = sampled(renderer, asked({"text": "a"}, content="" if name in WHOLE else "So: "))
    splitter = DeltaSplitter(renderer.tool_format, tools=True, stops=(), thinking_open=False)
    streamed = "".join(splitter.push(letter).content for letter in renderer.output_text(ids))
    assert streamed in ("", "So:")


def test_channels_are_reasoning_calls_and_the_answer(renderer_for: Callable[[str], Renderer]) -> None:
    renderer = renderer_for("harmony")
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Four."
    parsed = renderer.parse(renderer.encode_content(text), tools=None)
    assert (parsed.reasoning, parsed.content, parsed.malformed) == ("hm", "Four.", False)
    text = '<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{"text": "a"}'
    parsed = renderer.parse(renderer.encode_content(text), tools=[SCHEMA])
    assert [(each.name, each.arguments) for each in parsed.tool_calls] == [("edit", '{"text": "a"}')]


MARKUP = (
    "<tool_call>", "</tool_call>", "<function=edit>", "</function>", "<parameter=text>", "</parameter>", "<arg_key>",
    "text", "</arg_key>", "<arg_value>", "</arg_value>", "edit", "[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}", ", ", "; ",
    '{"name": "edit", "arguments": {"text": "a"}}', '{"name": "", "parameters": {}}', '{"text": "\\ud800"}', "{}", "\n",
    "edit(text='a')", "edit(b='\\ud800')", "a.b(c={1: 2})", "<think>", "</think>", "<|channel|>", "commentary", " to=",
    "functions.edit", "analysis", "final", "<|message|>", "<|start|>assistant", "functools", "<tool_calls>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|tool_call|>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.edit:0", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", '<invoke name="edit">', "</invoke>", '<parameter name="text">', "<minimax:tool_call>",
    "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>",
    '[{"tool_name": "edit", "parameters": {}}]', "<function=", ">>>", "all\n", "edit\n", '[{"edit": {}}]',
    "<|tools_prefix|>",
)  # fmt: skip
LIST = '[{"name": "edit", "arguments": {"text": "a"}}, {"name": "edit", "arguments": {}}]'
READABLE = (
    '<tool_call>{"name": "edit", "arguments": {"text": "\\ud800"}}</tool_call>', f"[TOOL_CALLS] {LIST}",
    "<tool_call><function=edit><parameter=text>\na\n</parameter></function></tool_call>", f"<tool_calls>{LIST}</tool_calls>",
    "<tool_call>edit<arg_key>text</arg_key><arg_value>a</arg_value></tool_call>", "[edit(text='a'), edit()]",
    '{"name": "edit", "parameters": {"text": "a"}}; {"name": "edit", "arguments": {}}', "<think>hm</think>", "Let me see.",
)  # fmt: skip
"""Texts that are calls in some formats, twice or with others around them beyond what some templates render."""


@pytest.mark.parametrize("name", [*TOOL_FORMATS, "qwen25", "qwen3", "llama31", "llama32"])
@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(st.sampled_from(READABLE) | st.sampled_from(MARKUP), max_size=8))
def test_whatever_is_read_can_be_rendered_again(
    name: str, renderer_for: Callable[[str], Renderer], renderer_of: Callable[..., Renderer], pieces: list[str]
) -> None:
    renderer = renderer_for(name) if name in TOOL_FORMATS else renderer_of(name)
    parsed = renderer.parse(renderer.encode_content("".join(pieces)), tools=[SCHEMA])
    messages = [user("x"), parsed.to_message()]
    messages += [{**result(at, "3"), "tool_call_id": each.id} for at, each in enumerate(parsed.tool_calls)] or [user("y")]
    assert renderer.start(renderer.plain(messages), [SCHEMA]).ids


def test_calls_that_the_template_cannot_render_are_text(renderer_of: Callable[..., Renderer]) -> None:
    renderer = renderer_of("llama31")
    one = '{"name": "calc", "parameters": {"a": 1}}'
    assert len(renderer.parse(renderer.encode_content(one), tools=[TOOL]).tool_calls) == 1
    parsed = renderer.parse(renderer.encode_content(f"{one}; {one}"), tools=[TOOL])
    assert (parsed.content, parsed.tool_calls, parsed.malformed) == (f"{one}; {one}", (), True)
    again = renderer.plain([user("x"), parsed.to_message(), user("y")])
    assert renderer.start(again, [TOOL]).ids


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_template_that_writes_some_values_wrongly_is_read_by_plain_calls(quote: str, tmp_path: Path) -> None:
    renderer = Renderer.load(write_model(tmp_path, without_quotes(quote)))
    assert renderer.tool_format is TOOL_FORMATS["pythonic"]
    parsed = renderer.parse(renderer.encode_content("[edit(text='say \"hi\"', count=3)]"), tools=[SCHEMA])
    assert [json.loads(each.arguments) for each in parsed.tool_calls] == [{"text": 'say "hi"', "count": 3}]
    assert renderer.start(renderer.plain([user("x"), parsed.to_message(), user("y")]), [SCHEMA]).ids


def test_calls_are_read_as_the_prompt_asks_for_them(renderer_for: Callable[[str], Renderer]) -> None:
    renderer = renderer_for("functools")
    text = 'functools[{"name": "edit", "arguments": {"text": "a"}}, {"name": "edit", "arguments": {}}]'
    parsed = renderer.parse(renderer.encode_content(text), tools=[SCHEMA])
    assert [json.loads(each.arguments) for each in parsed.tool_calls] == [{"text": "a"}, {}]
    assert (parsed.content, parsed.malformed) == ("", False)
    assert renderer.parse(renderer.encode_content('functools[{"name": 1}]'), tools=[SCHEMA]).malformed


@pytest.mark.parametrize("name", [name for name, form in TOOL_FORMATS.items() if form.write])
@settings(max_examples=25, deadline=None)
@given(arguments=ARGUMENTS)
def test_calls_that_the_template_leaves_out_are_written_as_the_prompt_asks(
    name: str, tmp_path_factory: pytest.TempPathFactory, arguments: dict[str, Any]
) -> None:
    source = WITHOUT_CALLS.replace("SIGN", TOOL_FORMATS[name].sign)
    renderer = Renderer.load(write_model(tmp_path_factory.mktemp("written"), source))
    assert renderer.tool_format is TOOL_FORMATS[name]
    ids = sampled(renderer, asked(arguments, {"text": "<|im_end|>"}, content="Let me see."))
    parsed = renderer.parse(ids, tools=[SCHEMA])
    assert [json.loads(each.arguments) for each in parsed.tool_calls] == [arguments, {"text": "<|im_end|>"}]
    assert (parsed.content, parsed.malformed) == ("Let me see.", False)
    assert sampled(renderer, parsed.to_message()) == ids
    assert ids.count(renderer.end_of_turn_id or -1) == 1


def test_a_template_that_leaves_calls_out_takes_a_form_by_name_alone_if_it_asks_for_none(tmp_path: Path) -> None:
    folder = write_model(tmp_path, WITHOUT_CALLS)
    with pytest.raises(TokenError, match=r"leaves tool calls out.*sampling.tool_format.*hermes, granite_3, lfm2"):
        Renderer.load(folder).check_tools()
    assert Renderer.load(folder, tool_format="hermes").tool_format is TOOL_FORMATS["hermes"]
    with pytest.raises(ConfigError, match=r"tool_format: glm: made-up calls do not come back"):
        Renderer.load(folder, tool_format="glm")


def test_tools_are_shown_under_the_name_that_the_template_has_for_them(tmp_path: Path) -> None:
    source = WITHOUT_CALLS.replace("SIGN", TOOL_FORMATS["hermes"].sign).replace("tools", "xml_tools")
    renderer = Renderer.load(write_model(tmp_path, source))
    assert renderer.tool_format is TOOL_FORMATS["hermes"]
    assert '"edit"' in renderer.render_text(renderer.plain([user("x")]), [SCHEMA], generation_prompt=True)


def test_a_template_for_tools_alone_renders_requests_without_them(tmp_path: Path) -> None:
    source = source_of("hermes").replace("{%- if tools %}", "{%- for tool in tools %}{% endfor %}{%- if tools %}")
    renderer = Renderer.load(write_model(tmp_path, source))
    assert renderer.tool_format is TOOL_FORMATS["hermes"]
    assert renderer.start(renderer.plain([user("x")]), None).ids


def test_a_template_that_needs_descriptions_takes_tools_without_them(tmp_path: Path) -> None:
    needs = "{% for t in tools or [] %}{{ '' + t.function.description }}{% endfor %}"
    needs += "{% for t in tools or [] %}{% for p in t.function.parameters.properties.values() %}{{ '' + p.description }}"
    renderer = Renderer.load(write_model(tmp_path, needs + "{% endfor %}{% endfor %}" + source_of("hermes")))
    assert renderer.start(renderer.plain([user("x")]), [SCHEMA]).ids


def test_a_template_that_writes_two_ends_is_trained_on_the_first(tmp_path: Path) -> None:
    source = WITHOUT_TOOLS.replace(
        "'<|im_end|>\n' }}", "'<|im_end|>\n' + ('<|endoftext|>' if m.role == 'assistant' else '') }}"
    )
    folder = write_model(tmp_path, source)
    added = {each["content"]: each["id"] for each in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}
    ends = [added["<|endoftext|>"], added["<|im_end|>"]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    renderer = Renderer.load(folder)
    encoded = renderer.encode_conversation([user("x"), assistant("Hello.")])
    assert renderer.decode(encoded.token_ids[encoded.assistant_mask], skip_special=False) == "Hello.<|im_end|>"


def test_a_template_that_refuses_the_tools_that_are_tried_is_read_in_no_form(tmp_path: Path) -> None:
    source = "{% if 'try_out' in tools | string %}{{ raise_exception('no') }}{% endif %}" + source_of("hermes")
    renderer = Renderer.load(write_model(tmp_path, source))
    with pytest.raises(TokenError, match=r"its chat template writes nothing \(.*: no\)"):
        renderer.check_tools()


@pytest.mark.parametrize(("name", "tags"), [("mistral_v11", ("[THINK]", "[/THINK]")), ("seed_oss", ("<think>", "</think>"))])
def test_reasoning_between_the_tags_of_the_maker_or_the_usual_ones_is_taken_off(
    name: str, tags: tuple[str, str], renderer_for: Callable[[str], Renderer]
) -> None:
    renderer = renderer_for(name)
    text = "hm".join(tags) + "\n\nFour."
    parsed = renderer.parse(renderer.encode_content(text), tools=None)
    assert (parsed.reasoning, parsed.content, parsed.malformed) == ("hm", "Four.", False)
    splitter = DeltaSplitter(renderer.tool_format, tools=False, stops=(), thinking_open=False)
    deltas = [splitter.push(letter) for letter in text]
    assert ("".join(each.reasoning for each in deltas), "".join(each.content for each in deltas)) == ("hm", "Four.")
    assert renderer.parse(renderer.encode_content(tags[0] + "hm"), tools=None).malformed


def test_cohere_and_functionary_mark_the_answer_and_the_reasoning(renderer_for: Callable[[str], Renderer]) -> None:
    renderer = renderer_for("cohere")
    text = "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Four.<|END_RESPONSE|>"
    parsed = renderer.parse(renderer.encode_content(text), tools=None)
    assert (parsed.reasoning, parsed.content, parsed.malformed) == ("hm", "Four.", False)
    assert renderer.parse(renderer.encode_content("<|START_THINKING|>hm"), tools=None).malformed
    text = 'hm<|END_THINKING|><|START_ACTION|>[{"tool_name": "edit", "parameters": {"text": "a"}}]<|END_ACTION|>'
    parsed = renderer.parse(renderer.encode_content(text), tools=[SCHEMA])
    assert (parsed.reasoning, parsed.content, parsed.tool_calls[0].arguments) == ("hm", "", '{"text": "a"}')
    renderer = renderer_for("functionary_v32")
    parsed = renderer.parse(renderer.encode_content('all\nSo.>>>edit\n{"text": ">>>all\\n"}'), tools=[SCHEMA])
    assert (parsed.content, json.loads(parsed.tool_calls[0].arguments)) == ("So.", {"text": ">>>all\n"})
    for text, malformed in (("Hello\nthere", False), ('edit\n{"text": ', True)):
        parsed = renderer.parse(renderer.encode_content(text), tools=[SCHEMA])
        assert (parsed.content, parsed.tool_calls, parsed.malformed) == (text, (), malformed)


def test_a_format_that_the_template_does_not_write_is_refused_at_load(tmp_path: Path) -> None:
    folder = write_model(tmp_path, source_of("glm"))
    with pytest.raises(ConfigError, match=r"tool_format: hermes: made-up calls do not come back"):
        Renderer.load(folder, tool_format="hermes")
    write_model(tmp_path, WITHOUT_TOOLS)
    with pytest.raises(ConfigError, match=r"tool_format: glm: .* shows no tools .* hermes can"):
        Renderer.load(folder, tool_format="glm")


def test_a_value_has_the_type_of_its_schema() -> None:
    assert typed_value("12", {"type": ["string", "integer"]}) == 12
    assert typed_value("true", {"type": ["string", "integer"]}) == "true"
    assert typed_value("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}) is None
    assert typed_value("1", {"enum": ["1", "2"]}) == "1"
    assert typed_value("[1, 'x']", {"type": "array"}) == [1, "x"]
    assert typed_value("12", None) == 12
    assert typed_value("no", None) == "no"


def test_tools_are_described_to_a_model_whose_template_has_none(tmp_path: Path) -> None:
    folder = write_model(tmp_path, WITHOUT_TOOLS)
    with pytest.raises(TokenError, match=r"has no tools.*sampling.tool_format: hermes"):
        Renderer.load(folder).check_tools()
    renderer = Renderer.load(folder, tool_format="hermes")
    renderer.check_tools()
    messages = [
        system("Be brief."),
        user("x"),
        calls(ONE, TWO, content="So."),
        result(0, "<|im_end|>"),
        result(1, "4"),
        assistant("done"),
        user("y"),
    ]
    text = renderer.render_text(renderer.plain(messages), [TOOL], generation_prompt=True)
    assert '"name": "calc"' in text.split("<|im_end|>")[0]
    results = "<tool_response>\n<|im_end|>\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in text
    encoded = renderer.encode_conversation(messages, [TOOL])
    whole = renderer.start(renderer.plain(messages[:5]), [TOOL]).ids
    assert encoded.token_ids.tolist()[: len(whole)] == whole
    end = renderer.end_of_turn_id or -1
    assert whole.count(end) == 4  # of the template alone: the one in a result is ordinary text
    assert whole.count(renderer._codec.token_id("<tool_response>") or -1) == 3  # pyright: ignore[reportPrivateUsage]
    answered = renderer.parse(sampled(renderer, calls(ONE, TWO, content="So.")), tools=[TOOL])
    assert [json.loads(each.arguments) for each in answered.tool_calls] == [json.loads(ONE), json.loads(TWO)]
    assert answered.content == "So."


def test_calls_and_results_for_a_template_without_tools_name_the_remedy(tmp_path: Path) -> None:
    renderer = Renderer.load(write_model(tmp_path, WITHOUT_TOOLS))
    messages = renderer.plain([user("x"), calls(ONE), result(0, "3")])
    with pytest.raises(TokenError, match=r"hold tool calls, but .* has no tools.*tool_format: hermes"):
        renderer.start(messages, None)


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "llama31"])
def test_training_data_may_begin_with_the_assistant(name: str, renderer_of: Callable[..., Renderer]) -> None:
    renderer = renderer_of(name)
    encoded = renderer.encode_conversation([assistant("Hello!"), user("Hi"), assistant("Bye")])
    text = renderer.decode(encoded.token_ids[encoded.assistant_mask], skip_special=True)
    assert "Hello!" in text
    assert "Bye" in text
    assert not encoded.assistant_mask[0]


def test_a_first_answer_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    source = "{% if messages[0].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}" + WITHOUT_TOOLS
    renderer = Renderer.load(write_model(tmp_path, source))
    with pytest.raises(TokenError, match="message 0 is an assistant message; put a system or user message before it"):
        renderer.encode_conversation([assistant("Hello!")])
