"""CPU of a model turn over the door of an episode, beside the client in process; and many streaming sessions at once.

Run: `python -m benchmarks.gateway` (some minutes; `--quick` for one without a record). It prints tables and writes
benchmarks/results/gateway.json. The agents are in another process, which speaks plain HTTP, and the model answers at once in
this one. CPU is `time.process_time` of this process: the driver and its gateway.

  in process       Client, on a backend in this process
  chat, responses, messages   the same conversations over a door, each turn with the whole history

Each episode grows to the given context in 8 turns. Contestants take turns with the same texts, so that a slow minute hits
all of them, and each has a renderer of its own. `JSON` is what the bodies cost by themselves: reading each, and writing it
in one spelling for the digest by which a repeated request is known.

Then 256 sessions stream at once, a third of them in each dialect. Each piece of an answer is the time at which the model
made it, so the agent knows how late it comes. The same sessions in process, in the same run, are the baseline.

Invariant: every session ends with all of its turns recorded; one error ends the benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import aiohttp
import anyio
import anyio.lowlevel
import numpy as np
import orjson

from agentrl.client import Client, EpisodeSettings, PolicyBackend, SamplingConfig
from agentrl.inference.backend import Backend, GenerateRequest, Generation, GenerationChunk
from agentrl.support.concurrency import task_group
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason
from benchmarks.instant_model import TRAINED_ON, Corpus, Instant, answer, save_tokenizer, standard_library
from benchmarks.machine import describe_machine

RESULTS: Final = Path(__file__).parent / "results" / "gateway.json"
CONTEXTS: Final = (4096, 16384, 32768)
TURNS: Final = 8
OUTPUT_TOKENS: Final = 64
"""Of one turn."""
PIECE_TOKENS: Final = 8
"""Of one piece of a streamed answer."""
FRAME_TOKENS: Final = 8
DIALECTS: Final = ("chat", "responses", "messages")
ROUTES: Final = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
NUM_ANSWERS: Final = 61
SESSIONS: Final = 256
PIECES: Final = 16
"""Of one answer of a session."""
SESSION_TURNS: Final = 4
STAMP_TOKENS: Final = 24
"""At most, of one piece of a session."""


# The agent's side: another process.


def _body(dialect: str, history: list[Any], *, stream: bool) -> dict[str, Any]:
    fields = {"model": "policy", "stream": stream}
    if dialect == "responses":
        return {**fields, "input": history, "max_output_tokens": OUTPUT_TOKENS * 16}
    return {**fields, "messages": history, "max_tokens": OUTPUT_TOKENS * 16}


def _answered(dialect: str, reply: Any) -> list[Any]:  # noqa: ANN401 - JSON
    """Return what an agent adds to its history for a whole answer."""
    if dialect == "chat":
        return [reply["choices"][0]["message"]]
    if dialect == "responses":
        return reply["output"]
    return [{"role": "assistant", "content": reply["content"]}]


def _piece_text(dialect: str, event: Any) -> str:  # noqa: ANN401 - JSON
    """Return the new text of an event of a stream."""
    if dialect == "chat":
        return (event["choices"][0]["delta"].get("content") or "") if event["choices"] else ""
    if dialect == "responses":
        return event["delta"] if event["type"] == "response.output_text.delta" else ""
    return event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""


async def _streamed(http: aiohttp.ClientSession, url: str, dialect: str, body: dict[str, Any], late: list[float]) -> str:
    """Return the text of a streamed answer; for pieces that are times, add how late each comes, in ms."""
    parts: list[str] = []
    async with http.post(url, data=orjson.dumps(body)) as response:
        if response.status != 200:
            raise SystemExit(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            if text := _piece_text(dialect, orjson.loads(line[6:])):
                now = time.monotonic_ns()
                parts.append(text)
                if text.strip().isdigit():
                    late.append((now / 1e3 - int(text)) / 1e3)
    return "".join(parts)


async def _agent_episode(http: aiohttp.ClientSession, asked: dict[str, Any]) -> dict[str, Any]:
    """Play one episode and return its bodies and how late its pieces came."""
    dialect, stream = asked["dialect"], asked["stream"]
    url = f"{asked['base_url']}/{ROUTES[dialect]}"
    history: list[Any] = []
    bodies: list[str] = []
    late: list[float] = []
    await anyio.sleep(asked.get("wait_s", 0.0))
    for text in asked["texts"]:
        history.append({"role": "user", "content": text})
        body = _body(dialect, history, stream=stream)
        if asked.get("bodies"):
            bodies.append(orjson.dumps(body).decode())
        if stream:
            history.append({"role": "assistant", "content": await _streamed(http, url, dialect, body, late)})
            continue
        async with http.post(url, data=orjson.dumps(body)) as response:
            reply = orjson.loads(await response.read())
        if response.status != 200:
            raise SystemExit(f"{response.status}: {reply}")
        history += _answered(dialect, reply)
    return {"bodies": bodies, "late_ms": late}


async def _agents() -> None:
    """Play the episodes that lines of standard input ask for; a line may ask for several at once."""
    reader = asyncio.StreamReader(limit=2**26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as http:
        while line := await reader.readline():
            asked = orjson.loads(line)
            found: list[dict[str, Any]] = [{} for _ in asked]

            async def play(at: int, each: dict[str, Any], found: list[dict[str, Any]] = found) -> None:
                found[at] = await _agent_episode(http, each)

            async with anyio.create_task_group() as tasks:
                for at, each in enumerate(asked):
                    tasks.start_soon(play, at, each)
            sys.stdout.buffer.write(orjson.dumps(found) + b"\n")
            sys.stdout.buffer.flush()


class Agents:
    """The process of the agents."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def play(self, *episodes: dict[str, Any]) -> list[dict[str, Any]]:
        """Play episodes at once and return what each agent tells."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(orjson.dumps(episodes) + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise SystemExit("the agents ended with an error")
        return orjson.loads(line)


@asynccontextmanager
async def _agents_running() -> AsyncGenerator[Agents]:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "benchmarks.gateway", "--agents")
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=2**28)
    try:
        yield Agents(process)
    finally:
        process.kill()
        await process.wait()


# The driver's side.


class Pieces(Instant):
    """A backend in this process that answers at once, in pieces where it is asked for a stream."""

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[GenerationChunk]]:
        """Yield an answer."""
        whole = await self.generate(request)

        async def pieces() -> AsyncIterator[GenerationChunk]:
            for at in range(0, len(whole.output_ids), PIECE_TOKENS):
                yield GenerationChunk(output_ids=whole.output_ids[at : at + PIECE_TOKENS])
                await anyio.lowlevel.checkpoint()
            yield GenerationChunk(output_ids=whole.output_ids[:0], generation=whole)

        yield pieces()


class Clockwork:
    """A backend whose answers are the times of their pieces, in microseconds, one each `interval_s`."""

    def __init__(self, encode: Callable[[str], list[int]], end_of_turn: int, interval_s: float) -> None:
        self._encode, self._end, self._interval_s = encode, end_of_turn, interval_s

    async def generate(self, request: GenerateRequest) -> Generation:
        """Refuse."""
        raise RuntimeError("a session streams")

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[GenerationChunk]]:
        """Yield an answer."""

        async def pieces() -> AsyncIterator[GenerationChunk]:
            ids: list[int] = []
            for _ in range(PIECES):
                await anyio.sleep(self._interval_s)
                new = self._encode(f" {time.monotonic_ns() // 1000}")
                assert len(new) <= STAMP_TOKENS
                ids += new
                yield GenerationChunk(output_ids=np.array(new, np.int32))
            yield GenerationChunk(output_ids=np.array([], np.int32), generation=answer(ids, self._end))

        yield pieces()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What all contestants share."""

    folder: Path
    encode: Callable[[str], list[int]]
    end_of_turn: int
    text: str
    chars_per_token: float
    answers: tuple[Generation, ...]

    def client(self, backend: Backend, renderer: Renderer) -> Client:
        """Return the client of a new episode."""
        settings = EpisodeSettings(episode_id="bench", task_id="t")
        return Client(PolicyBackend(backend, renderer, SamplingConfig(), settings))


