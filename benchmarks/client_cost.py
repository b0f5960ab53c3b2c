"""CPU time of one model turn through the client, beside a hand-written floor in the same run.

Run: `python -m benchmarks.client_cost` (two minutes; `--repeats 5 --contexts 4096` for less). It prints a table and
writes benchmarks/results/client_cost.json. Each episode grows to the given context in 8 (or 32) turns of equal size; the
server answers at once, so what is measured is everything else: rendering, tokenizing, request, reply, recording, openai
objects. CPU is `time.process_time` of the client's process; the HTTP server is another process.

  client          Client on a backend in the same process
  client + HTTP   Client on the pool a run uses (ServerPool, SGLangServer, aiohttp); the server answers with prepared bytes
  floor           what cannot be saved: new text encoded once (by agentrl's encoder), decimal ids appended to the kept
                  request, the output decoded
  floor + HTTP    the same, sent with aiohttp; the reply read with orjson
  tokenizers      the floor, with `tokenizers` as the encoder

The texts are Python's standard library, other ones in each repeat. All contestants get the same, in 8 or in 32 parts, and
each has an encoder of its own for either, so that it remembers words of other texts only.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeAlias, cast

import aiohttp
import anyio
import numpy as np
import orjson
from aiohttp import web
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from agentrl.client import Client, SamplingConfig
from agentrl.inference.backend import Backend, GenerateRequest, Generation, GenerationChunk
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool.pool import ServerPool
from agentrl.inference.sglang.server import SGLangServer
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason, VersionSpan
from tests.support.tiny import CHAT_TEMPLATE, MARKERS, SPECIALS

RESULTS = Path(__file__).parent / "results" / "client_cost.json"
OUTPUT_TOKENS = 512
"""Sampled in a whole episode, however many turns it has, so that the text to tokenize is equal too."""
TURNS = (8, 32)
FRAME_TOKENS = 8
"""What the chat template adds to a turn, about."""
VOCABULARY = 16_384
TRAINED_ON = 1_500_000
"""Characters of the corpus the tokenizer is trained on; the rest is what episodes are about."""
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 and Qwen3 cut text into pieces; the benchmark's tokenizer works as theirs, with a vocabulary of its own."""
TARGET_MS = {4096: 0.7, 16384: 2.0, 32768: 4.0}
TARGET_GROWTH = 1.3
"""CPU of an episode of 32 turns, over what the aim allows one of 8 turns (docs/adr/0011-words.md)."""
TARGET_ADDED_US = 200
"""CPU of a turn more, at any context (the same)."""
Encode: TypeAlias = Callable[[str], list[int]]
CONTESTANTS = ("client", "client + HTTP", "floor", "floor + HTTP", "tokenizers")


class Case(NamedTuple):
    """One shape of episode."""

    context: int
    turns: int

    @property
    def output_tokens(self) -> int:
        """Sampled in one turn."""
        return OUTPUT_TOKENS // self.turns


Run: TypeAlias = Callable[[Case, list[str]], Awaitable[None]]


