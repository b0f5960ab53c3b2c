"""What a naive client does where one of `agentrl.servers.embedded.faults` waits: a scene says whether it was misled.

Invariant: nothing here waits on time; something that is not blocked has happened after `TRIPS` other calls were answered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from anyio import fail_after, to_thread
from anyio.abc import TaskGroup

from agentrl.servers.embedded.faults import SGLangFault
from tests.support.api import Api
from tests.support.calls import ENDLESS
from tests.support.embedded import ReferenceModel
from tests.support.servers import CONTROL_S

PROMPT = [5, 6, 7, 8]
TRIPS = 100
"""Round trips to the server in which something that is not blocked has happened."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A server with or without a fault, and what a client does there."""

    api: Api
    tasks: TaskGroup
    checkpoints: dict[int, Path]

    async def happens(self, condition: Callable[[], bool]) -> bool:
        """Return whether `condition` comes true within `TRIPS` round trips."""
        for _ in range(TRIPS):
            if condition():
                return True
            await self.api.get("/model_info")
        return condition()

    async def taken_in(self) -> None:
        """Let the server read what was sent before; it answers ten other calls meanwhile."""
        for _ in range(10):
            await self.api.get("/model_info")

    async def read_up(self) -> None:
        """Wait until a server in this process has read the weights of the updates sent before, each in a thread."""
        threads = to_thread.current_default_thread_limiter()
        with fail_after(CONTROL_S):
            while threads.borrowed_tokens:
                await self.api.get("/model_info")

    def call(self, action: Awaitable[object]) -> Callable[[], bool]:
        """Start a control call; returns what says whether it has been answered."""
        answered: list[object] = []

        async def run() -> None:
            answered.append(await action)

        self.tasks.start_soon(run)
        return lambda: bool(answered)


async def deadlock(scene: Scene) -> bool:
    """Pause in place, then abort everything by a pause: neither that nor continue is ever answered."""
    flight = scene.api.start(scene.tasks, PROMPT, ENDLESS)
    await flight.reached(5)
    await scene.api.pause("in_place")
    paused = scene.call(scene.api.pause("abort"))
    continued = scene.call(scene.api.resume())
    return not await scene.happens(lambda: paused() and continued())


async def lost_abort(scene: Scene) -> bool:
    """Abort a request that a pause holds, and once more when it runs: it runs to its end."""
    await scene.api.pause("retract")
    held = scene.api.start(scene.tasks, PROMPT, 300)
    await held.answered()
    await scene.taken_in()
    await scene.api.post("/abort_request", {"rid": held.rid})
    await scene.api.resume()
    if await scene.happens(lambda: held.over):
        return len(held.ids) == 300
    await scene.api.post("/abort_request", {"rid": held.rid})
    return len((await held.final())["output_ids"]) == 300


async def late_abort(scene: Scene) -> bool:
    """Abort a request that is paused in place: its call does not return."""
    flight = scene.api.start(scene.tasks, PROMPT, ENDLESS)
    await flight.reached(5)
    await scene.api.pause("in_place")
    await scene.api.post("/abort_request", {"rid": flight.rid})
    misled = not await scene.happens(lambda: flight.over)
    await scene.api.resume()
    assert (await flight.final())["meta_info"]["finish_reason"]["type"] == "abort"
    return misled


async def coarse_abort(scene: Scene) -> bool:
    """Abort retracted requests that are not streamed: what they return is cut down to whole steps of 50 tokens."""
    lengths: list[int] = []
    for _ in range(3):  # by chance one in 125,000 times
        whole = scene.api.start(scene.tasks, PROMPT, ENDLESS, stream=False)
        streamed = scene.api.start(scene.tasks, PROMPT, ENDLESS)
        await streamed.reached(60)
        await scene.api.pause("retract")
        await scene.api.post("/abort_request", {"abort_all": True})
        lengths += [len((await flight.final())["output_ids"]) for flight in (whole, streamed)][:1]
        await scene.api.resume()
    return not any(length % 50 for length in lengths)


async def applied_refusal(scene: Scene) -> bool:
    """Update with the default flush under an in_place pause: refused, but the next tokens are of the new version."""
    flight = scene.api.start(scene.tasks, PROMPT, ENDLESS)
    await flight.reached(5)
    await scene.api.pause("in_place")
    answer = await scene.api.update(scene.checkpoints[1], "1")
    assert (answer.status, answer.body["success"]) == (400, False)
    assert (await scene.api.get("/model_info")).body["weight_version"] == "0"
    await scene.api.resume()
    await flight.reached(len(flight.ids) + 20)
    await scene.api.post("/abort_request", {"rid": flight.rid})
    return [span["version"] for span in (await flight.final())["meta_info"]["weight_versions"]] == ["0", "1"]


async def blocking_health(scene: Scene) -> bool:
    """Ask a paused server for its health: no answer, as if it were dead."""
    await scene.api.pause("retract")
    healthy = scene.call(scene.api.get("/health"))
    misled = not await scene.happens(healthy)
    await scene.api.resume()
    return misled


async def update_race(scene: Scene) -> bool:
    """Update first and pause then: the update is not applied while the pause lasts."""
    flight = scene.api.start(scene.tasks, PROMPT, ENDLESS)
    await flight.reached(5)
    updated = scene.call(scene.api.update(scene.checkpoints[1], "1"))
    await scene.taken_in()
    await scene.api.pause("retract")
    await scene.read_up()  # nothing but the pause may keep the update from being answered
    misled = not await scene.happens(updated)
    await scene.api.resume()
    await scene.api.post("/abort_request", {"rid": flight.rid})
    await flight.final()
    return misled


async def stale_prefix(scene: Scene) -> bool:
    """Update without a flush: the next request starts from keys and values of the former weights."""
    context = list(range(40, 100))
    await scene.api.generate(context, 1)
    await scene.api.pause("in_place")
    assert (await scene.api.update(scene.checkpoints[1], "1", flush_cache=False)).status == 200
    await scene.api.resume()
    body = await scene.api.generate(context, 8)
    recorded = np.array([triple[0] for triple in body["meta_info"]["output_token_logprobs"]])
    expected = ReferenceModel(scene.checkpoints[1]).logprobs(context + body["output_ids"])[len(context) :]
    reused, off = body["meta_info"]["cached_tokens"], float(np.abs(recorded - expected).max())
    assert (reused > 0) == (off > 1e-3)
    return reused == 59


async def update_collision(scene: Scene) -> bool:
    """Send updates at once to a paused server: it is not answered that it may continue."""
    await scene.api.pause("retract")
    for _ in range(8):  # of which two meet, whatever the order in which they come
        scene.call(scene.api.update(scene.checkpoints[1], "1"))
    await scene.taken_in()
    return not await scene.happens(scene.call(scene.api.resume()))


NAIVE: dict[SGLangFault, Callable[[Scene], Awaitable[bool]]] = {
    SGLangFault.ABORT_DEADLOCK: deadlock,
    SGLangFault.LOST_ABORTS: lost_abort,
    SGLangFault.LATE_ABORTS: late_abort,
    SGLangFault.COARSE_ABORTS: coarse_abort,
    SGLangFault.APPLIED_REFUSAL: applied_refusal,
    SGLangFault.BLOCKING_HEALTH: blocking_health,
    SGLangFault.UPDATE_RACE: update_race,
    SGLangFault.STALE_PREFIX: stale_prefix,
    SGLangFault.UPDATE_COLLISION: update_collision,
}
