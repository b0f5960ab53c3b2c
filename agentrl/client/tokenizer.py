"""The tokenizer of the policy, for token-level workflows.

Invariant: text that looks like a control token stays text; only the chat template writes control tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentrl.tokens.renderer import Renderer
from agentrl.types import Int32Array


class PolicyTokenizer:
    """Text to token ids and back, by the tokenizer of the policy."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    @property
    def vocab_size(self) -> int:
        """Rows of the model's vocabulary; ids are below it."""
        return self._renderer.vocab_size

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an output."""
        return self._renderer.eos_ids

    def encode(self, text: str) -> Int32Array:
        """Return the ids of text, [N] int32; never a control token, whatever the text says.

        Raises:
            TokenError: `text` is not valid Unicode.
        """
        return np.asarray(self._renderer.encode_content(text), np.int32)

    def decode(self, ids: Sequence[int] | Int32Array, *, skip_special: bool = False) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD.

        Args:
            ids: token ids.
            skip_special: leave out tokens registered as special.
        """
        return self._renderer.decode(ids, skip_special=skip_special)
