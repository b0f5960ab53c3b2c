"""What a request adds is rendered from its new messages, and is what the template writes for them in the conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agentrl.errors import TokenError
from agentrl.tokens.messages import message_key
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.template.rendering import PlainMessage
from tests.support.tiny import MARKERS, SPECIALS, build_tokenizer
from tests.tokens.dialogues import result, user
from tests.tokens.families import FAMILIES
from tests.tokens.texts import MIXED, tokenizer_of

HISTORY: list[PlainMessage] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]

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


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_text_that_looks_like_markup_adds_no_control_token(
    name: str, renderer_of: Callable[..., Renderer], data: st.DataObject
):
    renderer = renderer_of(name)
    roles = data.draw(st.sampled_from(ROLES))
    texts = data.draw(st.lists(TEXTS, min_size=len(roles), max_size=len(roles)))
    try:
        added, plain = (
            renderer.extend(HISTORY, renderer.plain(messages_of(roles, each)), None, last_output_id=None)
            for each in (texts, ["x"] * len(roles))
        )
    except TokenError:
        return
    if not (name == "qwen3" and any("tool_response" in text for text in texts)):  # its template looks for that text
        controls = [[number for number in each.ids if number in renderer.control_ids] for each in (added, plain)]
        assert controls[0] == controls[1]


WRITTEN = {
    "a line": "{role}\n{text}<|im_end|>\n",
    "after a space": "{role} {text}<|im_end|>\n",
    "two lines": "{role}\n{text}\n{text}!<|im_end|>\n",
    "percent": "100%\n{text}%s<|im_end|>\n",
}


@pytest.fixture(scope="module")
def cutting(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Renderer, Tokenizer]]:
    """Returns a renderer whose tokenizer cuts text as a model family does, or not at all, and merges over line ends."""
    made: dict[tuple[str, str], tuple[Renderer, Tokenizer]] = {}

    def load(kind: str, template: str) -> tuple[Renderer, Tokenizer]:
        if (kind, template) not in made:
            folder = tmp_path_factory.mktemp("cutting")
            written = WRITTEN[template].replace("{role}", "{{ m.role }}").replace("{text}", "{{ m.content }}")
            build_tokenizer(
                folder,
                chat_template="{% for m in messages %}<|im_start|>" + written + "{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            )
            data, own = json.loads((folder / "tokenizer.json").read_text()), json.loads(tokenizer_of(kind).to_str())
            size = len(own["model"]["vocab"])
            own["added_tokens"] = [{**token, "id": size + at} for at, token in enumerate(data["added_tokens"])]
            (folder / "tokenizer.json").write_text(json.dumps(own))
            made[kind, template] = Renderer.load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
        return made[kind, template]

    return load


@pytest.mark.parametrize("kind", ["qwen3", "llama3", "uncut"])
@pytest.mark.parametrize("template", WRITTEN)
@settings(max_examples=150, deadline=None)
@given(text=MIXED)
def test_new_messages_get_the_ids_that_the_whole_tokenizer_gives_their_text(
    kind: str, template: str, cutting: Callable[[str, str], tuple[Renderer, Tokenizer]], text: str
):
    renderer, tokenizer = cutting(kind, template)
    assume(not any(token in text for token in MARKERS + SPECIALS))
    written = WRITTEN[template].replace("{role}", "user").replace("{text}", text)
    chunk = f"<|im_end|>\n<|im_start|>{written}<|im_start|>assistant\n"
    expected = tokenizer.encode(chunk, add_special_tokens=False).ids
    assert renderer.extend(HISTORY, renderer.plain([user(text)]), None, last_output_id=None).ids == expected


def test_a_template_may_look_at_the_text_of_a_new_message(renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("qwen3")
    for text in ("<tool_response>\n3\n</tool_response>", "a question"):
        new = renderer.plain([user(text)])
        added = renderer.extend([], new, None, last_output_id=None)
        whole = renderer.render_text([*HISTORY, *new], generation_prompt=True)
        assert whole.endswith(renderer.decode(added.ids, skip_special=False))


def renderer_writing(folder: Path, message: str) -> Renderer:
    """Return the renderer of a template that writes `message` after the role of each message."""
    build_tokenizer(
        folder,
        chat_template=f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}{message}\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    return Renderer.load(folder)


def test_a_template_that_counts_messages_renders_the_whole_conversation(tmp_path: Path):
    renderer = renderer_writing(tmp_path, " {{ loop.index }}\n{{ m.content }}<|im_end|>")
    assert not renderer.local
    new = renderer.plain([user("x")])
    history = [renderer.plain([user("a"), {"role": "assistant", "content": "b"}])]
    history.append([*history[0], *history[0]])
    first, second = (renderer.extend(messages, new, None, last_output_id=None) for messages in history)
    assert "user 3" in renderer.decode(first.ids, skip_special=False)
    assert "user 5" in renderer.decode(second.ids, skip_special=False)


def test_a_template_may_strip_and_test_the_text_of_a_new_message(tmp_path: Path):
    stripped = "\n{{ m.content.strip() }}{% if m.content.startswith('a') %}A{% else %}{{ m.content.rstrip('z') }}{% endif %}"
    renderer = renderer_writing(tmp_path, f"{stripped}<|im_end|>")
    written = {"abc": "abcA", "zbz": "zbzzb", " zcz ": "zcz zcz ", "zdz": "zdzzd"}
    for text, expected in written.items():
        added = renderer.extend([], renderer.plain([user(text)]), None, last_output_id=None)
        shown = renderer.decode(added.ids, skip_special=False)
        assert shown == f"<|im_end|>\n<|im_start|>user\n{expected}<|im_end|>\n<|im_start|>assistant\n"


class Move(str, Enum):  # noqa: UP042 - with a `__str__` that is not its text
    LEFT = "go left"
    USER = "user"


@pytest.mark.parametrize("name", FAMILIES)
def test_text_of_a_class_of_its_own_is_its_characters(name: str, renderer_of: Callable[..., Renderer]):
    renderer = renderer_of(name)
    plain = [{"role": "user", "content": "go left"}, {"role": "assistant", "content": "go left"}]
    named = [{"role": Move.USER, "content": Move.LEFT}, {"role": "assistant", "content": Move.LEFT}]
    assert renderer.start(renderer.plain(named), None) == renderer.start(renderer.plain(plain), None)
    extended = [
        renderer.extend(renderer.plain(plain), renderer.plain(said[:1]), None, last_output_id=None)
        for said in (named, plain)
    ]
    assert extended[0] == extended[1]
    assert [message_key(message) for message in named] == [message_key(message) for message in plain]
    assert message_key({**result(0, "3"), "name": Move.LEFT}) == message_key({**result(0, "3"), "name": "go left"})
