"""Breaks for control token texts inside content: made before a template runs, undone by `restored`.

A text of several characters is broken by a *nonce*, secret digits after its first character. A text of one character gives
way to a *stand-in*, secret digits and the number of the character.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from agentrl.errors import ConfigError

_TRIES = 100


def secret_digits() -> str:
    """Return 28 random digits, which no text holds by chance."""
    return str(10**27 + secrets.randbelow(9 * 10**27))


_STAND_IN = secret_digits()
_STAND_INS = re.compile(_STAND_IN + "([0-9]{7})")


def make_nonce(control: Sequence[str]) -> str:
    """Return a nonce that forms no control token text with its neighbours; a `ConfigError` for control tokens of digits."""
    for text in control:
        if text.isdecimal():
            raise ConfigError(
                f"control token {text!r}: a special token of digits alone cannot be told from content; register it as an "
                "ordinary token in tokenizer.json"
            )
    pattern = re.compile("|".join(map(re.escape, control)) or "(?!)")
    for _ in range(_TRIES):
        nonce = secret_digits()
        found = (match for text in control for match in pattern.finditer(break_token(text, nonce)))
        if not any(match.start() <= len(nonce) and match.end() > 1 for match in found):  # none reaches into the digits
            return nonce
    raise ConfigError(
        f"control tokens {list(control)[:8]}: some are a character and digits, and cannot be told from content"
    )


def break_token(text: str, nonce: str) -> str:
    """Return the text of a control token such that it is none."""
    return f"{_STAND_IN}{ord(text):07d}" if len(text) == 1 else text[0] + nonce + text[1:]


def restored(text: str, nonce: str) -> str:
    """Return rendered text without the breaks."""
    text = text.replace(nonce, "")
    return _STAND_INS.sub(lambda match: chr(int(match[1])), text) if _STAND_IN in text else text
