"""Cassettes: what an episode got from outside, recorded once and played again offline.

`agentrl.cassette.now()` is the clock that a cassette records.
"""

from agentrl.episode.tape import now

__all__ = ["now"]