class Fixture(NamedTuple):
    """What all contestants share."""

    renderers: dict[tuple[str, int], Renderer]
    """By contestant and number of turns: none profits from the words another has met."""
    tokenizer: Tokenizer
    bare: Tokenizer
    """The same without added tokens."""
    frame: tuple[list[int], list[int]]
    """Ids before and after a user's text."""
    text: str
    chars_per_token: float
    generations: dict[int, Generation]
    """By number of tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=180)
    parser.add_argument("--contexts", type=int, nargs="+", default=sorted(TARGET_MS))
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
        reply.write_bytes(orjson.dumps({str(size): _reply(generation) for size, generation in fixture.generations.items()}))
        command = [sys.executable, "-m", "benchmarks.client_cost", "--serve", str(reply)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().strip()
                rows = anyio.run(_measure, fixture, url, options.contexts, options.repeats)
            finally:
                server.terminate()
    report = {"machine": _machine(), "repeats": options.repeats, "output_tokens": OUTPUT_TOKENS, **rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    _print(rows)


async def _measure(fixture: Fixture, url: str, contexts: list[int], repeats: int) -> dict[str, object]:
    async with (
        ServerPool([SGLangServer(url, vocab_size=VOCABULARY)], InferenceConfig()) as pool,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):

        def encode_bare(text: str) -> list[int]:
            return fixture.bare.encode_batch_fast([text], add_special_tokens=False)[0].ids

        def renderer(name: str, case: Case) -> Renderer:
            return fixture.renderers[name, case.turns]

        async def client(case: Case, texts: list[str]) -> None:
            instant = Instant(fixture.generations[case.output_tokens])
            await _client_episode(renderer("client", case), case, texts, instant)

        async def client_http(case: Case, texts: list[str]) -> None:
            await _client_episode(renderer("client + HTTP", case), case, texts, pool)

        async def floor(case: Case, texts: list[str]) -> None:
            await _floor_episode(fixture, case, texts, renderer("floor", case).encode_content, None, url)

        async def floor_http(case: Case, texts: list[str]) -> None:
            await _floor_episode(fixture, case, texts, renderer("floor + HTTP", case).encode_content, session, url)

        async def bare(case: Case, texts: list[str]) -> None:
            await _floor_episode(fixture, case, texts, encode_bare, None, url)

        runs: tuple[Run, ...] = (client, client_http, floor, floor_http, bare)
        contestants: dict[str, Run] = dict(zip(CONTESTANTS, runs, strict=True))
        per_turn: dict[str, dict[str, float]] = {name: {} for name in CONTESTANTS}
        longer: dict[str, dict[str, float]] = {name: {} for name in CONTESTANTS}
        growth: dict[str, dict[str, float]] = {name: {} for name in CONTESTANTS}
        added: dict[str, dict[str, float]] = {name: {} for name in CONTESTANTS}
        corpus = Corpus(fixture.text)
        for context in contexts:
            cases = [Case(context, turns) for turns in TURNS]
            seconds = await _interleaved(fixture, corpus, contestants, cases, repeats)
            for name in CONTESTANTS:
                short, long = (median(seconds[name, case]) for case in cases)
                per_turn[name][str(context)] = round(1e3 * short / TURNS[0], 4)
                longer[name][str(context)] = round(1e3 * long, 3)
                # Pairs ran one after the other, so that a slow minute hits both; the medians may be of different minutes.
                pairs = list(zip(*(seconds[name, case] for case in cases), strict=True))
                growth[name][str(context)] = round(median([long / short for short, long in pairs]), 3)
                more = [long - short for short, long in pairs]
                added[name][str(context)] = round(1e6 * median(more) / (TURNS[1] - TURNS[0]), 1)
    return {
        "ms_per_turn_of_8": per_turn,
        "ms_per_episode_of_32_turns": longer,
        "cpu_of_32_turns_over_8": growth,
        "us_per_added_turn": added,
        "construct_us": _construction(fixture),
    }


async def _interleaved(
    fixture: Fixture,
    corpus: Corpus,
    contestants: dict[str, Run],
    cases: list[Case],
    repeats: int,
) -> dict[tuple[str, Case], list[float]]:
    """Return CPU seconds of each contestant's episodes; contestants take turns, so a slow minute hits all of them."""
    seconds: dict[tuple[str, Case], list[float]] = {}
    for repeat in range(repeats + 2):
        text = corpus.take(int(cases[0].context * fixture.chars_per_token))
        for case in cases:
            texts = _texts(fixture, text, case)
            for name, run in contestants.items():
                start = time.process_time()
                await run(case, texts)
                spent = time.process_time() - start
                if repeat >= 2:
                    seconds.setdefault((name, case), []).append(spent)
    return seconds


