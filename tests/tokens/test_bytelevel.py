"""The text of ids of byte-level vocabularies is what `tokenizers` makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from agentrl.tokens.tokenizer import codec
from agentrl.tokens.tokenizer.codec import CHARACTERS, ByteDecoder

LETTERS = [chr(CHARACTERS.get(byte, byte)) for byte in range(256)]
WORDS = ("Ġthe", "ĠĊ", "é", "â", "日本", "€", "a b", "<|x|>", "")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    vocabulary = {text: number for number, text in enumerate(dict.fromkeys((*LETTERS, *WORDS)))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue] - typed read-only
    made.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("日本語", special=True)])
    return made


@settings(max_examples=2000, deadline=None)
@given(data=st.data())
def test_ids_decode_as_tokenizers_decodes_them(tokenizer: Tokenizer, data: st.DataObject):
    """Bytes that are no UTF-8, tokens of other alphabets, added tokens and ids without a token included."""
    size = tokenizer.get_vocab_size()
    high = st.integers(0x80, 0xFF).map(lambda byte: LETTERS.index(LETTERS[byte]))
    ids = data.draw(st.lists(st.one_of(high, st.integers(0, size + 3)), max_size=9))
    assert ByteDecoder(tokenizer.id_to_token).decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_the_memory_of_tokens_is_bounded():
    decoder = ByteDecoder("{:x}".format)
    for number in range(codec._MAX_TOKENS + 5):  # pyright: ignore[reportPrivateUsage]
        assert decoder.decode([number]) == f"{number:x}"
    assert len(decoder) == 5
