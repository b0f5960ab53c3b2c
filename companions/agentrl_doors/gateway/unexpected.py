"""Errors that nobody expected, for the client of a call: in the shape of its dialect, never as a bare page.

Invariant: neither the answer nor the log holds the words of such an error, which may be those of a conversation.
"""

from __future__ import annotations

import logging
from pathlib import Path
from traceback import extract_tb
from typing import Final

from agentrl_doors.gateway.body import CallRefused

_LOGGER: Final = logging.getLogger("agentrl_doors.gateway")


def unexpected_error(error: Exception) -> CallRefused:
    """Log where an error came from, and return the refusal that tells a client of it."""
    frames = extract_tb(error.__traceback__)
    kind, last = type(error).__name__, frames[-1] if frames else None
    place = "" if last is None else f" at {Path(last.filename).name}, line {last.lineno}"
    steps = " < ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in reversed(frames[-12:]))
    _LOGGER.error("a call failed by a fault of this server: %s%s (%s)", kind, place, steps)
    return CallRefused(
        f"this server failed on the call by a fault of its own: {kind}{place}; its log has the way there. Please report it",
        status=500,
        code="server_fault",
    )
