"""What cannot be imported exactly is refused by name, with the fix, before anything is written."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from agentrl.config.run import ModelConfig
from agentrl.errors import ConfigError
from agentrl_gguf.commands.import_model import import_command
from agentrl_gguf.header import read_header
from agentrl_gguf.importing import check_file
from tests.gguf.writing import huge_gguf, interleaved, tensors_of, tiny_model, write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    tiny_model(folder, "llama")
    return folder


def refusal(path: Path, **options: object) -> str:
    """Return the message of a refused import, which writes nothing."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(ConfigError) as caught:
        import_command(str(path), path.parent / "imported", **options)  # pyright: ignore[reportArgumentType]
    assert sorted(path.parent.iterdir()) == before
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


NORM = np.ones(32, np.float32)
CASES: dict[str, tuple[dict[str, object], dict[str, np.ndarray | None], str]] = {
    "another architecture": ({"arch": "mamba"}, {}, "architecture 'mamba' cannot be imported; known are gemma3, llama"),
    "an unknown key": ({"llama.logit_scale": 0.5}, {}, "unknown keys llama.logit_scale: they may change"),
    "an unknown key of the tokenizer": (
        {"tokenizer.ggml.precompiled_charsmap": [1, 2]},
        {},
        "unknown keys tokenizer.ggml.precompiled_charsmap",
    ),
    "experts": ({"llama.expert_count": 8}, {}, "a mixture of experts"),
    "attention that looks ahead": ({"llama.attention.causal": False}, {}, "looks ahead"),
    "an adapter": ({"general.type": "adapter"}, {}, "general.type is 'adapter': expected a whole model"),
    "one of several pieces": ({"split.count": 3}, {}, "llama-gguf-split --merge"),
    "a key that is missing": ({"llama.embedding_length": None}, {}, "no key llama.embedding_length"),
    "a key of another type": ({"llama.embedding_length": "x"}, {}, "llama.embedding_length: expected int, got str"),
    "heads that do not fit": ({"llama.attention.head_count": 3}, {}, "do not fit together"),
    "layers that differ": ({"llama.feed_forward_length": [64, 32]}, {}, "differs between layers: [32, 64]"),
    "values of another length": ({"llama.attention.value_length": 4}, {}, "expected the same for both"),
    "a part of a head that rotates": ({"llama.rope.dimension_count": 4}, {}, "only a part of each head"),
    "rotations by yarn": ({"llama.rope.scaling.type": "yarn"}, {}, "is 'yarn': expected none or linear"),
    "factors of no known scaling": ({}, {"rope_freqs.weight": np.asarray([1, 2, 3, 4.5])}, "not the scaling of Llama 3"),
    "another layout": ({"llama.tensor_data_layout": "odd"}, {}, "tensor_data_layout is 'odd'"),
    "a tensor that is missing": ({}, {"blk.1.ffn_up.weight": None}, "tensors are missing: blk.1.ffn_up.weight"),
    "no weights": ({}, {"token_embd.weight": None}, "no tensor token_embd.weight"),
    "a tensor too many": ({}, {"blk.0.attn_sinks.weight": NORM}, "unknown tensors blk.0.attn_sinks.weight"),
    "a tensor of another shape": (
        {},
        {"blk.0.attn_norm.weight": NORM[:16]},
        "is [16], and the keys of the file make it [32]",
    ),
    "no tokenizer": ({"tokenizer.ggml.tokens": None}, {}, "no tokenizer: the key tokenizer.ggml.model or"),
    "no kind of tokenizer": ({"tokenizer.ggml.model": None}, {}, "no tokenizer"),
    "another kind of tokenizer": ({"tokenizer.ggml.model": "rwkv"}, {}, "tokenizer.ggml.model is 'rwkv'"),
    "no pre-tokenizer": ({"tokenizer.ggml.pre": None}, {}, "no key tokenizer.ggml.pre: expected one of gpt-2"),
    "an unknown pre-tokenizer": (
        {"tokenizer.ggml.pre": "tekken"},
        {},
        "tokenizer.ggml.pre is 'tekken': expected one of gpt-2",
    ),
    "no merges": ({"tokenizer.ggml.merges": None}, {}, "no key tokenizer.ggml.merges"),
    "a merge of no tokens": ({"tokenizer.ggml.merges": ["zq qz"]}, {}, "the merge 'zq qz' is no pair of tokens"),
    "types of other tokens": ({"tokenizer.ggml.token_type": [1]}, {}, "tokens with 1 types"),
    "a token twice": ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, {}, "'a' is there twice"),
    "an end beyond the tokens": ({"tokenizer.ggml.eos_token_id": 9999}, {}, "eos_token_id is 9999, and there are"),
    "a beginning that is not named": ({"tokenizer.ggml.add_bos_token": True}, {}, "add_bos_token is true, and no"),
    "a template beyond the tokens": (
        {"tokenizer.chat_template": "<|user|>{{ messages }}<|im_end|>"},
        {},
        "writes <|user|>, which the vocabulary does not have",
    ),
    "a weight that is not finite": (
        {},
        {"output_norm.weight": NORM * np.nan},
        "output_norm.weight holds values that are not finite",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_imported_exactly_is_refused_by_name(tmp_path: Path, model: Path, case: str) -> None:
    keys, tensors, expected = CASES[case]
    arch = str(keys["arch"]) if "arch" in keys else None
    keys = {key: value for key, value in keys.items() if key != "arch"}
    path = write_gguf(tmp_path / "tiny.gguf", model, arch=arch, keys=keys, tensors=tensors)
    assert expected in refusal(path)


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path, model: Path) -> None:
    tensors = tensors_of(model)
    short = {name: tensors[name][:100] for name in ("token_embd.weight", "output.weight")}
    path = write_gguf(tmp_path / "tiny.gguf", model, tensors=short)
    assert " tokens, and embeddings for 100; tokenizer and model" in refusal(path)


