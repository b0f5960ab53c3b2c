"""Workflows that rollout workers import, and runners of such workers."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import UNIXSocketStream

from agentrl.client import Client
from agentrl.errors import AgentRLError, InvariantError
from agentrl.inference.backend import Backend, GenerateRequest, Generation
from agentrl.processes.frames import FrameWriter, read_frames
from agentrl.processes.link import Link
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.remote.frames import MAX_MESSAGE_BYTES, WorkerSetup
from agentrl.rollout.remote.process import set_up_worker
from agentrl.rollout.remote.runner import OpenNodes, RemoteRunner, StartWorker, this_machine
from agentrl.rollout.remote.worker import LOST_S
from agentrl.types import Task, Trajectory
from agentrl.workflow import GroupWorkflow, RolloutWorkflow

MODULE = __name__
SLOW_END_S = 3.0
"""Seconds, more than a child gets without a limit of its own."""
PATIENCE_S = 60.0
"""Seconds that a worker in a thread has to end. A busy machine may be slow, and the process of a worker that does not end
in time exits, which here is that of the tests."""


class TwoTurns(RolloutWorkflow):
    """Asks twice, rewards the first turn, records a metric, and streams where the task wants it."""

    async def run(self, task: Task, client: Client) -> float:
        messages = [{"role": "user", "content": task["question"]}]
        first = await client.chat.completions.create(messages=messages)
        client.reward(first, 0.25)
        messages += [first.choices[0].message, {"role": "user", "content": "Again."}]
        if task.data.get("stream"):
            text = ""
            async for chunk in await client.chat.completions.create(messages=messages, stream=True):
                text += chunk.choices[0].delta.content or ""
        else:
            text = (await client.chat.completions.create(messages=messages)).choices[0].message.content or ""
        client.record(length=len(text))
        return float(text == task["answer"])


class Acts(RolloutWorkflow):
    """Asks once, and then does what the task says."""

    async def run(self, task: Task, client: Client) -> float:
        await client.chat.completions.create(messages=[{"role": "user", "content": "Hello."}])
        match task["act"]:
            case "wait":
                await anyio.sleep_forever()
            case "leave":
                async with await client.chat.completions.create(
                    messages=[{"role": "user", "content": "More."}], stream=True
                ) as stream:
                    async for chunk in stream:
                        if chunk.choices[0].delta.content:
                            break
            case "die":  # after another call, whose answer shows that the driver has the first turn
                await client.chat.completions.create(messages=[{"role": "user", "content": "Hello."}])
                os.kill(os.getpid(), signal.SIGKILL)
            case "block":
                time.sleep(task["seconds"])  # noqa: ASYNC251 - what the watchdog has to notice
            case "raise":
                raise ValueError("no such thing")
            case "break":
                raise InvariantError("the record is wrong")
            case "print":
                os.write(1, b"words on standard output")
            case "unsendable":
                await client.role("\ud800").chat.completions.create(messages=[{"role": "user", "content": "Hello."}])
            case _:
                pass
        return float(os.getpid())


class Ranked(GroupWorkflow):
    """Scores the episodes of a group by their place."""

    def __init__(self) -> None:
        self._open = False

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        self._open = True
        yield
        self._open = False

    async def run(self, task: Task, client: Client) -> float:
        await client.chat.completions.create(messages=[{"role": "user", "content": task["question"]}])
        return 0.0

    async def score_group(self, task: Task, episodes: Sequence[Trajectory]) -> Sequence[float]:
        if not self._open:
            raise ValueError("not opened")
        return [float(place) for place in range(len(episodes))]


class LeavesSlowly(Acts):
    """Takes seconds to close, and writes a file then."""

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        yield
        await anyio.sleep(SLOW_END_S)
        await anyio.Path("closed").touch()


class Unopened(Acts):
    """Cannot be opened."""

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        raise ValueError("the pool of environments is down")
        yield  # pyright: ignore[reportUnreachable]


class Verbose(Ranked):
    """Says in its messages, its metrics or its error as much as the task wants."""

    async def run(self, task: Task, client: Client) -> float:
        messages = [{"role": "user", "content": "Hello." + " hello" * task.data.get("request_words", 0)}]
        await client.chat.completions.create(messages=messages)
        client.record(**{f"metric_{number}": 1.0 for number in range(task.data.get("metrics", 0))})
        return 1.0


def worker_setup(
    workflow: str,
    model: Path,
    *,
    rollout: RolloutConfig | None = None,
    stall_timeout_s: float = 60.0,
    directory: Path | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> WorkerSetup:
    """Return the setup of workers that load `workflow` of this module, and the tokenizer of `model`."""
    return WorkerSetup(
        name="",
        directory=str(directory or Path.cwd()),
        workflow=f"{MODULE}:{workflow}",
        workflow_args="{}",
        model=str(model),
        template_options="{}",
        max_context=None,
        rollout=(rollout or RolloutConfig()).model_dump_json(),
        seed=7,
        stall_timeout_s=stall_timeout_s,
        max_message_bytes=max_message_bytes,
    )


def remote_runner(
    workflow: str,
    model: Path,
    log_dir: Path,
    *,
    workers: int = 2,
    rollout: RolloutConfig | None = None,
    stall_timeout_s: float = 60.0,
    nodes: OpenNodes = this_machine,
    directory: Path | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    lost_s: float = LOST_S,
) -> RemoteRunner:
    """Return a runner of workers with `worker_setup`."""
    setup = worker_setup(
        workflow,
        model,
        rollout=rollout,
        stall_timeout_s=stall_timeout_s,
        directory=directory,
        max_message_bytes=max_message_bytes,
    )
    return RemoteRunner(setup, num_workers=workers, nodes=nodes, log_dir=log_dir, lost_s=lost_s)


class StuckBackend:
    """Never answers, and shows that a call came and was aborted."""

    def __init__(self, backend: Backend) -> None:
        self.called, self.aborted = anyio.Event(), anyio.Event()
        self.stream = backend.stream

    async def generate(self, request: GenerateRequest) -> Generation:
        self.called.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.aborted.set()
        raise AssertionError("unreachable")


class GatedBackend:
    """Answers once `count` calls are in flight at the same time."""

    def __init__(self, backend: Backend, count: int) -> None:
        self._backend, self._missing = backend, count
        self._open = anyio.Event()
        self.stream = backend.stream

    async def generate(self, request: GenerateRequest) -> Generation:
        self._missing -= 1
        if self._missing == 0:
            self._open.set()
        await self._open.wait()
        return await self._backend.generate(request)


@asynccontextmanager
async def thread_worker(_name: str, _log_path: Path) -> AsyncGenerator[Link]:
    """Yield a worker that runs in a thread of this process: the whole worker but its process."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=_work_in_thread, args=(theirs,), daemon=True)
    thread.start()

    try:
        async with await UNIXSocketStream.from_socket(ours) as stream:
            yield Link(stream, where="a thread", pid=os.getpid())
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(thread.join, PATIENCE_S)
        assert not thread.is_alive()


@asynccontextmanager
async def threads() -> AsyncGenerator[StartWorker]:
    """Yield what starts workers in threads."""
    yield thread_worker


def _work_in_thread(connection: socket.socket) -> None:
    requests, replies = connection.makefile("rb"), connection.makefile("wb")
    writer = FrameWriter(replies)
    try:
        with writer.beating(), suppress(AgentRLError):  # the driver has it
            frames = read_frames(requests)
            worker = set_up_worker(frames, writer)
            if worker is not None:
                anyio.run(worker.serve, frames, PATIENCE_S)
    finally:
        writer.close()
        with suppress(ConnectionError):
            replies.close()
        with suppress(OSError):  # the driver has closed it
            connection.shutdown(socket.SHUT_RDWR)  # ends the thread that reads
        requests.close()
        connection.close()
