"""What a run refuses, as the failure of a test.

Invariant: a check refuses a function for every result for which a run does.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from agentrl.errors import AgentRLError


@contextmanager
def refused_as_failure() -> Generator[None, None, None]:
    """Raise errors of agentrl as AssertionError; as a decorator, those of a whole function."""
    try:
        yield
    except AgentRLError as error:
        raise AssertionError(str(error)) from error
