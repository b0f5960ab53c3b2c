"""The template sandbox behaves as the one of transformers does."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError, TokenError
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.template.rendering import ChatTemplate
from tests.tokens.dialogues import SHAPES, TOOL, user
from tests.tokens.families import FAMILIES


def template(source: str, max_chars: int = 10**6, max_seconds: float = 10.0) -> ChatTemplate:
    return ChatTemplate(
        {"default": source}, special_tokens={"bos_token": "<s>"}, options={}, max_chars=max_chars, max_seconds=max_seconds
    )


def reference_text(
    path: Path, messages: list[dict[str, Any]], tools: bool, *, generation_prompt: bool, **options: bool
) -> tuple[str, list[int]]:
    """Return what transformers renders, with tool arguments as values where the family takes them so."""
    from transformers import PreTrainedTokenizerFast

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    values = json.loads(json.dumps(messages))
    for message in values:
        for call in message.get("tool_calls", ()):
            if path.name != "deepseek_r1":
                function = call["function"]
                call["function"] = {"name": function["name"], "arguments": json.loads(function["arguments"])}
        if message.get("content") is None:
            message["content"] = ""
    text = tokenizer.apply_chat_template(
        values, tools=[TOOL] if tools else None, tokenize=False, add_generation_prompt=generation_prompt, **options
    )
    return str(text), tokenizer.encode(str(text), add_special_tokens=False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("generation_prompt", [True, False])
def test_text_and_ids_equal_those_of_transformers(
    name: str,
    shape: str,
    generation_prompt: bool,
    family_path: Callable[[str], Path],
    renderer_of: Callable[..., Renderer],
):
    messages, tools = SHAPES[shape]
    renderer = renderer_of(name)
    try:
        expected, expected_ids = reference_text(family_path(name), messages, tools, generation_prompt=generation_prompt)
    except Exception as error:
        if type(error).__name__ != "TemplateError":
            raise
        with pytest.raises(TokenError, match="the chat template refused"):
            renderer.render_text(renderer.plain(messages), [TOOL] if tools else None, generation_prompt=generation_prompt)
        return
    plain = renderer.plain(messages)
    assert renderer.render_text(plain, [TOOL] if tools else None, generation_prompt=generation_prompt) == expected
    if generation_prompt:
        ids = renderer.start(plain, [TOOL] if tools else None).ids
        assert ids == expected_ids


def test_template_options_reach_the_template(family_path: Callable[[str], Path], renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("qwen3", enable_thinking=False)
    messages = [user("hello")]
    expected, _ = reference_text(family_path("qwen3"), messages, False, generation_prompt=True, enable_thinking=False)
    assert renderer.render_text(renderer.plain(messages), generation_prompt=True) == expected
    assert expected.endswith("<think>\n\n</think>\n\n")


def test_tojson_escapes_nothing_but_json():
    text = template("{{ messages[0].content | tojson }}").render(
        [{"role": "user", "content": "<é> & 'q' \"d\"\n"}], None, generation_prompt=False
    )
    assert text == '"<é> & \'q\' \\"d\\"\\n"'


def test_generation_blocks_loop_controls_and_helpers_work():
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endfor %}|{{ strftime_now('%Y') | length }}|{{ dict(a=1).a }}|{{ bos_token }}"
    )
    messages: list[dict[str, object]] = [{"role": "tool", "content": "no"}, {"role": "assistant", "content": "yes"}]
    assert template(source).render(messages, None, generation_prompt=False) == "yes|4|1|<s>"


def test_the_tool_use_template_is_used_with_tools():
    named = ChatTemplate({"default": "plain", "tool_use": "tools"}, special_tokens={}, options={})
    assert named.render([], None, generation_prompt=True) == "plain"
    assert named.render([], [TOOL], generation_prompt=True) == "tools"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}{{ messages.append(1) }}",
        "{{ dict.__init__.__globals__ }}",
        "{% set ns = namespace(__init__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_a_template_that_misbehaves_ends_in_a_token_error(source: str):
    with pytest.raises(TokenError, match="chat template"):
        template(source).render([{"role": "user", "content": "x"}], None, generation_prompt=True)


def test_a_template_changes_its_own_lists_and_dicts_alone():
    own = "{% set l, d = [], {} %}{% set _ = l.append(1) %}{% set _ = d.update({'a': 2}) %}{{ l.pop() }}{{ d.a }}"
    assert template(own).render([user("x")], None, generation_prompt=True) == "12"
    for change in ("messages.append(1)", "messages[0].update({'role': 'tool'})", "tools.pop()", "tools[0].pop('type')"):
        with pytest.raises(TokenError, match="unsafe"):
            template(f"{{{{ {change} }}}}").render([user("x")], [{"type": "function"}], generation_prompt=True)


def test_a_template_that_writes_too_much_is_stopped():
    with pytest.raises(TokenError, match="more than 1000 characters"):
        template("{% for i in range(90000) %}aaaa{{ i }}{% endfor %}", max_chars=1000).render(
            [], None, generation_prompt=True
        )


def test_a_template_that_runs_too_long_is_stopped():
    with pytest.raises(TokenError, match=r"more than 0\.0 s"):
        template("{% for i in range(9000) %}a{{ i }}{% endfor %}", max_seconds=0.0).render([], None, generation_prompt=True)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{% set x = f(60) %}",
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 else '' }}{% endfor %}",
    ],
)
def test_a_template_that_never_writes_is_stopped(source: str):
    with pytest.raises(TokenError, match=r"more than 0\.1 s"):
        template(source, max_seconds=0.1).render([], None, generation_prompt=True)


def test_loops_know_their_length_and_end():
    source = "{% for m in messages if m.role %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}{% endfor %}"
    assert template(source).render([{"role": "a"}, {"role": ""}, {"role": "b"}], None, generation_prompt=True) == "1/2,2/2."
    empty = "{% for x in missing %}x{% else %}none{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}"
    assert template(empty).render([], None, generation_prompt=True) == "nonea1"


def test_broken_jinja_and_missing_default_are_config_errors():
    with pytest.raises(ConfigError, match="not valid Jinja"):
        template("{% if %}")
    with pytest.raises(ConfigError, match="named 'default'"):
        ChatTemplate({"rag": "x"}, special_tokens={}, options={})
    with pytest.raises(ConfigError, match="characters"):
        template("x" * 1_000_001)