def test_a_file_that_was_cut_short_is_refused_wherever_it_was_cut(tmp_path: Path, model: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf", model).read_bytes()
    path = tmp_path / "tiny.gguf"
    for length in [0, 3, 10, 24, 100, 5_000, *range(30, 24_000, 997), len(whole) - 40_000, len(whole) - 1]:
        path.write_bytes(whole[:length])
        message = refusal(path)
        assert "cut short or damaged" in message or "not a GGUF file" in message or "it is empty" in message, length


def test_damaged_counts_end_at_once(tmp_path: Path, model: Path) -> None:
    """Counts and lengths of a header are read from the file, and may say anything."""
    path = write_gguf(tmp_path / "tiny.gguf", model)
    whole, drawn = path.read_bytes(), np.random.default_rng(0)
    header = min(tensor.start for tensor in read_header(path).tensors.values())
    for _ in range(300):
        damaged = bytearray(whole)
        at = int(drawn.integers(4, header - 8))
        damaged[at : at + 8] = drawn.choice([b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f" + b"\0" * 4, drawn.bytes(8)])
        path.write_bytes(damaged)
        with suppress(ConfigError):  # some damage changes nothing that matters
            check_file(path)


def test_a_file_of_the_other_byte_order_or_another_kind_is_refused(tmp_path: Path, model: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model)
    path.write_bytes(b"GGUF\0\0\0\3" + path.read_bytes()[8:])
    assert "of the other byte order" in refusal(path)
    path.write_bytes(b"PK\3\4 a zip")
    assert "does not begin with the letters GGUF" in refusal(path)
    assert "cannot be read" in refusal(tmp_path / "absent.gguf")


def test_a_type_that_the_package_does_not_know_is_refused(tmp_path: Path, model: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model)
    name = b"output_norm.weight"
    whole = bytearray(path.read_bytes())
    at = whole.index(name) + len(name) + 4 + 8
    for number, expected in ((200, "has the type 200, which the package gguf does not know"), (27, "has the type I64")):
        whole[at : at + 4] = number.to_bytes(4, "little")
        path.write_bytes(whole + b"\0" * 256)
        assert expected in refusal(path)


def test_a_model_that_the_disk_cannot_hold_is_refused_before_it_is_read(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with holes says that it holds 9e12 weights."""
    path = huge_gguf(tmp_path / "huge.gguf", model)
    assert "weights take 35" in refusal(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"model\.path: .*huge\.gguf: its .* weights take"):
        _ = ModelConfig(path=str(path)).directory
    assert not (tmp_path / "cache").exists()


def test_the_package_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "needs the package gguf: pip install 'agentrl[gguf]'" in refusal(path)


def test_rows_of_biases_are_put_back_too(model: Path) -> None:
    assert interleaved(np.arange(8), 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
