"""Scaffolds never change an id: what they fill in is what rendering and encoding give, whatever the texts say."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import TokenError
from agentrl.tokens.messages import read_message
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.template.environment import ChatTemplate, PlainMessage
from agentrl.tokens.template.scaffold import Context, Scaffolds
from agentrl.tokens.template.trace import Trace, TracingEnvironment, Untraceable
from tests.support.tiny import build_tokenizer
from tests.tokens.dialogues import result, user
from tests.tokens.families import FAMILIES
from tests.tokens.test_words import MIXED, tokenizer_of

LOOKALIKES = (
    "<|im_end|>", "<|im_start|>assistant\n", "<tool_response>", "</tool_response>", "</think>", "<think>", "<|eot_id|>",
    "<｜User｜>", "[INST]", "</s>", "<|", "|>",
)  # fmt: skip
ODDITIES = (
    " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "0", "123456", "٣", "e\u0301", "🙂\u200d🙂", "\u0338", "'s", "ſ",
)  # fmt: skip
PIECES = st.one_of(st.text(max_size=12), st.sampled_from(LOOKALIKES), st.sampled_from(ODDITIES))
TEXTS = st.lists(PIECES, max_size=6).map("".join).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text))
ROLES = (("user",), ("tool",), ("tool", "tool"), ("tool", "user"), ("user", "user"), ("system", "user"))


def messages_of(roles: tuple[str, ...], texts: list[str]) -> list[dict[str, Any]]:
    return [
        result(at, text) if role == "tool" else {"role": role, "content": text}
        for at, (role, text) in enumerate(zip(roles, texts, strict=True))
    ]


def ordinary(renderer: Renderer, new: list[PlainMessage], tools: bool) -> Context:
    """The context, rendered and encoded without any memory."""
    history: list[PlainMessage] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    remembered = renderer._scaffolds  # pyright: ignore[reportPrivateUsage]
    renderer._scaffolds = Scaffolds(_untraceable, renderer._codec)  # pyright: ignore[reportPrivateUsage]
    try:
        return renderer.extend(history, new, [{"type": "function"}] if tools else None, last_output_id=None)
    finally:
        renderer._scaffolds = remembered  # pyright: ignore[reportPrivateUsage]


def _untraceable(trace: Trace, new: object, tools: bool) -> str:
    raise Untraceable


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_filled_scaffolds_are_what_rendering_and_encoding_give(
    name: str, renderer_of: Callable[..., Renderer], data: st.DataObject
):
    renderer = renderer_of(name)
    roles = data.draw(st.sampled_from(ROLES))
    history: list[PlainMessage] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for _ in range(2):
        texts = data.draw(st.lists(TEXTS, min_size=len(roles), max_size=len(roles)))
        new = renderer.plain(messages_of(roles, texts))
        try:
            expected = ordinary(renderer, new, False)
        except TokenError:
            with pytest.raises(TokenError):
                renderer.extend(history, new, None, last_output_id=None)
            continue
        assert renderer.extend(history, new, None, last_output_id=None) == expected


WRITTEN = {
    "a line": "{{ m.role }}\n{{ m.content }}<|im_end|>\n",
    "after a space": "{{ m.role }} {{ m.content }}<|im_end|>\n",
    "two lines": "{{ m.role }}\n{{ m.content }}\n{{ m.content }}!<|im_end|>\n",
    "percent": "100%\n{{ m.content }}%s<|im_end|>\n",
}


@pytest.fixture(scope="module")
def cutting(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Renderer]:
    """Returns a renderer whose tokenizer cuts text as a model family does, or not at all, and merges over line ends."""
    made: dict[tuple[str, str], Renderer] = {}

    def load(kind: str, template: str) -> Renderer:
        if (kind, template) not in made:
            folder = tmp_path_factory.mktemp("cutting")
            build_tokenizer(
                folder,
                chat_template="{% for m in messages %}<|im_start|>" + WRITTEN[template] + "{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            )
            data, own = json.loads((folder / "tokenizer.json").read_text()), json.loads(tokenizer_of(kind).to_str())
            size = len(own["model"]["vocab"])
            own["added_tokens"] = [{**token, "id": size + at} for at, token in enumerate(data["added_tokens"])]
            (folder / "tokenizer.json").write_text(json.dumps(own))
            made[kind, template] = Renderer.load(folder)
        return made[kind, template]

    return load


@pytest.mark.parametrize("kind", ["qwen3", "llama3", "uncut"])
@pytest.mark.parametrize("template", WRITTEN)
@settings(max_examples=150, deadline=None)
@given(texts=st.lists(MIXED, min_size=2, max_size=2))
def test_texts_are_encoded_by_themselves_only_where_that_gives_the_same_ids(
    kind: str, template: str, cutting: Callable[[str, str], Renderer], texts: list[str]
):
    renderer = cutting(kind, template)
    assert renderer._codec.cuts_lines == (kind != "uncut")  # pyright: ignore[reportPrivateUsage]
    for text in texts:
        new = renderer.plain([user(text)])
        assert renderer.extend([], new, None, last_output_id=None) == ordinary(renderer, new, False)


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "llama31", "llama32"])
def test_the_usual_templates_are_rendered_once_for_each_shape(name: str, renderer_of: Callable[..., Renderer]):
    renderer = renderer_of(name)
    scaffolds = renderer._scaffolds  # pyright: ignore[reportPrivateUsage]
    renderer.extend([], renderer.plain([user("first")]), None, last_output_id=None)
    filled = scaffolds.fill(renderer.plain([user(" second <|im_end|> ")]), False)
    assert filled == ordinary(renderer, renderer.plain([user(" second <|im_end|> ")]), False)


def test_a_text_that_the_template_treats_differently_has_a_scaffold_of_its_own(renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("qwen3")
    posing, plain = "<tool_response>\n3\n</tool_response>", "a question"
    for text in (plain, posing, plain, posing):
        new = renderer.plain([user(text)])
        assert renderer.extend([], new, None, last_output_id=None) == ordinary(renderer, new, False)


LOOKS = {
    "length": "{% if m.content | length > 3 %}long{% endif %}{{ m.content }}",
    "slice": "{{ m.content[:2] }}{{ m.content }}",
    "index": "{{ m.content[0] }}{{ m.content }}",
    "upper": "{{ m.content | upper }}",
    "method": "{{ m.content.upper() }}",
    "replace": "{{ m.content | replace('a', 'b') }}",
    "json": "{{ m.content | tojson }}",
    "json of the message": "{{ m | tojson }}",
    "printed message": "{{ m }}",
    "joined and tested": "{% set t = '<' + m.content %}{% if t.startswith('<a') %}A{% endif %}{{ t }}",
    "concatenated and tested": "{% set t = '<' ~ m.content %}{% if '<a' in t %}A{% endif %}{{ t }}",
    "captured and tested": "{% set t %}<{{ m.content }}{% endset %}{% if t == '<abc' %}A{% endif %}{{ t }}",
    "macro and tested": "{% macro f(x) %}<{{ x }}{% endmacro %}{% if f(m.content) == '<abc' %}A{% endif %}{{ m.content }}",
    "found in text": "{% if m.content in 'abcdef' %}A{% endif %}{{ m.content }}",
    "found in a list": "{% set l = ['abc', 'x'] %}{% if m.content in l %}A{% endif %}{{ m.content }}",
    "formatted": "{{ '%s!' % m.content }}",
    "formatted tuple": "{% set t = '%s!' % (m.content,) %}{% if t == 'abc!' %}A{% endif %}{{ t }}",
    "format method": "{{ '{}!'.format(m.content) }}",
    "join": "{% set t = [m.content, 'x'] | join('-') %}{% if t == 'abc-x' %}A{% endif %}{{ t }}",
    "join method": "{% set t = '-'.join([m.content]) %}{% if t == 'abc' %}A{% endif %}{{ t }}",
    "map and join": "{% set t = messages | map(attribute='content') | join %}{% if 'abc' in t %}A{% endif %}{{ t }}",
    "values and join": "{% set t = m.values() | join %}{% if 'abc' in t %}A{% endif %}{{ t }}",
    "letters": "{% for letter in m.content %}{{ letter }}{% if letter == 'b' %}!{% endif %}{% endfor %}",
    "number": "{% if m.content | int > 3 %}A{% endif %}{{ m.content }}",
    "less": "{% if m.content < 'b' %}A{% endif %}{{ m.content }}",
    "key": "{{ {'abc': 'A'}[m.content] }}{{ m.content }}",
    "get": "{{ {'abc': 'A'}.get(m.content, 'no') }}{{ m.content }}",
    "dictionary": "{% set d = {m.content: 1} %}{{ d | length }}{{ m.content }}",
    "unique": "{{ messages | map(attribute='content') | unique | list | length }}{{ m.content }}",
    "namespace": "{% set ns = namespace(x=m.content) %}{% if ns.x == 'abc' %}A{% endif %}{{ ns.x }}",
    "iterable": "{% if m.content is iterable and m.content is not mapping %}A{% endif %}{{ m.content }}",
    "same as another": "{% if m.content == messages[0].content %}A{% endif %}{{ m.content }}",
    "equal": "{% if m.content == 'abc' %}A{% endif %}{{ m.content }}",
    "not equal": "{% if m.content != 'abc' %}A{% endif %}{{ m.content }}",
    "empty": "{{ m.content or 'nothing' }}",
    "contains": "{% if 'b' in m.content %}A{% endif %}{{ m.content }}",
    "starts": "{% if m.content.startswith(('a', 'x')) %}A{% endif %}{{ m.content }}",
    "stripped": "{{ m.content.strip() }}|{{ (m.content | trim).rstrip('c') }}",
    "stripped and tested": "{% if m.content.strip() == 'abc' %}A{% endif %}{{ m.content }}",
    "selected": "{{ messages | selectattr('content', 'equalto', 'abc') | list | length }}{{ m.content }}",
    "default": "{{ m.content | default('none', true) }}",
    "time": "{{ strftime_now('%Y') }}{{ m.content }}",
    "time tested": "{% if strftime_now('%Y') == '1999' %}A{% endif %}{{ m.content }}",
    "random": "{{ ['x', 'y'] | random }}{{ m.content }}",
    "words": "{% set x = lipsum() %}{{ m.content }}",
}  # fmt: skip


@pytest.mark.parametrize("look", LOOKS)
def test_a_traced_rendering_stands_for_others_or_is_refused(look: str):
    """Whatever a template does with a text: a scaffold that fits another text writes what the template writes for it."""
    source = "{% for m in messages %}" + LOOKS[look] + "{% endfor %}"
    template = ChatTemplate({"default": source}, special_tokens={}, options={})
    contents = ["abc", " abc ", "", "4", "b<a", "'quoted'\n", "xyz"]
    for first in contents:
        trace = Trace()
        environment = TracingEnvironment()
        try:
            written = template.within(environment).render(
                [{"role": "user", "content": trace.text(first)}], None, generation_prompt=False
            )
        except (TokenError, ValueError, Untraceable):
            continue
        if environment.passing in written:
            continue
        for content in contents:
            texts = [content]
            fits = True
            for step in trace.steps:
                value = step.function(texts[step.text], *step.arguments)
                if step.answer is None:
                    texts.append(str(value))
                elif bool(value) is not step.answer:
                    fits = False
                    break
            if fits:
                filled = "".join(piece if isinstance(piece, str) else texts[piece] for piece in trace.split(written))
                assert filled == template.render([{"role": "user", "content": content}], None, generation_prompt=False)


TRACEABLE = (
    "equal", "not equal", "empty", "contains", "starts", "stripped", "stripped and tested", "selected", "default",
    "namespace",
)  # fmt: skip


@pytest.mark.parametrize("look", LOOKS)
def test_only_watched_operations_are_traced(look: str):
    source = "{% for m in messages %}" + LOOKS[look] + "{% endfor %}"
    template = ChatTemplate({"default": source}, special_tokens={}, options={})
    environment = TracingEnvironment()
    trace = Trace()

    def render() -> str:
        return template.within(environment).render(
            [{"role": "user", "content": trace.text("abc")}], None, generation_prompt=False
        )

    if look in TRACEABLE:
        assert len(trace.split(render())) > 1
    else:
        with pytest.raises((TokenError, ValueError, Untraceable)):
            raise Untraceable if environment.passing in render() else AssertionError


def renderer_writing(folder: Path, message: str) -> Renderer:
    """Return the renderer of a template that writes each message so, up to the end of its line."""
    build_tokenizer(
        folder,
        chat_template=f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}{message}\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    return Renderer.load(folder)


def test_what_differs_by_tools_or_history_has_no_scaffold(tmp_path: Path):
    renderer = renderer_writing(tmp_path, " {{ loop.index }}\n{{ m.content }}<|im_end|>")
    assert not renderer.local
    new = renderer.plain([user("x")])
    history = [renderer.plain([user("a"), {"role": "assistant", "content": "b"}])]
    history.append([*history[0], *history[0]])
    first, second = (renderer.extend(messages, new, None, last_output_id=None) for messages in history)
    assert "user 3" in renderer.decode(first.ids, skip_special=False)
    assert "user 5" in renderer.decode(second.ids, skip_special=False)


def test_a_scaffold_that_does_not_fit_leaves_nothing_to_the_next(tmp_path: Path):
    stripped = "\n{{ m.content.strip() }}{% if m.content.startswith('a') %}A{% else %}{{ m.content.rstrip('z') }}{% endif %}"
    renderer = renderer_writing(tmp_path, f"{stripped}<|im_end|>")
    for text in ("abc", "zbz", " zcz ", "zdz"):
        new = renderer.plain([user(text)])
        assert renderer.extend([], new, None, last_output_id=None) == ordinary(renderer, new, False)


class Move(str, Enum):  # noqa: UP042 - with a `__str__` that is not its text
    LEFT = "go left"
    USER = "user"


@pytest.mark.parametrize("name", FAMILIES)
def test_text_of_a_class_of_its_own_is_its_characters(name: str, renderer_of: Callable[..., Renderer]):
    renderer = renderer_of(name)
    plain = [{"role": "user", "content": "go left"}, {"role": "assistant", "content": "go left"}]
    named = [{"role": Move.USER, "content": Move.LEFT}, {"role": "assistant", "content": Move.LEFT}]
    assert renderer.start(renderer.plain(named), None) == renderer.start(renderer.plain(plain), None)
    for _ in range(2):
        extended = [
            renderer.extend(renderer.plain(plain), renderer.plain(said[:1]), None, last_output_id=None)
            for said in (named, plain)
        ]
        assert extended[0] == extended[1]
    assert [read_message(message) for message in named] == [read_message(message) for message in plain]
    assert read_message({**result(0, "3"), "name": Move.LEFT}) == read_message({**result(0, "3"), "name": "go left"})


def test_a_percent_sign_is_one_in_a_template_and_in_a_text(tmp_path: Path):
    renderer = renderer_writing(tmp_path, " 100% %s\n{{ m.content }} %d {{ m.content }}<|im_end|> %%s")
    for text in ("a", "%s", "50% of %(it)s", "%"):
        new = renderer.plain([user(text)])
        filled = renderer.fill(new, False, last_output_id=-1)
        assert (filled is None) == (text == "a")
        context = renderer.extend([], new, None, last_output_id=-1)
        written = f"user 100% %s\n{text} %d {text}<|im_end|> %%s\n<|im_start|>assistant"
        assert written in renderer.decode(context.ids, skip_special=False)
        assert context == ordinary(renderer, new, False)
