"""Loading, incremental rendering and supervised encoding."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.errors import ConfigError, TokenError
from agentrl.tokens.renderer import EncodedConversation, Renderer
from tests.tokens.dialogues import ONE, SHAPES, TOOL, TWO, assistant, call, calls, result, system, user
from tests.tokens.families import FAMILIES, write_family


def sampled_text(renderer: Renderer, encoded: EncodedConversation) -> list[str]:
    """Return the text of each stretch under the mask."""
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], encoded.assistant_mask.astype(int), [0]])))
    return [
        renderer.decode(encoded.token_ids[start:end], skip_special=False)
        for start, end in zip(bounds[::2], bounds[1::2], strict=True)
    ]


GOLDEN: dict[tuple[str, str], list[str]] = {
    ("qwen25", "two questions"): ["1<|im_end|>", "2<|im_end|>"],
    ("qwen25", "call"): [
        '<tool_call>\n{"name": "calc", "arguments": {"a": 1, "op": "+", "b": 2}}\n</tool_call><|im_end|>',
        "It is 3.<|im_end|>",
    ],
    ("qwen25", "call with text"): [
        'Let me see.\n<tool_call>\n{"name": "calc", "arguments": {"a": 1, "op": "+", "b": 2}}\n</tool_call><|im_end|>',
        "3<|im_end|>",
    ],
    ("qwen25", "parallel calls"): [
        '<tool_call>\n{"name": "calc", "arguments": {"a": 1, "op": "+", "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "calc", "arguments": {"op": "*", "a": 3, "b": -4}}\n</tool_call><|im_end|>',
        "3, -12<|im_end|>",
    ],
    ("qwen3", "question"): ["<think>\n\n</think>\n\n3<|im_end|>"],
    ("qwen3", "thinking"): ["<think>\none and one\n</think>\n\n2<|im_end|>", "<think>\n\n</think>\n\n4<|im_end|>"],
    ("qwen3", "thinking calls"): [
        "<think>\nI need a tool\n</think>\n\n"
        '<tool_call>\n{"name": "calc", "arguments": {"a": 1, "op": "+", "b": 2}}\n</tool_call><|im_end|>',
        "<think>\ndone\n</think>\n\n3<|im_end|>",
        "<think>\neasy\n</think>\n\nz<|im_end|>",
    ],
    ("llama31", "system"): ["A test.<|eot_id|>"],
    ("llama31", "retry"): [
        '{"name": "calc", "parameters": {"a": 1, "op": "+", "b": 2}}<|eot_id|>',
        '{"name": "calc", "parameters": {"a": 1, "op": "+", "b": 2}}<|eot_id|>',
        "3<|eot_id|>",
    ],
    ("mistral", "two questions"): [" 1</s>", " 2</s>"],
    ("mistral", "call"): [
        '[TOOL_CALLS] [{"name": "calc", "arguments": {"a": 1, "op": "+", "b": 2}, "id": "call00000"}]</s>',
        " It is 3.</s>",
    ],
    ("deepseek_r1", "thinking"): [
        "one and one\n</think>\n\n2<｜end▁of▁sentence｜>",
        "\n</think>\n\n4<｜end▁of▁sentence｜>",
    ],
}


@pytest.mark.parametrize(("name", "shape"), GOLDEN)
def test_the_mask_covers_what_the_model_would_sample(name: str, shape: str, renderer_of: Callable[..., Renderer]):
    messages, tools = SHAPES[shape]
    renderer = renderer_of(name)
    encoded = renderer.encode_conversation(messages, [TOOL] if tools else None)
    texts = sampled_text(renderer, encoded)
    if name == "mistral":  # decoding a piece of a SentencePiece text drops its leading space
        texts, expected = [text.strip() for text in texts], [text.strip() for text in GOLDEN[name, shape]]
        assert texts == expected
    else:
        assert texts == GOLDEN[name, shape]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["qwen25", "llama31", "llama32"])
def test_the_pieces_add_up_to_the_whole_for_templates_that_only_append(
    name: str, shape: str, renderer_of: Callable[..., Renderer]
):
    messages, tools = SHAPES[shape]
    renderer = renderer_of(name)
    if name in ("llama31", "llama32") and shape == "parallel calls":
        with pytest.raises(TokenError, match="only supports single tool-calls"):
            renderer.encode_conversation(messages, [TOOL])
        return
    encoded = renderer.encode_conversation(messages, [TOOL] if tools else None)
    shown = [TOOL] if tools else None
    whole = renderer.render_text(renderer.plain(messages), shown, generation_prompt=False)
    expected = renderer._codec.encode_rendered(whole)  # pyright: ignore[reportPrivateUsage]
    end = renderer.end_of_turn_id or -1
    assert encoded.token_ids.tolist() == expected[: len(expected) - expected[::-1].index(end)]
    assert encoded.token_ids.dtype == np.int32
    assert encoded.assistant_mask.dtype == np.bool_


def test_messages_after_the_last_answer_are_left_out(renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("qwen25")
    short = renderer.encode_conversation([user("a"), assistant("b")])
    longer = renderer.encode_conversation([user("a"), assistant("b"), user("c")])
    assert short.token_ids.tolist() == longer.token_ids.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_new_messages_render_as_they_do_in_the_whole_conversation(name: str, renderer_of: Callable[..., Renderer]):
    renderer = renderer_of(name)
    histories: list[list[dict[str, Any]]] = [
        [user("a"), assistant("ANSWER")],
        [system("s"), user("a"), assistant("b"), user("c"), assistant("ANSWER")],
    ]
    for history in histories:
        for new in ([user("hello  <b> \n")], [user("x"), assistant("y"), user("z")]):
            plain = renderer.plain([*history, *new])
            whole = renderer.render_text(plain, generation_prompt=True)
            ids = renderer.extend(plain[: len(history)], plain[len(history) :], None, last_output_id=None).ids
            tail = whole.split("ANSWER")[1]
            assert ids == renderer._codec.encode_rendered(tail)  # pyright: ignore[reportPrivateUsage]


def test_the_sampled_end_of_turn_is_not_repeated(renderer_of: Callable[..., Renderer]):
    for name in FAMILIES:
        renderer = renderer_of(name)
        history, new = renderer.plain([user("a"), assistant("b")]), renderer.plain([user("c")])
        closed = renderer.extend(history, new, None, last_output_id=renderer.end_of_turn_id).ids
        unfinished = renderer.extend(history, new, None, last_output_id=5).ids
        assert [renderer.end_of_turn_id, *closed] == unfinished


PROPERTIES = {
    # local, only appends, opens thinking, text arguments
    "qwen25": (True, True, False, False),
    "qwen3": (True, False, False, False),
    "llama31": (True, True, False, False),
    "llama32": (True, True, False, False),
    "mistral": (False, False, False, False),
    "deepseek_r1": (False, False, True, True),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_probing_finds_the_nature_of_each_template(name: str, renderer_of: Callable[..., Renderer]):
    renderer = renderer_of(name)
    found = (
        renderer.local,
        renderer.text_prefix_preserving,
        renderer.thinking_open,
        renderer._style.text_arguments,  # pyright: ignore[reportPrivateUsage]
    )
    assert found == PROPERTIES[name]
    assert renderer.decode([renderer.end_of_turn_id or 0], skip_special=False) == FAMILIES[name].end


def test_qwen3_strips_thinking_at_the_next_question_only(renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("qwen3")
    assert renderer.traits(renderer.plain([user("x")]), True).rewrites_thinking
    assert not renderer.traits(renderer.plain([result(0, "x")]), True).rewrites_thinking


def test_deepseek_r1_would_hide_a_late_system_message(renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("deepseek_r1")
    traits = renderer.traits(renderer.plain([system("x"), user("y")]), False)
    assert not traits.complete
    with pytest.raises(TokenError, match="does not write new messages"):
        renderer.extend([], renderer.plain([system("x"), user("y")]), None, last_output_id=None)


def test_ids_and_sizes_come_from_the_model_files(renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("llama31")
    texts = {renderer.decode([number], skip_special=False) for number in renderer.eos_ids}
    assert texts == {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"}
    assert renderer.max_context == 4096
    assert renderer.vocab_size > max(renderer.control_ids)


def test_tools_without_a_parser_are_refused(renderer_of: Callable[..., Renderer]):
    for name in ("qwen25", "qwen3", "llama31", "llama32", "mistral"):
        renderer_of(name).check_tools()
    with pytest.raises(TokenError, match=r"has no tools.*tool_format: hermes"):
        renderer_of("deepseek_r1").check_tools()


def test_tools_of_an_unknown_format_are_refused(tmp_path: Path):
    folder = write_family(tmp_path, FAMILIES["qwen25"])
    template = (folder / "chat_template.jinja").read_text().replace("tool_call>", "invoke>")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(TokenError, match="no known form reads the tool calls"):
        Renderer.load(folder).check_tools()


def test_text_arguments_that_are_not_json_are_shown_as_they_are(renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("qwen25")
    broken = {"role": "assistant", "content": None, "tool_calls": [call(0, "{broken")]}
    text = renderer.render_text(renderer.plain([user("x"), broken]), [TOOL], generation_prompt=False)
    assert '"arguments": "{broken"' in text


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("chat_template.jinja", None, "no chat template"),
        ("tokenizer.json", b"nonsense", "tokenizer.json: expected JSON"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json: expected JSON"),
        ("config.json", b"[]", "config.json: expected a JSON object"),
        ("config.json", b'{"vocab_size": 9}', "do not belong together"),
        ("chat_template.jinja", b"{{", "not valid Jinja"),
        ("chat_template.jinja", b"hello", "cannot render a question and an answer"),
        ("chat_template.jinja", b"\xff\xfe", "cannot be read as UTF-8"),
    ],
)
def test_a_broken_model_directory_is_a_config_error(file: str, content: bytes | None, message: str, tmp_path: Path):
    folder = write_family(tmp_path, FAMILIES["qwen3"])
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Renderer.load(folder)


def test_a_missing_directory_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        Renderer.load(tmp_path / "nowhere")


def test_templates_may_stand_in_the_tokenizer_config(tmp_path: Path):
    folder = write_family(tmp_path, FAMILIES["qwen25"])
    source = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    plain = Renderer.load(write_family(tmp_path / "other", FAMILIES["qwen25"])).plain([user("x")])
    for value in (source, [{"name": "default", "template": source}, {"name": "rag", "template": "y"}]):
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": value}))
        assert "<|im_start|>user\nx<|im_end|>" in Renderer.load(folder).render_text(plain, generation_prompt=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": [{"name": "default"}]}))
    with pytest.raises(ConfigError, match="expected name and template"):
        Renderer.load(folder)


def test_special_tokens_may_be_objects_and_eos_may_come_from_the_tokenizer(tmp_path: Path):
    folder = write_family(tmp_path, FAMILIES["mistral"])
    (folder / "generation_config.json").unlink()
    (folder / "config.json").unlink()
    config = {"bos_token": {"content": "<s>", "special": True}, "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    renderer = Renderer.load(folder)
    assert renderer.eos_ids == {renderer.end_of_turn_id}
    assert renderer.max_context is None
    assert renderer.render_text(renderer.plain([user("x")]), generation_prompt=True) == "<s>[INST] x[/INST]"


def test_parallel_results_may_come_without_names(renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("qwen3")
    history = renderer.plain([user("x"), calls(ONE, TWO)])
    new = renderer.plain([result(0, "3"), {"role": "tool", "content": "4"}])
    text = renderer.decode(
        renderer.extend(history, new, [TOOL], last_output_id=renderer.end_of_turn_id).ids, skip_special=False
    )
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_messages_the_template_would_leave_out_are_refused(tmp_path: Path, renderer_of: Callable[..., Renderer]):
    folder = write_family(tmp_path, FAMILIES["qwen25"])
    source = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(source.replace('message.role == "tool"', 'message.role == "other"'))
    renderer = Renderer.load(folder)
    for messages in ([user("x"), calls(ONE), result(0, "3")], [{"role": "function", "name": "f", "content": "3"}]):
        with pytest.raises(TokenError, match=r"the chat template leaves out (tool|function) messages"):
            renderer.start(renderer.plain(messages), None)
    assert renderer_of("deepseek_r1").start(renderer_of("deepseek_r1").plain([system("s"), user("x")]), None).ids


def test_developer_messages_are_system_messages_to_templates_that_do_not_know_them(renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("qwen3")
    developer, plain = ([{"role": role, "content": "s"}, user("x")] for role in ("developer", "system"))
    assert renderer.start(renderer.plain(developer), None).ids == renderer.start(renderer.plain(plain), None).ids


def test_only_text_can_be_rendered(renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("qwen3")
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    parts: list[dict[str, Any]] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert renderer.plain([{"role": "user", "content": parts}]) == [{"role": "user", "content": "ab"}]
    for content in ([image], 7, [3]):
        with pytest.raises(TokenError, match=r"text"):
            renderer.plain([{"role": "user", "content": content}])
    with pytest.raises(TokenError, match="function_call is not supported"):
        renderer.plain([{"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}])


@pytest.mark.starts
def test_the_package_imports_neither_torch_nor_transformers():
    code = (
        "import sys, agentrl.tokens.graph, agentrl.tokens.renderer, agentrl.tokens.verify\n"
        "print([name for name in ('torch', 'transformers', 'ray', 'sglang') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
