"""A service that speaks E2B's API, for tests: its sandboxes are copies of a root, entered by bubblewrap."""

from __future__ import annotations

import base64
import json
import secrets
import struct
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from aiohttp import web
from anyio.abc import ByteReceiveStream, Process

from tests.support import fake_roots
from tests.support.fake_roots import copy_image, end, entry


class FakeE2b:
    """The API of the service, and envd of each sandbox."""

    def __init__(self, folder: Path, api_key: str) -> None:
        self.folder, self.api_key = folder, api_key
        self.asked: list[dict[str, object]] = []
        self.tokens: dict[str, str] = {}
        self.processes: dict[int, Process] = {}

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/sandboxes", self.make)
        app.router.add_get("/sandboxes/{name}", self.get)
        app.router.add_delete("/sandboxes/{name}", self.delete)
        app.router.add_post("/envd/{name}/process.Process/Start", self.start)
        app.router.add_post("/envd/{name}/process.Process/SendInput", self.send_input)
        return app

    async def make(self, request: web.Request) -> web.Response:
        if request.headers.get("X-API-Key") != self.api_key:
            return web.json_response({"code": 401, "message": "Invalid API key"}, status=401)
        asked = await request.json()
        self.asked.append(asked)
        name = f"i{secrets.token_hex(8)}"
        if not (self.folder / "images" / asked["templateID"]).is_dir():
            return web.json_response({"code": 404, "message": f"template '{asked['templateID']}' not found"}, status=404)
        copy_image(self.folder, asked["templateID"], name)
        await anyio.run_process([sys.executable, fake_roots.__file__, "hold", str(self.folder), name])
        self.tokens[name] = secrets.token_hex(8)
        made = {"templateID": asked["templateID"], "sandboxID": name, "clientID": "c", "envdVersion": "0.4.0"}
        return web.json_response({**made, "envdAccessToken": self.tokens[name], "domain": "e2b.app"}, status=201)

    async def get(self, request: web.Request) -> web.Response:
        return web.json_response({}, status=200 if request.match_info["name"] in self.tokens else 404)

    async def delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        known = self.tokens.pop(name, None)
        end(self.folder, name)
        return web.Response(status=404 if known is None else 204)

    async def start(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        assert request.headers["X-Access-Token"] == self.tokens[name]
        assert request.headers["Authorization"] == "Basic cm9vdDo="
        assert request.headers["Content-Type"] == "application/connect+json"
        body = await request.read()
        flags, length = struct.unpack(">BI", body[:5])
        assert (flags, length) == (0, len(body) - 5)
        process = json.loads(body[5:])["process"]
        variables = {"PATH": "/usr/bin:/bin", **process["envs"]}
        words = [*entry(self.folder, name, variables), process["cmd"], *process["args"]]
        answer = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        async with await anyio.open_process(words, start_new_session=True) as child:
            self.processes[child.pid] = child
            await answer.prepare(request)
            await self.send(answer, {"event": {"start": {"pid": child.pid}}})
            assert child.stdout is not None
            assert child.stderr is not None
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.copy, answer, "stdout", child.stdout)
                tasks.start_soon(self.copy, answer, "stderr", child.stderr)
            code = await child.wait()
        await self.send(answer, {"event": {"end": {"exited": True, "exitCode": code, "status": f"exit status {code}"}}})
        await answer.write(struct.pack(">BI", 2, 2) + b"{}")
        return answer

    async def copy(self, answer: web.StreamResponse, name: str, pipe: ByteReceiveStream) -> None:
        async for data in pipe:
            await self.send(answer, {"event": {"data": {name: base64.b64encode(data).decode()}}})

    async def send(self, answer: web.StreamResponse, message: object) -> None:
        data = json.dumps(message).encode()
        await answer.write(struct.pack(">BI", 0, len(data)) + data)

    async def send_input(self, request: web.Request) -> web.Response:
        body = await request.json()
        child = self.processes[body["process"]["pid"]]
        assert child.stdin is not None
        await child.stdin.send(base64.b64decode(body["input"]["stdin"]))
        return web.json_response({})


@asynccontextmanager
async def serving_e2b(folder: Path, api_key: str) -> AsyncGenerator[tuple[str, FakeE2b]]:
    """Serve the API on loopback; its sandboxes answer below `/envd/NAME`."""
    fake = FakeE2b(folder, api_key)
    runner = web.AppRunner(fake.application(), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}", fake
    finally:
        await runner.cleanup()
