"""CPU time of one model turn through the client, beside a hand-written floor in the same run.

Run: `python -m benchmarks.client_cost` (six minutes; `--repeats 5 --contexts 4096` for less). It prints a table and
writes benchmarks/results/client_cost.json (`--output` names another file). Each episode grows to the given context in 8 (or
32) turns of equal size; the server answers at once, so what is measured is everything else: rendering, tokenizing, request,
reply, recording, openai objects. CPU is `time.process_time` of the client's process; the HTTP server is another process.

  client          Client on a backend in the same process
  client + HTTP   Client on the pool a run uses (ServerPool, SGLangServer, aiohttp); the server answers with prepared bytes
  floor           what cannot be saved: new text encoded once (by agentrl's encoder), decimal ids appended to the kept
                  request, the output decoded
  floor + HTTP    the same, sent with aiohttp; the reply read with orjson
  tokenizers      the floor, with `tokenizers`, which is written in Rust, as the encoder
  tokenizers + HTTP   the floor over HTTP, with the same encoder

The texts are Python's standard library, other ones in each repeat. All contestants get the same, and each has an encoder of
its own for each of five kinds of episode, so that it remembers words of other texts only:

  8 and 32 turns   a user's text, an answer in words
  with tools       8 turns; the calls pass four tools, each answer calls one of them, and the text is the tool's result
  unseen source    8 turns with tools; each result is source code of an installed package that no episode had before, not
                   even in part
  unseen words     8 turns; the letters of each text are exchanged at random, so that the encoder has met hardly a word; as
                   such words take more tokens, it has fewer of them
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple, TypeAlias, cast

import aiohttp
import anyio
import numpy as np
import orjson
from aiohttp import web
from openai.types.chat import ChatCompletion
from tokenizers import Tokenizer

from agentrl.client import Client, EpisodeSettings, PolicyBackend, SamplingConfig
from agentrl.inference.backend import Backend, Generation
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool.pool import ServerPool
from agentrl.inference.sglang.server import SGLangServer
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason
from benchmarks.instant_model import (
    TRAINED_ON,
    VOCABULARY,
    Corpus,
    Instant,
    answer,
    in_unseen_words,
    installed_source,
    save_tokenizer,
    standard_library,
)

RESULTS = Path(__file__).parent / "results" / "client_cost.json"
OUTPUT_TOKENS = 512
"""Sampled in a whole episode, however many turns it has, so that the text to tokenize is equal too."""
TURNS = (8, 32)
FRAME_TOKENS = 8
"""What the chat template adds to a turn, about."""
TARGET_MS = {4096: 0.7, 16384: 2.0, 32768: 4.0}
TARGET_GROWTH = 1.3
"""CPU of an episode of 32 turns, over what the aim allows one of 8 turns (docs/adr/0011-words.md)."""
TARGET_ADDED_US = 200
"""CPU of a turn more, at any context (the same)."""
NUM_ANSWERS = 61
"""Different answers that turns of a kind get one after the other: no turn of an episode repeats the words of another."""
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name} tool of the agent, described in about as many words as tools usually are.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for, in plain words."},
                    "limit": {"type": "integer", "description": "How many results to return at most."},
                },
                "required": ["query"],
            },
        },
    }
    for name in ("search", "open_page", "run_code", "calculate")
)
Encode: TypeAlias = Callable[[str], list[int]]
Kind: TypeAlias = Literal["plain", "tools", "unseen", "source"]
CONTESTANTS = ("client", "client + HTTP", "floor", "floor + HTTP", "tokenizers", "tokenizers + HTTP")


class Case(NamedTuple):
    """One shape of episode."""

    context: int
    turns: int
    kind: Kind = "plain"

    @property
    def output_tokens(self) -> int:
        """Sampled in one turn; one more with tools, by which the server knows what to answer."""
        return OUTPUT_TOKENS // self.turns + self.has_tools

    @property
    def has_tools(self) -> bool:
        """Whether each answer calls a tool, and each text is a tool's result."""
        return self.kind in ("tools", "source")


