"""The tokenizer of an import: ids, control tokens, pre-tokenizers and templates of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from agentrl.tokens.renderer import Renderer
from agentrl_gguf.header import read_header
from agentrl_gguf.importing import check_file, record_of, write_model_directory
from agentrl_gguf.pretokenizers import PRE_TOKENIZERS
from agentrl_gguf.tokenizer import read_tokenizer
from tests.gguf.writing import keys_of, tiny_model, write_gguf

TEXTS = ["Use the tool, then tell me 12345.", "  wörld\n\n\tdon't  ", "<tool_call>{}</tool_call>", "漢字 ½ ２３ it'S"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    tiny_model(folder, "qwen3", tie_word_embeddings=True)
    return folder


def written(folder: Path, model: Path, **keys: object) -> Path:
    path = write_gguf(folder / "tiny.gguf", model, keys={f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    checked = check_file(path)
    write_model_directory(checked, record_of(checked), folder / "imported")
    return folder / "imported"


def tokenizer_of(model: Path, folder: Path, **keys: object) -> dict[str, Any]:
    path = write_gguf(folder / "tiny.gguf", model, keys={f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    return dict(read_tokenizer(read_header(path), 10_000).tokenizer)


def test_ids_and_conversations_are_those_of_the_original(tmp_path: Path, model: Path) -> None:
    folder = written(tmp_path, model)
    original, ours = (Tokenizer.from_file(str(place / "tokenizer.json")) for place in (model, folder))
    loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text in TEXTS:
        assert ours.encode(text).ids == original.encode(text).ids == loaded(text).input_ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    first, second = (Renderer.load(place) for place in (model, folder))
    messages = first.plain([{"role": "user", "content": "<|im_end|> 12?"}])
    assert second.start(messages, None) == first.start(messages, None)
    assert (second.eos_ids, second.control_ids) == (first.eos_ids, first.control_ids)
    assert second.vocab_size == first.vocab_size


def test_control_tokens_are_special_and_tokens_of_users_are_not(tmp_path: Path, model: Path) -> None:
    added = {token["content"]: token["special"] for token in tokenizer_of(model, tmp_path)["added_tokens"]}
    published = json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    assert added == {token["content"]: token["special"] for token in published}
    assert set(added.values()) == {True, False}


def test_rows_without_a_token_stay_without_one(tmp_path: Path, model: Path) -> None:
    keys = keys_of(model)
    tokens, kinds = (list(keys[f"tokenizer.ggml.{name}"]) for name in ("tokens", "token_type"))
    count = len(tokens)
    tokens += [f"[PAD{count}]", f"[PAD{count + 1}]"]
    found = tokenizer_of(model, tmp_path, tokens=tokens, token_type=[*kinds, 5, 5])
    tokenizer = Tokenizer.from_str(json.dumps(found))
    assert tokenizer.get_vocab_size() == count
    assert tokenizer.id_to_token(count) is None


def test_a_text_begins_with_its_token_where_the_file_or_its_family_says_so(tmp_path: Path, model: Path) -> None:
    cases: list[tuple[dict[str, object], tuple[int, ...], tuple[int, ...]]] = [
        ({}, (), ()),
        ({"add_bos_token": True, "bos_token_id": 3}, (3,), ()),
        ({"add_bos_token": True, "bos_token_id": 3, "add_eos_token": True, "eos_token_id": 5}, (3,), (5,)),
        ({"pre": "llama-bpe", "bos_token_id": 3}, (3,), ()),
        ({"pre": "llama-bpe", "bos_token_id": 3, "add_bos_token": False}, (), ()),
    ]
    for number, (keys, before, after) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        tokenizer = Tokenizer.from_str(json.dumps(tokenizer_of(model, tmp_path / str(number), **keys)))
        plain = tokenizer.encode("one two", add_special_tokens=False).ids
        assert tuple(tokenizer.encode("one two").ids) == (*before, *plain, *after)


def test_all_end_tokens_end_an_output(tmp_path: Path, model: Path) -> None:
    folder = written(tmp_path, model, eos_token_id=1, eot_token_id=2, eom_token_id=1)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 2]
    assert Renderer.load(folder).eos_ids >= {1, 2}


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 123", ["a", "Ġ123"]),
        ("smollm", "a 123", ["a", "Ġ", "1", "2", "3"]),
        ("starcoder", "a½2", ["a", "Â½", "2"]),
        ("refact", "it's", ["it", "'s"]),
        ("qwen2", "it'S 12", ["it", "'S", "Ġ", "1", "2"]),
        ("llama-bpe", "it'S 12345", ["it", "'S", "Ġ", "123", "45"]),
        ("llama3", "\n\n x", ["ĊĊ", "Ġx"]),
    ],
)
def test_a_pre_tokenizer_cuts_as_its_family_does(
    tmp_path: Path, model: Path, pre: str, text: str, pieces: list[str]
) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_of(model, tmp_path, pre=pre, add_bos_token=False)))
    assert tokenizer.pre_tokenizer is not None
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_marks_of_qwen_are_composed_and_pieces_of_llama_are_looked_up_whole(tmp_path: Path, model: Path) -> None:
    assert tokenizer_of(model, tmp_path, pre="qwen2")["normalizer"] == {"type": "NFC"}
    assert PRE_TOKENIZERS["llama-bpe"].ignore_merges
    assert not PRE_TOKENIZERS["qwen2"].ignore_merges


def test_named_templates_stand_beside_the_one_of_conversations(tmp_path: Path, model: Path) -> None:
    keys = {"tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": "{{ messages }}"}
    checked = check_file(write_gguf(tmp_path / "tiny.gguf", model, keys=keys))
    write_model_directory(checked, record_of(checked), tmp_path / "imported")
    assert (tmp_path / "imported" / "additional_chat_templates" / "rag.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "imported" / "chat_template.jinja").read_text() == (model / "chat_template.jinja").read_text()


def test_a_tokenizer_of_sentencepiece_merges_by_score_and_falls_back_to_bytes(tmp_path: Path, model: Path) -> None:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"\u2581abcd",
        "ab",
        "bc",
        "\u2581a",
        "abc",
    ]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
    scores = [0.0] * (len(pieces) - 4) + [-3.0, -1.0, -2.0, -4.0]
    keys = {"pre": "default", "tokens": pieces, "token_type": kinds, "scores": scores, "merges": None}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "padding_token_id": None}
    for number, (prefix, expected) in enumerate([(True, ["\u2581a", "bc"]), (False, ["abc"])]):
        (tmp_path / str(number)).mkdir()
        path = write_gguf(
            tmp_path / str(number) / "tiny.gguf",
            model,
            keys={
                "tokenizer.ggml.model": "llama",
                "tokenizer.chat_template": None,
                **{f"tokenizer.ggml.{key}": value for key, value in {**keys, **ids, "add_space_prefix": prefix}.items()},
            },
        )
        found = read_tokenizer(read_header(path), 10_000).tokenizer
        tokenizer = Tokenizer.from_str(json.dumps(dict(found)))
        assert tokenizer.encode("abc").tokens == ["<s>", *expected]
        assert tokenizer.encode("é", add_special_tokens=False).tokens[-2:] == ["<0xC3>", "<0xA9>"]
        assert tokenizer.decode(tokenizer.encode("abc é d").ids) == "abc é d"
