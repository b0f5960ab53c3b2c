"""Text encoded piece by piece has the ids of the whole tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings

from agentrl.tokens.renderer import Renderer
from agentrl.tokens.tokenizer.codec import WordEncoder, word_encoder
from tests.tokens.texts import MIXED, ODD, SPLITS, tokenizer_of


@cache
def encoder_of(kind: str) -> WordEncoder:
    tokenizer = tokenizer_of(kind)
    encoder = word_encoder(json.loads(tokenizer.to_str()), tokenizer)
    assert encoder is not None
    return encoder


def whole(kind: str, text: str) -> list[int]:
    return tokenizer_of(kind).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", SPLITS)
def test_every_short_ascii_text_is_cut_and_encoded_as_by_the_tokenizer(kind: str):
    encoder, cut = encoder_of(kind), tokenizer_of(kind).pre_tokenizer
    assert cut is not None
    kinds = "asL1' \n\r\t.\x00"
    texts = {"".join(letters) for length in range(1, 5) for letters in product(kinds, repeat=length)}
    texts |= {"".join(letters) for letters in product("re'Ll 7\n", repeat=5)}
    endings = product(
        ("", "a", "A", " "), ("'s", "'T", "'re", "'rE", "'ve", "'Ve", "'m", "'ll", "'lL", "'d"), ("", "a", "E", "1", "'")
    )
    texts |= {"".join(letters) for letters in endings}
    around = [*product(("", "a", " ", "\n", "'"), ("", "a", "\n", " 1"))]
    texts |= {f"{before}{chr(code)}{after}" for code in range(128) for before, after in around}
    for text in texts:
        expected = [text[start:end] for _, (start, end) in cut.pre_tokenize_str(text)]
        assert encoder._pieces(text) == expected, repr(text)  # pyright: ignore[reportPrivateUsage]
        assert encoder.encode(text) == whole(kind, text), repr(text)


@pytest.mark.parametrize("kind", SPLITS)
@settings(max_examples=1000, deadline=None)
@given(text=MIXED)
def test_any_text_has_the_ids_of_the_whole_tokenizer(kind: str, text: str):
    assert encoder_of(kind).encode(text) == whole(kind, text)


@pytest.mark.parametrize("kind", SPLITS)
def test_short_texts_with_odd_characters_have_the_ids_of_the_whole_tokenizer(kind: str):
    encoder = encoder_of(kind)
    for letters in product("a' \n.", ODD, "a1 \n.", ("", "b", "\nb", "\n\nb", " \n b")):
        for text in ("".join(letters), "b\n" + "".join(letters), "b\n\n" + "".join(letters) + "\n\nb"):
            assert encoder.encode(text) == whole(kind, text), repr(text)


@pytest.mark.parametrize("kind", SPLITS)
def test_lines_of_text_that_is_not_all_ascii_are_still_looked_up(kind: str):
    text = "a wordy line\nand its naïve end.\nthen another wordy line\nand the last"
    encoder = encoder_of(kind)
    assert encoder.encode(text) == whole(kind, text)
    assert " another" in encoder._ids_of.__self__  # pyright: ignore[reportPrivateUsage, reportFunctionMemberAccess]


def test_the_memory_is_bounded_and_keeps_no_long_piece():
    tokenizer = tokenizer_of("qwen3")
    encoder = word_encoder(json.loads(tokenizer.to_str()), tokenizer)
    assert encoder is not None
    memory: dict[str, object] = encoder._ids_of.__self__  # pyright: ignore
    text = " ".join(map("".join, product("abcdefghijklmnopqrst", repeat=4))) + " " + "a" * 33
    sizes = {len(memory) for _ in range(3) if encoder.encode(text) == whole("qwen3", text)}
    assert len(sizes) == 3
    assert max(sizes) <= 16_384
    assert max(map(len, memory)) <= 32


SPLIT, LEVEL = "pre_tokenizer/pretokenizers/0", "pre_tokenizer/pretokenizers/1"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model/dropout", 0.5),
        ("model/type", "WordPiece"),
        ("added_tokens", [{"id": 7, "content": "word"}]),
        ("normalizer", {"type": "Lowercase"}),
        ("pre_tokenizer", None),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}),
        ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}),
        (f"{SPLIT}/pattern", {"Regex": r"\s+"}),
        (f"{SPLIT}/pattern", {"String": " "}),
        (f"{SPLIT}/behavior", "Removed"),
        (f"{SPLIT}/invert", True),
        (SPLIT, {"type": "Digits", "individual_digits": True}),
        (f"{LEVEL}/add_prefix_space", True),
        (f"{LEVEL}/use_regex", True),
    ],
)
def test_a_tokenizer_that_works_otherwise_is_left_alone(field: str, value: object):
    tokenizer = tokenizer_of("qwen3")
    data = json.loads(tokenizer.to_str())
    assert word_encoder(data, tokenizer) is not None
    *path, last = field.split("/")
    inner: Any = data
    for name in path:
        inner = inner[int(name) if name.isdigit() else name]
    inner[int(last) if last.isdigit() else last] = value
    assert word_encoder(data, tokenizer) is None


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "llama31", "llama32", "deepseek_r1"])
def test_the_usual_families_are_encoded_so(name: str, renderer_of: Callable[..., Renderer]):
    assert renderer_of(name)._codec._words is not None  # pyright: ignore[reportPrivateUsage]