SHAPES: tuple[tuple[int, Kind], ...] = (
    (TURNS[0], "plain"),
    (TURNS[1], "plain"),
    (TURNS[0], "tools"),
    (TURNS[0], "unseen"),
    (TURNS[0], "source"),
)
"""Turns and kind of the episodes that are run at each context."""
Run: TypeAlias = Callable[[Case, list[str]], Awaitable[None]]


class Fixture(NamedTuple):
    """What all contestants share."""

    renderers: dict[tuple[str, int, Kind], Renderer]
    """By contestant and shape: none profits from the words another has met."""
    tokenizer: Tokenizer
    bare: Tokenizer
    """The same without added tokens."""
    frames: dict[str, tuple[list[int], list[int]]]
    """Ids before and after a text, by the role it comes from."""
    tools_ids: list[int]
    """The prompt's part that describes the tools."""
    text: str
    source: str
    """Source code that is used once."""
    chars_per_token: dict[Kind, float]
    answers: dict[int, tuple[Generation, ...]]
    """By number of tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=180)
    parser.add_argument("--contexts", type=int, nargs="+", default=sorted(TARGET_MS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        web.run_app(
            _server(orjson.loads(options.serve.read_bytes())), host="127.0.0.1", port=0, print=_announce, access_log=None
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        fixture = _fixture(Path(folder))
        reply = Path(folder) / "reply.json"
        replies = {str(size): [_reply(generation) for generation in answers] for size, answers in fixture.answers.items()}
        reply.write_bytes(orjson.dumps(replies))
        command = [sys.executable, "-m", "benchmarks.client_cost", "--serve", str(reply)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().strip()
                rows = anyio.run(_measure, fixture, url, options.contexts, options.repeats)
            finally:
                server.terminate()
    report = {"machine": _machine(), "repeats": options.repeats, "output_tokens": OUTPUT_TOKENS, **rows}
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    _print(rows)


async def _measure(fixture: Fixture, url: str, contexts: list[int], repeats: int) -> dict[str, object]:
    async with (
        ServerPool([SGLangServer(url, vocab_size=VOCABULARY)], InferenceConfig()) as pool,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):

        def encode_bare(text: str) -> list[int]:
            return fixture.bare.encode_batch_fast([text], add_special_tokens=False)[0].ids

        def renderer(name: str, case: Case) -> Renderer:
            return fixture.renderers[name, case.turns, case.kind]

        async def client(case: Case, texts: list[str]) -> None:
            await _client_episode(renderer("client", case), case, texts, Instant(fixture.answers[case.output_tokens]))

        async def client_http(case: Case, texts: list[str]) -> None:
            await _client_episode(renderer("client + HTTP", case), case, texts, pool)

        async def floor(case: Case, texts: list[str]) -> None:
            await _floor_episode(fixture, case, texts, renderer("floor", case).encode_content, None, url)

        async def floor_http(case: Case, texts: list[str]) -> None:
            await _floor_episode(fixture, case, texts, renderer("floor + HTTP", case).encode_content, session, url)

        async def bare(case: Case, texts: list[str]) -> None:
            await _floor_episode(fixture, case, texts, encode_bare, None, url)

        async def bare_http(case: Case, texts: list[str]) -> None:
            await _floor_episode(fixture, case, texts, encode_bare, session, url)

        runs: tuple[Run, ...] = (client, client_http, floor, floor_http, bare, bare_http)
        contestants: dict[str, Run] = dict(zip(CONTESTANTS, runs, strict=True))
        corpora, figures = Corpora(Corpus(fixture.text), Corpus(fixture.source)), Figures()
        for context in contexts:
            cases = [Case(context, *shape) for shape in SHAPES]
            seconds = await _interleaved(fixture, corpora, contestants, cases, repeats)
            for name in CONTESTANTS:
                figures.add(name, str(context), [seconds[name, case] for case in cases])
    return {**figures.rows, "construct_us": _construction(fixture)}


class Figures:
    """Medians by figure, contestant and context."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, dict[str, float]]] = {}

    def add(self, name: str, context: str, seconds: list[list[float]]) -> None:
        """Add what the CPU seconds of a contestant's episodes say, given by shape."""
        plain, long, tools, unseen, source = seconds
        self._put("ms_per_turn_of_8", name, context, 1e3 * median(plain) / TURNS[0], 4)
        self._put("ms_per_turn_of_8_with_tools", name, context, 1e3 * median(tools) / TURNS[0], 4)
        self._put("ms_per_turn_of_8_in_unseen_words", name, context, 1e3 * median(unseen) / TURNS[0], 4)
        self._put("ms_per_turn_of_8_with_unseen_source", name, context, 1e3 * median(source) / TURNS[0], 4)
        self._put("ms_per_episode_of_32_turns", name, context, 1e3 * median(long), 3)
        # Pairs ran one after the other, so that a slow minute hits both; the medians may be of different minutes.
        growth = median([b / a for a, b in zip(plain, long, strict=True)])
        self._put("cpu_of_32_turns_over_8", name, context, growth, 3)
        more = median([b - a for a, b in zip(plain, long, strict=True)]) / (TURNS[1] - TURNS[0])
        self._put("us_per_added_turn", name, context, 1e6 * more, 1)
        for_tools = median([b - a for a, b in zip(plain, tools, strict=True)]) / TURNS[0]
        self._put("us_per_turn_for_tools", name, context, 1e6 * for_tools, 1)

    def _put(self, figure: str, name: str, context: str, value: float, digits: int) -> None:
        self.rows.setdefault(figure, {}).setdefault(name, {})[context] = round(value, digits)


