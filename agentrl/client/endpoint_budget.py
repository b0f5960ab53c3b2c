"""The token budget of an episode against an endpoint, which samples out of sight.

Invariant: what is spent is what the endpoint itself counted; with a budget, every call asks for at most what is left of it,
and an answer that was not counted is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from agentrl.client.endpoint_reply import Source
from agentrl.client.ledger import Ledger
from agentrl.types import StopReason

_LIMITS = ("max_tokens", "max_completion_tokens")


class Budget:
    """How many tokens the endpoint may sample for one episode; None: any number."""

    def __init__(self, max_tokens: int | None) -> None:
        self._max = max_tokens
        self._spent = 0.0

    def check(self, ledger: Ledger) -> None:
        """Raise `EpisodeLimit` if the budget is spent, `WorkflowError` if the episode is closed by then."""
        if self._max is not None and self._spent >= self._max:
            ledger.check_open()
            raise ledger.spent(StopReason.TOKEN_LIMIT, f"{self._spent:g} of {self._max} sampled tokens are spent")

    def clip(self, arguments: dict[str, object], *, stream: bool) -> bool:
        """Lower the output limit in a call's `arguments` to what is left, and have a stream counted.

        Returns:
            Whether the stream will have a chunk with the count that the workflow did not ask for.
        """
        if self._max is None:
            return False
        room = int(self._max - self._spent)
        body = _mapping(arguments.get("extra_body"))
        for given in (arguments, body):
            for name in _LIMITS:
                if name in given:
                    asked = given[name]
                    given[name] = min(asked, room) if isinstance(asked, (int, float)) else room
        if not any(name in given for given in (arguments, body) for name in _LIMITS):
            arguments["max_tokens"] = room
        if body:
            arguments["extra_body"] = body
        options = _mapping(arguments.get("stream_options"))
        if stream:
            arguments["stream_options"] = {**options, "include_usage": True}
        return stream and not options.get("include_usage")

    def spend(self, count: float | None, source: Source) -> None:
        """Count the tokens of an answer.

        Raises:
            ReplyError: there is a budget, and the endpoint did not count.
        """
        if self._max is None:
            return
        if count is None or not count > 0:
            raise source.uncounted()
        self._spent += count


def _mapping(value: object) -> dict[str, object]:
    return dict(cast("Mapping[str, object]", value)) if isinstance(value, Mapping) else {}
