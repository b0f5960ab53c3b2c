"""The types of tokens in a file, as `tokenizer.ggml.token_type` numbers them."""

from __future__ import annotations

from typing import Final

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
OWN: Final = 4
"""Of users: found in text before it is cut, and not special."""
UNUSED: Final = 5
BYTE: Final = 6
