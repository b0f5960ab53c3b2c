"""Text of token ids, for stop strings and for the `text` field of replies.

Invariant: text is derived from ids; the text of a running request is never turned back into ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentrl.errors import ConfigError, RequestRejected
from agentrl.servers.embedded.spec import read_json


class TextCodec:
    """The tokenizer of a model directory, which may have none."""

    def __init__(self, path: str | Path) -> None:
        directory = Path(path)
        file = directory / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        self.eos_ids: frozenset[int] = frozenset()
        if not file.exists():
            return
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
        settings = directory / "tokenizer_config.json"
        if settings.exists():
            self.eos_ids = self._eos(read_json(settings))

    @property
    def available(self) -> bool:
        """Return whether there is a tokenizer."""
        return self._tokenizer is not None

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without adding special tokens."""
        if self._tokenizer is None:
            raise RequestRejected("this server has no tokenizer: send input_ids instead of text", status=400)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`, or "" without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def _eos(self, settings: Mapping[str, Any]) -> frozenset[int]:
        token = settings.get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token  # pyright: ignore[reportUnknownVariableType]
        if self._tokenizer is None or not isinstance(content, str):
            return frozenset()
        found = self._tokenizer.token_to_id(content)
        return frozenset() if found is None else frozenset((found,))