def _model(folder: Path) -> Model:
    text = standard_library()
    tokenizer, _ = save_tokenizer(folder, text)
    text = text[TRAINED_ON:]

    def encode(part: str) -> list[int]:
        return tokenizer.encode(part).ids

    sample = text[:200_000]
    corpus, end = Corpus(sample), encode("<|im_end|>")[0]
    spoken = [encode(corpus.take(1000).strip())[: OUTPUT_TOKENS - 1] for _ in range(NUM_ANSWERS)]
    return Model(
        folder=folder,
        encode=encode,
        end_of_turn=end,
        text=text,
        chars_per_token=len(sample) / len(encode(sample)),
        answers=tuple(answer(ids, end) for ids in spoken),
    )


async def _in_process(client: Client, texts: Sequence[str], *, stream: bool, late: list[float] | None = None) -> None:
    create: Any = client.chat.completions.create
    messages: list[Any] = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        if not stream:
            completion = await create(model="policy", messages=messages, max_tokens=OUTPUT_TOKENS * 16)
            messages.append(completion.choices[0].message)
            continue
        parts: list[str] = []
        async for chunk in await create(model="policy", messages=messages, max_tokens=OUTPUT_TOKENS * 16, stream=True):
            if new := (chunk.choices[0].delta.content or "") if chunk.choices else "":
                parts.append(new)
                if late is not None and new.strip().isdigit():
                    late.append((time.monotonic_ns() / 1e3 - int(new)) / 1e3)
        messages.append({"role": "assistant", "content": "".join(parts)})


