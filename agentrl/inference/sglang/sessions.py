"""The names of the sessions in which a server keeps the caches of running episodes."""

from __future__ import annotations

from uuid import uuid4


class Sessions:
    """The sessions of the episodes at one server, which keeps the cached prefixes of open ones."""

    def __init__(self) -> None:
        self.supported: bool | None = None
        """Whether the server has sessions; without them no call names one. None: not known yet."""
        self._prefix = uuid4().hex[:12]
        """SGLang never opens a closed session again, and the episodes of another run have the same ids."""

    def of(self, episode_id: str) -> str:
        """Return the id of an episode's session; empty where the server has none."""
        return f"{self._prefix}-{episode_id}" if self.supported else ""
