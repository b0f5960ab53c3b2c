"""Plays the program of a real client against the door of an episode whose model answers from a script.

The model asks for a command that writes a file, for one that reads it, and answers. Either its second reply is cut by an
update of the weights in its middle, and the connection of the third call breaks before a byte of the answer has come; or the
second answer is lost on its way. The client has to ask again.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from uuid import uuid4

import aiohttp
import anyio

from agentrl.client import Client, Door, EpisodeSettings, PolicyBackend
from agentrl.rollout.scripted_policy import UNLIMITED, plain_tokenizer
from agentrl.servers.scripted.script import Hold, ScriptedCall, ScriptedReply
from agentrl.servers.scripted.server import ScriptedServer
from agentrl.support.concurrency import task_group
from agentrl.tokens.verify import verify
from agentrl.types import StopReason, Trajectory
from tests.clients.catalog import ANSWER, READ, TASK, ClientProgram
from tests.clients.wire import Wire, open_wire
from tests.support.doors import until
from tests.support.scripted import pool_of, publication

Trouble = Literal["cut", "lost"]
"""A connection breaks before a byte of the third answer has come; or after the second answer was sent, before it arrived."""
READ_AGAIN = f"{READ} && true"
DEADLINE_S = 300
CUT_AT = 9
"""The token of the second reply before which the weights change."""
REFUSED_PROXY = "http://127.0.0.1:9"
"""The proxy of every other address, so that a client which looks for the internet finds none at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What a client did, and what was recorded of it."""

    program: ClientProgram
    trajectory: Trajectory
    folder: Path
    exit_status: int | None
    output: str
    """Standard output and standard error."""
    requests: Sequence[str]
    streamed: bool
    marks_retries: bool
    """Whether a request said that it repeats an earlier one."""
    num_calls: int
    """Calls that reached the inference server."""
    metrics: Mapping[str, float]

    @property
    def forks(self) -> dict[str, int]:
        """Recorded forks by reason."""
        return dict(Counter(str(turn.fork) for turn in self.trajectory.turns if turn.fork is not None))

    @property
    def branches(self) -> int:
        """Number of the samples that are trained on; the trajectory is verified."""
        return len(verify(self.trajectory))

    @property
    def ignored(self) -> list[str]:
        """Fields of its requests that have no effect."""
        return sorted(name.removeprefix("gateway.ignored.") for name in self.metrics if name.startswith("gateway.ignored."))

    @property
    def resent(self) -> list[str]:
        """The ways in which the client rewrote answers that it sent back."""
        return sorted(name.removeprefix("resent.") for name in self.metrics if name.startswith("resent."))


class _Script:
    """The replies of an episode, one for each different request; only the first try of each is held or lost.

    Args:
        replies: in order.
        trouble: what happens: the third call is cut, or the second answer is lost.
        on_lost: called when the answer that is to be lost is asked for.
    """

    def __init__(self, replies: Sequence[str], trouble: Trouble, on_lost: Callable[[], None]) -> None:
        self._replies, self._on_lost = replies, on_lost
        self._requests: dict[bytes, int] = {}
        self.is_lost = anyio.Event()
        """Set when the answer that is to be lost is asked for."""
        self.swap, self.cut = Hold(at=CUT_AT), Hold(at=0)
        self._held = {1: self.swap, 2: self.cut} if trouble == "cut" else {}
        self._loses = trouble == "lost"

    def __call__(self, call: ScriptedCall) -> ScriptedReply:
        request = call.input_ids.tobytes()
        is_again = request in self._requests
        number = self._requests.setdefault(request, len(self._requests))
        reply = self._replies[min(number, len(self._replies) - 1)]
        if number == 1 and self._loses:
            if is_again:
                return ScriptedReply(output=reply.replace(READ, READ_AGAIN))
            self._on_lost()
            self.is_lost.set()
        hold = self._held.pop(number, None)
        return ScriptedReply(output=reply, holds=() if hold is None else (hold,))


async def play(program: ClientProgram, folder: Path, trouble: Trouble = "cut") -> Played:
    """Play one episode of a client in a folder of its own; its process group is ended with it."""
    plain = plain_tokenizer()
    wires: list[Wire] = []
    script = _Script(program.replies, trouble, lambda: wires[0].withhold())
    server = ScriptedServer(
        script, vocab_size=plain.renderer.vocab_size, encode=plain.encode_output, eos_id=min(plain.renderer.eos_ids)
    )
    with anyio.fail_after(DEADLINE_S):
        async with pool_of(server, request_timeout_s=DEADLINE_S) as pool:
            sampling = UNLIMITED.model_copy(update={"unsupported": "prompt" if program.forced_calls else "refuse"})
            settings = EpisodeSettings(episode_id=uuid4().hex, task_id=program.name)
            client = Client(PolicyBackend(pool, plain.renderer, sampling, settings))
            async with client.served() as real, open_wire(int(real.server_url.rpartition(":")[2])) as wire:
                door = replace(real, server_url=f"http://127.0.0.1:{wire.port}")

                wires.append(wire)

                async def lose() -> None:
                    await script.is_lost.wait()
                    await until(lambda: wire.has_whole_answer)
                    await wire.cut()

                async def swap() -> None:
                    await script.swap.reached.wait()
                    await pool.update_weights(publication(1))
                    script.swap.release.set()

                async def cut() -> None:
                    await script.cut.reached.wait()
                    await wire.cut()

                async with task_group() as tasks:
                    tasks.start_soon(swap)
                    tasks.start_soon(cut)
                    tasks.start_soon(lose)
                    status, output = await run_program(program, door, folder)
                    tasks.cancel_scope.cancel()
                await _reward(program, real, wire, client)
    return Played(
        program=program,
        trajectory=client.close(StopReason.COMPLETED, None if client.episode.final_reward is not None else 0.0),
        folder=folder,
        exit_status=status,
        output=output,
        requests=wire.requests,
        streamed=wire.streams,
        marks_retries=wire.has_marked_retry,
        num_calls=len(server.calls),
        metrics=dict(client.episode.metrics),
    )


async def run_program(program: ClientProgram, door: Door, folder: Path) -> tuple[int | None, str]:
    """Run the program to its end; return its exit status and its output."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    environment = {
        **{name: os.environ[name] for name in ("LANG", "SHELL", "TERM") if name in os.environ},
        "PATH": f"{program.bin_folder}:{os.environ['PATH']}",
        "HOME": str(home),
        "TMPDIR": str(folder),
        "NO_PROXY": "127.0.0.1,localhost",
        "HTTPS_PROXY": REFUSED_PROXY,
        "HTTP_PROXY": REFUSED_PROXY,
        "PYTHONWARNINGS": "ignore",
        **door.environment(),
        **program.environment,
    }
    program.prepare(home, door)
    log = folder / "output.txt"
    with log.open("wb") as output:
        process = await anyio.open_process(
            [*program.command, TASK],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with anyio.CancelScope(shield=True):
                await process.aclose()
    return status, log.read_text(errors="replace")


async def _reward(program: ClientProgram, door: Door, wire: Wire, client: Client) -> None:
    """Reward the second answer that the client received, by its id, and the episode, over HTTP."""
    ids = wire.answer_ids(program.id_prefix)
    if len(ids) < 2:
        return
    async with aiohttp.ClientSession() as http:
        for body in ({"reward": 0.25, "response_id": ids[1]}, {"reward": 1.0}):
            async with http.post(door.reward_url, json=body) as response:
                assert response.status == 200, await response.text()


def evidence(played: Played) -> str:
    """Return what a failed test shows."""
    turns = [
        f"turn {index}: parent {turn.parent}, fork {turn.fork}, {[m['role'] for m in turn.messages]} -> {turn.message}"
        for index, turn in enumerate(played.trajectory.turns)
    ]
    parts = [*turns, *played.requests, f"metrics {played.metrics}", f"exit {played.exit_status}", played.output[-6000:]]
    return "\n".join([ANSWER, *parts])