class Corpus:
    """Hands out a text piece by piece, and starts again at its end."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def take(self, size: int) -> str:
        """Return the next `size` characters, and those up to the end of the word."""
        end = self._text.find(" ", self._at + size)
        if end < 0:
            self._at, end = 0, self._text.index(" ", size)
        text, self._at = self._text[self._at : end], end
        return text


def _texts(fixture: Fixture, text: str, case: Case) -> list[str]:
    """Return as much of the text as brings an episode to its context, one part for each turn."""
    user_tokens = case.context - case.turns * (case.output_tokens + FRAME_TOKENS)
    corpus = Corpus(text)
    return [corpus.take(int(user_tokens * fixture.chars_per_token / case.turns)) for _ in range(case.turns)]


async def _client_episode(renderer: Renderer, case: Case, texts: list[str], backend: Backend) -> None:
    client = Client(
        backend=backend,
        renderer=renderer,
        sampling=SamplingConfig(),
        episode_id="bench",
        task_id="t",
        max_turns=case.turns,
    )
    messages: list[object] = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        completion = await client.chat.completions.create(model="policy", messages=messages, max_tokens=case.output_tokens)  # pyright: ignore
        messages.append(completion.choices[0].message)
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    assert len(trajectory.turns) == case.turns
    assert len(trajectory.leaves()) == 1


async def _floor_episode(
    fixture: Fixture, case: Case, texts: list[str], encode: Encode, session: aiohttp.ClientSession | None, url: str
) -> None:
    kept: list[bytes] = []
    generation = fixture.generations[case.output_tokens]
    head = (
        b'{"sampling_params":{"max_new_tokens":%d,"temperature":1.0},"return_logprob":true,"input_ids":['
        % case.output_tokens
    )
    before, after = fixture.frame
    for text in texts:
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
        fixture.tokenizer.decode(output.tolist())


class Instant:
    """A backend in this process that answers at once."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the prepared generation."""
        return self._generation

    def stream(self, request: GenerateRequest) -> AbstractAsyncContextManager[AsyncIterator[GenerationChunk]]:
        """Refuse."""
        raise RuntimeError("this benchmark does not stream")


def _fixture(folder: Path) -> Fixture:
    text = _corpus()
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue] - typed read-only
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, level])  # pyright: ignore[reportAttributeAccessIssue] - typed read-only
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue] - typed read-only
    size = VOCABULARY - len(SPECIALS) - len(MARKERS)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([text[:TRAINED_ON]], trainer)
    bare = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "max_position_embeddings": 65_536}))
    text = text[TRAINED_ON:]
    sample = text[:200_000]
    generations = {size: _generation(tokenizer, sample, size) for size in (OUTPUT_TOKENS // turns for turns in TURNS)}
    chars_per_token = len(sample) / len(tokenizer.encode(sample).ids)
    frame = [tokenizer.encode(part).ids for part in ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")]
    renderers = {(name, turns): Renderer.load(folder) for name in CONTESTANTS for turns in TURNS}
    return Fixture(renderers, tokenizer, bare, (frame[0], frame[1]), text, chars_per_token, generations)


def _corpus() -> str:
    """Return Python's standard library, the files in an order that is arbitrary and always the same."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(root.rglob("*.py")) if "site-packages" not in file.parts]
    random.Random(0).shuffle(files)
    return "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)


def _generation(tokenizer: Tokenizer, sample: str, size: int) -> Generation:
    ids = np.array([*tokenizer.encode(sample).ids[: size - 1], tokenizer.token_to_id("<|im_end|>")], np.int32)
    return Generation(
        output_ids=ids,
        output_logprobs=-np.linspace(0.01, 3.0, len(ids), dtype=np.float32),
        spans=(VersionSpan(start=0, end=len(ids), version=0),),
        stop_reason=StopReason.STOP,
        matched_stop=int(ids[-1]),
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


def _server(replies: dict[str, object]) -> web.Application:
    bodies = {b'"max_new_tokens":%d,' % int(size): orjson.dumps(reply) for size, reply in replies.items()}

    async def generate(request: web.Request) -> web.Response:
        asked = await request.read()
        body = next(body for limit, body in bodies.items() if limit in asked)
        return web.Response(body=body, content_type="application/json")

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
                backend=Instant(fixture.generations[Case(0, 8).output_tokens]),
                renderer=fixture.renderers["client", TURNS[0]],
                sampling=SamplingConfig(),
                episode_id="e",
                task_id="t",
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