class Corpora(NamedTuple):
    """Where the texts of episodes come from."""

    usual: Corpus
    source: Corpus


async def _interleaved(
    fixture: Fixture,
    corpora: Corpora,
    contestants: dict[str, Run],
    cases: list[Case],
    repeats: int,
) -> dict[tuple[str, Case], list[float]]:
    """Return CPU seconds of each contestant's episodes; contestants take turns, so a slow minute hits all of them."""
    seconds: dict[tuple[str, Case], list[float]] = {}
    for repeat in range(repeats + 2):
        size = int(cases[0].context * max(fixture.chars_per_token.values()))
        usual, source = corpora.usual.take(size), corpora.source.take(size)
        for case in cases:
            texts = _texts(fixture, source if case.kind == "source" else usual, case)
            for name, run in contestants.items():
                start = time.process_time()
                await run(case, texts)
                spent = time.process_time() - start
                if repeat >= 2:
                    seconds.setdefault((name, case), []).append(spent)
    return seconds


def _texts(fixture: Fixture, text: str, case: Case) -> list[str]:
    """Return as much of the text as brings an episode to its context, one part for each turn."""
    frame_tokens = case.turns * (case.output_tokens + FRAME_TOKENS) + (len(fixture.tools_ids) if case.has_tools else 0)
    size = int((case.context - frame_tokens) * fixture.chars_per_token[case.kind] / case.turns)
    corpus, rng = Corpus(text), random.Random(text[:100])
    parts = [corpus.take(size) for _ in range(case.turns)]
    return [in_unseen_words(part, rng) for part in parts] if case.kind == "unseen" else parts


async def _client_episode(renderer: Renderer, case: Case, texts: list[str], backend: Backend) -> None:
    settings = EpisodeSettings(episode_id="bench", task_id="t", max_turns=case.turns)
    client = Client(PolicyBackend(backend, renderer, SamplingConfig(), settings))
    create = cast("Callable[..., Awaitable[ChatCompletion]]", client.chat.completions.create)
    tools = {"tools": TOOLS} if case.has_tools else {}
    messages: list[object] = []
    call_id: str | None = None
    for text in texts:
        sender = {"role": "user"} if call_id is None else {"role": "tool", "tool_call_id": call_id}
        messages.append({**sender, "content": text})
        completion = await create(model="policy", messages=messages, max_tokens=case.output_tokens, **tools)
        message = completion.choices[0].message
        messages.append(message)
        call_id = message.tool_calls[0].id if message.tool_calls else None
        assert (call_id is not None) == case.has_tools
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    assert len(trajectory.turns) == case.turns
    assert len(trajectory.leaves()) == 1


