"""Requests, publications and pools that several test modules use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from uuid import uuid4

import anyio
import anyio.lowlevel
import trio.testing

from agentrl.errors import ReplyError, RequestRejected, ServerError, ServerTimeout, ServerUnavailable
from agentrl.inference.backend import Context, GenerateRequest, SamplingParams
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool.members import Server, State
from agentrl.inference.pool.pool import PoolStatus, ServerPool
from agentrl.servers.scripted.server import Fault, ScriptedServer
from agentrl.weights.types import Manifest, Publication

VOCAB = 300
OFTEN = {"health_interval_s": 0.2}
"""Settings of a pool that soon notices what only a health check can; a healthy server answers within two intervals."""

FAULTS: dict[Fault, type[ServerError]] = {
    **dict.fromkeys((Fault.REFUSE, Fault.DIE, Fault.RESET_MID_BODY, Fault.SERVER_ERROR), ServerUnavailable),
    **dict.fromkeys((Fault.HANG, Fault.SLOW_DRIP), ServerTimeout),
    Fault.BAD_REQUEST: RequestRejected,
    **dict.fromkeys(
        (
            Fault.NOT_JSON, Fault.SHORT_LOGPROBS, Fault.MISMATCHED_IDS, Fault.OUTSIDE_VOCABULARY, Fault.NAN_LOGPROB,
            Fault.POSITIVE_LOGPROB, Fault.EMPTY, Fault.SPAN_GAP, Fault.NO_FINISH,
        ),
        ReplyError,
    ),
}  # fmt: skip
"""The error that each fault of a model call ends in, in process and over HTTP."""


class Opaque(ScriptedServer):
    """Has digests that only servers of its kind share, as SGLang has; a stale one answers 200 and keeps its weights."""

    stale = False
    held: Mapping[str, str] = {}

    @property
    def checksum_kind(self) -> str:
        return "sglang 0.5.23"

    async def load_weights(self, publication: Publication) -> None:
        await super().load_weights(publication)
        self.held = self.held if self.stale else publication.tensor_checksums

    def accept_manifest(self, manifest: Manifest) -> None:
        super().accept_manifest(manifest)
        self.held = self.held if self.stale else manifest.tensor_checksums

    async def checksums(self) -> Mapping[str, str]:
        return {"fused": "".join(self.held.values())}


def opaque_servers(count: int) -> list[Opaque]:
    return [Opaque(lambda _: [4], vocab_size=VOCAB, url=f"scripted://{n}") for n in range(count)]


def request(*ids: int, episode: str = "e", max_new_tokens: int = 64, stop: tuple[str, ...] = ()) -> GenerateRequest:
    return GenerateRequest(
        request_id=uuid4().hex,
        episode_id=episode,
        context=Context.of(ids or (1, 2, 3)),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, stop=stop),
    )


def publication(version: int, path: str = "weights") -> Publication:
    return Publication(version=version, path=path, checksum="", tensor_checksums={"w": f"{version:032x}"})


def pool_of(*servers: Server, **changes: object) -> ServerPool:
    """Return a pool whose deadlines a busy machine keeps, except for those in `changes`."""
    settings = {"health_interval_s": 60.0, "request_timeout_s": 60.0, "control_timeout_s": 60.0, **changes}
    return ServerPool(servers, InferenceConfig.model_validate(settings))


def in_virtual_time(main: Callable[[], Awaitable[None]], clock: trio.testing.MockClock | None = None) -> None:
    """Run `main` under trio; time stands still while a task can run, so a slow machine misses no deadline."""
    clock = clock or trio.testing.MockClock(autojump_threshold=0)
    anyio.run(main, backend="trio", backend_options={"clock": clock})


async def seen(pool: ServerPool, condition: Callable[[PoolStatus], bool]) -> None:
    """Return once the pool's own tasks have brought `condition` about."""
    with anyio.fail_after(300):
        while not condition(pool.describe()):  # noqa: ASYNC110 - the pool's state is observed, as a user's display would
            await anyio.sleep(0.002)


async def outlive(servers: Sequence[ScriptedServer], pool: ServerPool, update: Callable[[int], Awaitable[object]]) -> None:
    """Update a pool of three to versions 1 to 12 while servers die and eight episodes go on, none of which may go back."""
    latest: dict[str, int] = {}
    finished = anyio.Event()

    async def episode(name: str) -> None:
        while not finished.is_set():
            generation = await pool.generate(request(episode=name))
            for span in generation.spans:
                assert span.version >= latest.get(name, 0)
                latest[name] = span.version
            await anyio.lowlevel.checkpoint()

    with anyio.fail_after(300):
        async with anyio.create_task_group() as tasks:
            for index in range(8):
                tasks.start_soon(episode, str(index))
            for version in range(1, 13):
                victim = servers[version // 2 % 2]  # one of three always lives
                if version % 2:
                    victim.die()
                await update(version)
                if version % 2:
                    victim.revive(version=0)
            finished.set()
    assert pool.policy_version == 12


async def others_ran() -> None:
    """Let every task that is not waiting go on until it waits, but for what takes time."""
    for _ in range(50):
        await anyio.lowlevel.checkpoint()


async def all_serving(pool: ServerPool) -> None:
    await seen(pool, lambda status: all(server.state is State.SERVING for server in status.servers))