def _close(client: Client, turns: int) -> None:
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    assert len(trajectory.turns) == turns, f"{len(trajectory.turns)} turns of {turns}"
    assert len(trajectory.leaves()) == 1


async def _turn_costs(model: Model, agents: Agents, contexts: Sequence[int], repeats: int) -> dict[str, Any]:
    names = ("in process", *DIALECTS)
    cases = [(name, stream) for name in names for stream in (False, True)]
    renderers = {case: Renderer.load(model.folder) for case in cases}
    backend, corpus = Pieces(model.answers), Corpus(model.text)
    seconds: dict[tuple[str, bool, int], list[float]] = {}
    bodies: dict[tuple[str, int], list[bytes]] = {}
    for context in contexts:
        size = int((context - TURNS * (OUTPUT_TOKENS + FRAME_TOKENS)) * model.chars_per_token / TURNS)
        for repeat in range(repeats + 1):
            texts = [corpus.take(size) for _ in range(TURNS)]
            for name, stream in cases:
                client = model.client(backend, renderers[name, stream])
                if name == "in process":
                    start = time.process_time()
                    await _in_process(client, texts, stream=stream)
                else:
                    async with client.served() as door:
                        asked = {"base_url": door.base_url, "dialect": name, "stream": stream, "texts": texts}
                        start = time.process_time()
                        told = await agents.play({**asked, "bodies": repeat == 0 and not stream})
                    if told[0]["bodies"]:
                        bodies[name, context] = [body.encode() for body in told[0]["bodies"]]
                spent = time.process_time() - start
                _close(client, TURNS)
                if repeat:
                    seconds.setdefault((name, stream, context), []).append(spent)
    found: dict[str, Any] = {}
    for (name, stream, context), spent in seconds.items():
        kind = "streamed" if stream else "whole"
        found.setdefault("ms_per_turn", {}).setdefault(kind, {}).setdefault(name, {})[str(context)] = _ms(spent)
        if name != "in process":
            pairs = zip(spent, seconds["in process", stream, context], strict=True)
            over = [ours - theirs for ours, theirs in pairs]
            found.setdefault("ms_over_in_process", {}).setdefault(kind, {}).setdefault(name, {})[str(context)] = _ms(over)
    for (name, context), sent in bodies.items():
        found.setdefault("json_ms_per_turn", {}).setdefault(name, {})[str(context)] = _json_cost(sent)
        found.setdefault("body_kb", {}).setdefault(name, {})[str(context)] = round(mean(map(len, sent)) / 1024, 1)
    return found


def _ms(seconds: Sequence[float]) -> float:
    return round(1e3 * median(seconds) / TURNS, 3)


def _json_cost(bodies: Sequence[bytes]) -> float:
    """Return CPU ms a turn of reading the bodies, and of writing and digesting them once."""
    rounds: list[float] = []
    for _ in range(15):
        start = time.process_time()
        for body in bodies:
            text = orjson.dumps(orjson.loads(body), option=orjson.OPT_SORT_KEYS)
            hashlib.blake2b(text, digest_size=16).digest()
        rounds.append(time.process_time() - start)
    return round(1e3 * median(rounds) / len(bodies), 3)