async def _floor_episode(
    fixture: Fixture, case: Case, texts: list[str], encode: Encode, session: aiohttp.ClientSession | None, url: str
) -> None:
    kept: list[bytes] = [orjson.dumps(fixture.tools_ids)[1:-1]] if case.has_tools else []
    answers = fixture.answers[case.output_tokens]
    head = (
        b'{"sampling_params":{"max_new_tokens":%d,"temperature":1.0},"return_logprob":true,"input_ids":['
        % case.output_tokens
    )
    for text, role, generation in zip(texts, _roles(case), answers, strict=False):
        before, after = fixture.frames[role]
        kept.append(orjson.dumps([*before, *encode(text), *after])[1:-1])
        body = head + b",".join(kept) + b"]}"
        if session is None:
            output = generation.output_ids
        else:
            async with session.post(f"{url}/generate", data=body) as response:
                reply = orjson.loads(await response.read())
            triples = reply["meta_info"]["output_token_logprobs"]
            output = np.array([triple[1] for triple in triples], np.int32)
            np.array([triple[0] for triple in triples], np.float32)
        kept.append(orjson.dumps(output.tolist())[1:-1])
        said = fixture.tokenizer.decode(output.tolist())
        if case.has_tools:
            orjson.loads(said[said.index("<tool_call>") + len("<tool_call>") : said.index("</tool_call>")])


def _roles(case: Case) -> list[str]:
    return ["user", *(["tool" if case.has_tools else "user"] * (case.turns - 1))]


