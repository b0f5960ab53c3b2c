"""The calls that load and unload LoRA adapters, as SGLang's.

Invariant: a call answers once the engine has carried it out (HTTP 200) or refused it (400). Who waits for whom: an unload
waits for the running requests of its adapter, which have no deadline here.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from agentrl.servers.engine import AdapterReply, EngineAdapters
from agentrl.servers.http.errors import decode_body, json_reply


class _LoadAdapterBody(msgspec.Struct):
    lora_name: str
    lora_path: str
    pinned: bool = False


class _UnloadAdapterBody(msgspec.Struct):
    lora_name: str


class AdapterRoutes:
    """One method per endpoint."""

    def __init__(self, adapters: EngineAdapters) -> None:
        self._adapters = adapters

    def add_to(self, app: web.Application) -> None:
        """Add the routes to `app`."""
        app.router.add_post("/load_lora_adapter", self.load)
        app.router.add_post("/unload_lora_adapter", self.unload)
        app.router.add_post("/adapter_checksums", self.checksums)

    async def load(self, request: web.Request) -> web.Response:
        """Load an adapter from a directory."""
        sent = decode_body(await request.read(), _LoadAdapterBody)
        return _adapter_response(await self._adapters.load(sent.lora_name, sent.lora_path))

    async def unload(self, request: web.Request) -> web.Response:
        """Unload an adapter once no request uses it."""
        sent = decode_body(await request.read(), _UnloadAdapterBody)
        return _adapter_response(await self._adapters.unload(sent.lora_name))

    async def checksums(self, request: web.Request) -> web.Response:
        """Report the digest of each matrix of an adapter; SGLang has no such call."""
        sent = decode_body(await request.read(), _UnloadAdapterBody)
        return json_reply({"checksums": dict(self._adapters.checksums(sent.lora_name))})


def _adapter_response(done: AdapterReply) -> web.Response:
    body = {"success": done.success, "error_message": done.error or None, "loaded_adapters": dict(done.loaded)}
    return json_reply(body, status=200 if done.success else 400)
