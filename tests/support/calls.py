"""Model calls of agentrl's own client that a test can wait on token by token."""

from __future__ import annotations

from uuid import uuid4

import anyio
from anyio.abc import TaskGroup

from agentrl.inference.backend import Backend, Context, GenerateRequest, Generation, SamplingParams
from agentrl.inference.sglang.server import SGLangServer
from agentrl.weights.types import Publication
from tests.support.servers import CONTROL_S
from tests.support.tap import Tap

ENDLESS = 4000
"""More tokens than any test waits for; such calls are aborted."""


def ask(ids: list[int], max_new_tokens: int, *, sampling: SamplingParams | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id=uuid4().hex,
        episode_id="episode",
        context=Context.of(ids),
        sampling=sampling or SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
    )


class Whole:
    """An unstreamed model call in a task; cancel it by `scope`."""

    def __init__(self, client: Backend, request: GenerateRequest) -> None:
        self.client, self.request = client, request
        self.result: Generation | None = None
        self.scope = anyio.CancelScope()
        self._over = anyio.Event()

    async def run(self) -> None:
        with self.scope:
            self.result = await self.client.generate(self.request)
        self._over.set()

    async def ended(self) -> None:
        """Wait for its end, whatever it is."""
        with anyio.fail_after(CONTROL_S):
            await self._over.wait()

    async def finished(self) -> Generation:
        await self.ended()
        assert self.result is not None
        return self.result


class Call:
    """A model call in a task, whose tokens on the way can be waited for."""

    def __init__(self, client: Backend, request: GenerateRequest) -> None:
        self.client, self.request = client, request
        self.tokens = 0
        self.result: Generation | None = None
        self._news = anyio.Event()

    async def run(self) -> None:
        async with self.client.stream(self.request) as chunks:
            async for chunk in chunks:
                self.tokens += len(chunk.output_ids)
                self.result = chunk.generation or self.result
                event, self._news = self._news, anyio.Event()
                event.set()

    async def more(self, tokens: int) -> None:
        """Wait for that many more tokens."""
        goal = self.tokens + tokens
        with anyio.fail_after(CONTROL_S):
            while self.tokens < goal:
                await self._news.wait()

    async def finished(self) -> Generation:
        with anyio.fail_after(CONTROL_S):
            while self.result is None:
                await self._news.wait()
        return self.result


def begin(tasks: TaskGroup, client: Backend, ids: list[int], max_new_tokens: int = ENDLESS) -> Call:
    call = Call(client, ask(ids, max_new_tokens))
    tasks.start_soon(call.run)
    return call


async def give_up_update(client: SGLangServer, tap: Tap, publication: Publication) -> None:
    """Ask for an update through the tap, and give it up once it is on its way to the server, which goes on with it."""
    path = "/update_weights_from_disk"
    before = tap.paths.count(path)
    async with anyio.create_task_group() as group:
        group.start_soon(client.load_weights, publication)
        await tap.passed(path, before + 1)
        group.cancel_scope.cancel()


def begin_whole(tasks: TaskGroup, client: Backend, ids: list[int], max_new_tokens: int = ENDLESS) -> Whole:
    call = Whole(client, ask(ids, max_new_tokens))
    tasks.start_soon(call.run)
    return call