def _fixture(folder: Path) -> Fixture:
    text = standard_library()
    tokenizer, bare = save_tokenizer(folder, text)
    text = text[TRAINED_ON:]
    sample = text[:200_000]

    def encode(part: str) -> list[int]:
        return tokenizer.encode(part).ids

    def said(case: Case, words: str) -> Generation:
        """Return a turn's answer: words, and a tool call where there are tools."""
        arguments = json.dumps({"query": " ".join(words.split()[:5])[:50], "limit": 5})
        call = f'\n<tool_call>\n{{"name": "search", "arguments": {arguments}}}\n</tool_call>' if case.has_tools else ""
        call_ids = encode(call)
        ids = [*encode(words)[: case.output_tokens - len(call_ids) - 1], *call_ids]
        assert len(ids) == case.output_tokens - 1
        return answer(ids, encode("<|im_end|>")[0])

    corpus = Corpus(sample)
    spoken = [corpus.take(len(sample) // NUM_ANSWERS // 2) for _ in range(NUM_ANSWERS)]
    per_token = len(sample) / len(encode(sample))
    source = installed_source()
    source_per_token = len(sample) / len(encode(source[: len(sample)]))
    unseen_per_token = len(sample) / len(encode(in_unseen_words(sample, random.Random(0))))
    cases = [Case(0, *shape) for shape in SHAPES]
    tools = "".join("\n" + json.dumps(tool) for tool in TOOLS)
    return Fixture(
        renderers={(name, *shape): Renderer.load(folder) for name in CONTESTANTS for shape in SHAPES},
        tokenizer=tokenizer,
        bare=bare,
        frames={
            "user": (encode("<|im_start|>user\n"), encode("<|im_end|>\n<|im_start|>assistant\n")),
            "tool": (
                encode("<|im_start|>user\n<tool_response>\n"),
                encode("\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
            ),
        },
        tools_ids=encode(f"<|im_start|>system\n# Tools\n<tools>{tools}\n</tools><|im_end|>\n"),
        text=text,
        source=source,
        chars_per_token={
            "plain": per_token,
            "tools": per_token,
            "unseen": unseen_per_token,
            "source": source_per_token,
        },
        answers={case.output_tokens: tuple(said(case, words) for words in spoken) for case in cases},
    )


def _reply(generation: Generation) -> dict[str, object]:
    ids = generation.output_ids.tolist()
    logprobs = generation.output_logprobs.tolist()
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "prompt_tokens": 1,
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
        "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)],
    }
    return {"text": "", "output_ids": ids, "meta_info": meta}


def _server(replies: dict[str, list[object]]) -> web.Application:
    bodies = {b'"max_new_tokens":%d,' % int(size): cycle(map(orjson.dumps, found)) for size, found in replies.items()}

    async def generate(request: web.Request) -> web.Response:
        asked = await request.read()
        answers = next(answers for limit, answers in bodies.items() if limit in asked)
        return web.Response(body=next(answers), content_type="application/json")

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.23", "weight_version": "0", "model_path": "bench", "is_generation": True})

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/generate", generate)
    app.router.add_get("/server_info", info)
    app.router.add_get("/model_info", info)
    return app


def _announce(line: str) -> None:
    for word in line.split():
        if word.startswith("http://"):
            print(word, flush=True)


def _construction(fixture: Fixture) -> float:
    """Return CPU us of constructing a client, the median of several rounds."""
    rounds: list[float] = []
    for _ in range(9):
        start = time.process_time()
        for _ in range(200):
            client = Client(
                PolicyBackend(
                    Instant(fixture.answers[Case(0, 8).output_tokens]),
                    fixture.renderers["client", *SHAPES[0]],
                    SamplingConfig(),
                    EpisodeSettings(episode_id="e", task_id="t"),
                )
            )
            assert client.chat.completions
        rounds.append(time.process_time() - start)
    return round(1e6 * median(rounds) / 200, 2)


def _machine() -> dict[str, str]:
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    packages = ("openai", "aiohttp", "orjson", "tokenizers", "numpy", "anyio")
    return {
        "cpu": cpu,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "date": datetime.now(UTC).date().isoformat(),
    }


def _print(rows: dict[str, object]) -> None:
    tables = cast("dict[str, dict[str, dict[str, float]]]", rows)
    per_episode = {context: TARGET_GROWTH * 8 * aim for context, aim in TARGET_MS.items()}
    added = dict.fromkeys(TARGET_MS, float(TARGET_ADDED_US))
    _print_table("CPU ms per turn, 8 turns to the context (aim: in process)", tables["ms_per_turn_of_8"], TARGET_MS)
    _print_table("the same with tool calls", tables["ms_per_turn_of_8_with_tools"], {})
    _print_table("the same with unseen source code", tables["ms_per_turn_of_8_with_unseen_source"], {})
    _print_table("CPU us of each turn more than without tools", tables["us_per_turn_for_tools"], {})
    _print_table("CPU ms per turn, 8 turns in unseen words", tables["ms_per_turn_of_8_in_unseen_words"], {})
    _print_table("CPU ms per episode of 32 turns (aim: in process)", tables["ms_per_episode_of_32_turns"], per_episode)
    _print_table("CPU us of each turn more, at equal context (aim: in process)", tables["us_per_added_turn"], added)
    _print_table("CPU of 32 turns over 8", tables["cpu_of_32_turns_over_8"], {})
    print(f"constructing a client: {rows['construct_us']} us")


def _print_table(title: str, table: dict[str, dict[str, float]], aims: dict[int, float]) -> None:
    contexts = list(next(iter(table.values())))
    print(f"{title:<60}" + "".join(f"{context:>10}" for context in contexts))
    for name, row in table.items():
        print(f"  {name:<58}" + "".join(f"{row[context]:>10.2f}" for context in contexts))
    if aims:
        print(f"  {'aim':<58}" + "".join(f"{aims.get(int(context), float('nan')):>10.2f}" for context in contexts))


if __name__ == "__main__":
    main()
