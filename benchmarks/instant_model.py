"""What the benchmarks of the client share: a tokenizer like Qwen's, texts to talk about, and a model that answers at once.

Invariant: every caller gets the same tokenizer, the same texts in the same order and the same answers.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import cycle
from pathlib import Path
from string import ascii_letters, ascii_lowercase, ascii_uppercase

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from agentrl.inference.backend import GenerateRequest, Generation, GenerationChunk
from agentrl.types import StopReason, VersionSpan
from tests.support.tiny import CHAT_TEMPLATE, MARKERS, SPECIALS

VOCABULARY = 16_384
TRAINED_ON = 1_500_000
"""Characters of the corpus the tokenizer is trained on; the rest is what episodes are about."""
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 and Qwen3 cut text into pieces; the benchmark's tokenizer works as theirs, with a vocabulary of its own."""


class Instant:
    """A backend in this process that answers at once."""

    def __init__(self, answers: Sequence[Generation]) -> None:
        self._answers = cycle(answers)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the next of the prepared answers."""
        return next(self._answers)

    def stream(self, request: GenerateRequest) -> AbstractAsyncContextManager[AsyncIterator[GenerationChunk]]:
        """Refuse."""
        raise RuntimeError("this benchmark does not stream")


class Corpus:
    """Hands out a text piece by piece; it begins again when all is used."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def take(self, size: int) -> str:
        """Return the next `size` characters, and those up to the end of the word."""
        end = self._text.find(" ", self._at + size)
        if end < 0:
            self._at, end = 0, self._text.index(" ", size)
        text, self._at = self._text[self._at : end], end
        return text


def standard_library() -> str:
    """Return the source of Python's standard library, the files in an order that is arbitrary and always the same."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(root.rglob("*.py")) if "site-packages" not in file.parts]
    random.Random(0).shuffle(files)
    return "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)


def installed_source() -> str:
    """Return the source of installed packages, in ASCII, the files in an order that is arbitrary and always the same."""
    root = Path(sysconfig.get_path("purelib"))
    files = [file for name in ("torch", "transformers") for file in sorted((root / name).rglob("*.py"))]
    random.Random(0).shuffle(files)
    return "\n".join(file.read_text(encoding="ascii", errors="ignore") for file in files)


def in_unseen_words(text: str, rng: random.Random) -> str:
    """Return `text` with its letters exchanged at random: as many words, as long, and hardly one met before."""
    exchanged = "".join(rng.sample(ascii_lowercase, 26) + rng.sample(ascii_uppercase, 26))
    return text.translate(str.maketrans(ascii_letters, exchanged))


def save_tokenizer(folder: Path, text: str) -> tuple[Tokenizer, Tokenizer]:
    """Train a byte-level BPE on the beginning of `text` and write its files and a chat template to `folder`.

    Returns:
        The tokenizer, and the same without added tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue] - typed read-only
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, level])  # pyright: ignore[reportAttributeAccessIssue] - typed read-only
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue] - typed read-only
    size = VOCABULARY - len(SPECIALS) - len(MARKERS)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([text[:TRAINED_ON]], trainer)
    bare = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "max_position_embeddings": 65_536}))
    return tokenizer, bare


def answer(ids: Sequence[int], end_of_turn: int) -> Generation:
    """Return the generation of `ids`, ended by the end of the turn."""
    output_ids = np.array([*ids, end_of_turn], np.int32)
    return Generation(
        output_ids=output_ids,
        output_logprobs=-np.linspace(0.01, 3.0, len(output_ids), dtype=np.float32),
        spans=(VersionSpan(start=0, end=len(output_ids), version=0),),
        stop_reason=StopReason.STOP,
        matched_stop=end_of_turn,
    )