async def _sessions(model: Model, agents: Agents, count: int, interval_s: float) -> dict[str, Any]:
    """Return how late the pieces of many streaming sessions come, in process and over doors."""
    backend = Clockwork(model.encode, model.end_of_turn, interval_s)
    renderer, rng = Renderer.load(model.folder), random.Random(0)
    waits = [rng.uniform(0.0, interval_s * PIECES) for _ in range(count)]
    texts = [f"What time is it, please ({turn})?" for turn in range(SESSION_TURNS)]
    found: dict[str, Any] = {"sessions": count, "pieces_per_second": round(count / interval_s)}

    late: list[float] = []
    clients = [model.client(backend, renderer) for _ in range(count)]

    async def one(client: Client, wait_s: float) -> None:
        await anyio.sleep(wait_s)
        await _in_process(client, texts, stream=True, late=late)

    start = time.process_time()
    async with task_group() as tasks:
        for client, wait_s in zip(clients, waits, strict=True):
            tasks.start_soon(one, client, wait_s)
    found["in process"] = _lateness(late, time.process_time() - start)
    for client in clients:
        _close(client, SESSION_TURNS)

    clients = [model.client(backend, renderer) for _ in range(count)]
    async with _served(clients) as urls:
        asked = [
            {"base_url": url, "dialect": dialect, "stream": True, "texts": texts, "wait_s": wait_s}
            for url, dialect, wait_s in zip(urls, cycle(DIALECTS), waits, strict=False)
        ]
        start = time.process_time()
        told = await agents.play(*asked)
        found["over doors"] = _lateness([each for one in told for each in one["late_ms"]], time.process_time() - start)
    for client in clients:
        _close(client, SESSION_TURNS)
    assert found["over doors"]["pieces"] == count * SESSION_TURNS * PIECES, found
    return found


@asynccontextmanager
async def _served(clients: Sequence[Client]) -> AsyncGenerator[list[str]]:
    """Yield the base URLs of the doors of all clients, each opened by a task of its own, as in a run."""
    urls = [""] * len(clients)
    ready, done = anyio.Semaphore(0), anyio.Event()

    async def serve(at: int, client: Client) -> None:
        async with client.served() as door:
            urls[at] = door.base_url
            ready.release()
            await done.wait()

    async with task_group() as tasks:
        for at, client in enumerate(clients):
            tasks.start_soon(serve, at, client)
        for _ in clients:
            await ready.acquire()
        yield urls
        done.set()


def _lateness(late_ms: Sequence[float], cpu_s: float) -> dict[str, float]:
    values = np.sort(np.array(late_ms))
    return {
        "pieces": len(values),
        "p50_ms": round(float(np.percentile(values, 50)), 2),
        "p99_ms": round(float(np.percentile(values, 99)), 2),
        "max_ms": round(float(values[-1]), 2),
        "cpu_ms_per_piece": round(1e3 * cpu_s / len(values), 3),
    }


async def _measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    model = _model(folder)
    async with _agents_running() as agents, model.client(Pieces(model.answers), Renderer.load(folder)).served():
        costs = await _turn_costs(model, agents, given.contexts, given.repeats)
        return {**costs, "streaming": await _sessions(model, agents, given.sessions, given.interval_s)}


def _print(found: dict[str, Any]) -> None:
    for figure in ("ms_per_turn", "ms_over_in_process"):
        for kind, rows in found[figure].items():
            _print_table(f"{figure}, {kind}", rows)
    _print_table("JSON, ms per turn", found["json_ms_per_turn"])
    print(json.dumps(found["streaming"], indent=1))


def _print_table(title: str, rows: dict[str, dict[str, float]]) -> None:
    contexts = list(next(iter(rows.values())))
    print(f"{title:<40}" + "".join(f"{context:>10}" for context in contexts))
    for name, row in rows.items():
        print(f"  {name:<38}" + "".join(f"{row[context]:>10.3f}" for context in contexts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--interval-s", type=float, default=0.25, help="between the pieces of an answer of a session")
    parser.add_argument("--quick", action="store_true", help="a few repeats at 4k and 16 sessions, not recorded")
    parser.add_argument("--note", default="", help="what else the machine did meanwhile")
    parser.add_argument("--agents", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.agents:
        asyncio.run(_agents())
        return
    if given.quick:
        given.repeats, given.contexts, given.sessions = 3, [4096], 16
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(_measure(Path(folder), given))
    _print(found)
    if not given.quick:
        machine = describe_machine("openai", "aiohttp", "orjson", "tokenizers")
        report = {"machine": machine, "note": given.note, "repeats": given.repeats, "turns": TURNS, **found}
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
