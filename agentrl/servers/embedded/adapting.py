"""The adapters that an embedded engine has: loading and unloading by name, while requests run.

Invariant: a name stands for one adapter from its load to its unload. A load or unload that is refused changes nothing. Who
waits for whom: an unload waits until the running requests of its adapter have ended; new ones are refused meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import anyio
import anyio.to_thread

from agentrl.errors import ConfigError, RequestRejected
from agentrl.servers.embedded.core import Core
from agentrl.servers.embedded.low_rank import ServedAdapter
from agentrl.servers.embedded.updating import Gate
from agentrl.servers.engine import AdapterReply

MAX_ADAPTERS: Final = 64
"""Adapters that an engine holds at once."""


class LoadedAdapters:
    """The adapters by name; `read` reads one in a thread."""

    def __init__(self, core: Core, gate: Gate, read: Callable[[str, str], ServedAdapter]) -> None:
        self._core, self._gate, self._read = core, gate, read
        self._loaded: dict[str, ServedAdapter] = {}
        self._lock = anyio.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that requests may give."""
        return tuple(self._loaded)

    def find(self, name: str) -> ServedAdapter:
        """Return the adapter that a request names; RequestRejected where it is not loaded."""
        if name not in self._loaded:
            loaded = ", ".join(self._loaded) or "none"
            raise RequestRejected(f"the LoRA adapter {name!r} is not loaded; loaded: {loaded}", status=400)
        return self._loaded[name]

    async def load(self, name: str, path: str) -> AdapterReply:
        """Read the adapter in `path` and serve it as `name`. Cancellation: it is not loaded."""
        async with self._lock:
            if name in self._loaded:
                return self._refusal(f"LoRA adapter {name} is already loaded")
            if len(self._loaded) >= MAX_ADAPTERS:
                return self._refusal(f"{MAX_ADAPTERS} LoRA adapters are loaded; unload one first")
            try:
                adapter = await anyio.to_thread.run_sync(self._read, name, path, abandon_on_cancel=True)
            except (ConfigError, OSError) as error:
                return self._refusal(str(error))
            self._loaded[name] = adapter
            return self._reply()

    async def unload(self, name: str) -> AdapterReply:
        """Forget an adapter, after its requests have ended. Cancellation: it is forgotten, and its requests run on."""
        adapter = self._loaded.pop(name, None)
        if adapter is None:
            return self._refusal(f"LoRA adapter {name} is not loaded")
        self._gate.watched += 1
        try:
            while adapter in self._core.adapted:
                await self._gate.wait()
        finally:
            self._gate.watched -= 1
        return self._reply()

    def checksums(self, name: str) -> Mapping[str, str]:
        """Return the digest of each matrix of an adapter, by PEFT's name."""
        return self.find(name).checksums()

    def _reply(self) -> AdapterReply:
        return AdapterReply(success=True, error="", loaded={name: each.path for name, each in self._loaded.items()})

    def _refusal(self, error: str) -> AdapterReply:
        return AdapterReply(success=False, error=error, loaded={name: each.path for name, each in self._loaded.items()})
