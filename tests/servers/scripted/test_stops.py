"""Where scripted replies end: at the first stop, as those of a real server do, in process and over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.client import Client, EpisodeSettings, PolicyBackend, SamplingConfig
from agentrl.errors import ConfigError, RequestRejected
from agentrl.inference.backend import GenerateRequest, Generation, SamplingParams
from agentrl.inference.sglang.server import SGLangServer
from agentrl.servers.embedded.sequences import TextCodec, ending, make_sequence
from agentrl.servers.engine import EngineRequest, EngineSampling, Finish, RequestProgress
from agentrl.servers.scripted.script import End, ReplyText, end_of
from agentrl.servers.scripted.server import Fault, Script, ScriptedReply, ScriptedServer
from agentrl.servers.scripted.socket_server import serve_scripted
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason
from tests.rollout.harness import make_renderer
from tests.support.scripted import VOCAB, request
from tests.support.tiny import build_tokenizer

EOS = 299
TEXT = "hello STOP world"
HI = [{"role": "user", "content": "hi"}]


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in ids)


def asking(max_new_tokens: int = 64, **sampling: object) -> GenerateRequest:
    return replace(request(), sampling=SamplingParams(max_new_tokens=max_new_tokens, **sampling))  # pyright: ignore[reportArgumentType] - test data


def server_of(output: str | Sequence[int], **settings: object) -> ScriptedServer:
    return ScriptedServer(lambda _: output, vocab_size=VOCAB, encode=encode, eos_id=EOS, **settings)  # pyright: ignore[reportArgumentType] - test data


def outcome(generation: Generation) -> tuple[list[int], StopReason, int | str | None]:
    return generation.output_ids.tolist(), generation.stop_reason, generation.matched_stop


CASES: list[tuple[str | Sequence[int], dict[str, object], tuple[list[int], StopReason, int | str | None]]] = [
    (TEXT, {}, ([*encode(TEXT), EOS], StopReason.STOP, EOS)),
    (TEXT, {"stop": ("STOP",)}, (encode("hello STOP"), StopReason.STOP, "STOP")),
    (TEXT, {"stop": ("never said", "wor", "o W")}, (encode("hello STOP wor"), StopReason.STOP, "wor")),
    (TEXT, {"stop": ("lo", "llo")}, (encode("hello"), StopReason.STOP, "lo")),
    (TEXT, {"stop": ("never said",)}, ([*encode(TEXT), EOS], StopReason.STOP, EOS)),
    (TEXT, {"stop_token_ids": (ord("S"),)}, (encode("hello S"), StopReason.STOP, ord("S"))),
    (TEXT, {"stop": ("S",), "stop_token_ids": (ord("S"),)}, (encode("hello S"), StopReason.STOP, "S")),
    (TEXT, {"stop": ("STOP",), "max_new_tokens": 4}, (encode("hell"), StopReason.LENGTH, None)),
    (TEXT, {"stop": ("hell",), "max_new_tokens": 4}, (encode("hell"), StopReason.STOP, "hell")),
    (TEXT, {"ignore_eos": True, "stop_token_ids": (ord("S"),)}, ([*encode(TEXT), EOS], StopReason.LENGTH, None)),
    ([7, 8, EOS, 9], {}, ([7, 8, EOS], StopReason.STOP, EOS)),
    ([7, 8, EOS, 9], {"ignore_eos": True}, ([7, 8, EOS, 9], StopReason.LENGTH, None)),
    ([7, 8, EOS], {"max_new_tokens": 3}, ([7, 8, EOS], StopReason.STOP, EOS)),
    ([7, 8, EOS], {"max_new_tokens": 2}, ([7, 8], StopReason.LENGTH, None)),
    ([7, 8, 9], {}, ([7, 8, 9], StopReason.LENGTH, None)),
    ([7, 8, 9], {"stop_token_ids": (8, 9)}, ([7, 8], StopReason.STOP, 8)),
]


@pytest.mark.parametrize(("output", "sampling", "expected"), CASES)
async def test_a_reply_ends_at_its_first_stop_and_keeps_what_completed_it(
    output: str | Sequence[int], sampling: dict[str, object], expected: tuple[list[int], StopReason, int | str | None]
) -> None:
    server = server_of(output)
    assert outcome(await server.generate(asking(**sampling))) == expected  # pyright: ignore[reportArgumentType] - test data
    async with server.stream(asking(**sampling)) as stream:  # pyright: ignore[reportArgumentType] - test data
        chunks = [chunk async for chunk in stream]
    assert [token for chunk in chunks for token in chunk.output_ids.tolist()] == expected[0]
    assert chunks[-1].generation is not None
    assert outcome(chunks[-1].generation) == expected


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_over_http_a_reply_ends_where_it_ends_in_process(anyio_backend: str) -> None:
    scripted = ScriptedServer(lambda call: CASES[call.index // 2][0], vocab_size=VOCAB, encode=encode, eos_id=EOS)
    async with (
        serve_scripted(scripted) as http,
        SGLangServer(http.url, vocab_size=VOCAB) as server,
    ):
        for _, sampling, expected in CASES:
            assert outcome(await server.generate(asking(**sampling))) == expected  # pyright: ignore[reportArgumentType] - test data
            async with server.stream(asking(**sampling)) as stream:  # pyright: ignore[reportArgumentType] - test data
                chunks = [chunk async for chunk in stream]
            assert chunks[-1].generation is not None
            assert outcome(chunks[-1].generation) == expected


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_over_http_sampling_parameters_nobody_can_serve_are_refused_as_by_the_app(anyio_backend: str) -> None:
    async with serve_scripted(server_of(TEXT)) as http, SGLangServer(http.url, vocab_size=VOCAB) as server:
        with pytest.raises(RequestRejected, match="top_p must be in"):
            await server.generate(asking(top_p=2.0))
        assert outcome(await server.generate(asking(stop=("hell",)))) == (encode("hell"), StopReason.STOP, "hell")


async def test_stop_strings_are_found_in_ids_when_the_server_can_read_them() -> None:
    server = server_of([*encode(TEXT), EOS], decode=decode)
    assert outcome(await server.generate(asking(stop=("STOP",)))) == (encode("hello STOP"), StopReason.STOP, "STOP")


async def test_stop_strings_and_ids_nobody_can_read_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot decode them: pass decode=, or answer with text"):
        await server_of(encode(TEXT)).generate(asking(stop=("STOP",)))


async def test_a_stop_within_an_id_keeps_the_whole_id() -> None:
    def threes(text: str) -> list[int]:
        return [sum(text[at : at + 3].encode()) % VOCAB for at in range(0, len(text), 3)]

    server = ScriptedServer(lambda _: TEXT, vocab_size=VOCAB, encode=threes, eos_id=EOS)
    generation = await server.generate(asking(stop=("ST",)))
    assert outcome(generation) == (threes("hello STO"), StopReason.STOP, "ST")


async def test_a_fault_comes_before_any_stop() -> None:
    server = ScriptedServer(lambda _: ScriptedReply(fault=Fault.BAD_REQUEST), vocab_size=VOCAB)
    with pytest.raises(RequestRejected):
        await server.generate(asking(stop=("STOP",), stop_token_ids=(0,)))


async def test_a_reply_taken_up_after_an_abort_ends_at_its_stop() -> None:
    reply = ScriptedReply(output=[7, 8, 9, 10], fault=Fault.ABORT)
    server = ScriptedServer(lambda _: reply, vocab_size=VOCAB, eos_id=9)
    assert outcome(await server.generate(asking())) == ([7, 8, 9], StopReason.STOP, 9)


def test_no_stop_token_counts_before_the_least_number_of_tokens() -> None:
    sampling = EngineSampling(max_new_tokens=9, min_new_tokens=2)
    assert end_of([5, 9, 9, 6], sampling, eos_id=9, text=ReplyText()) == End(3, "stop", 9)
    assert end_of([5, 9], sampling, eos_id=9, text=ReplyText()) == End(2, "length", None)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("ended", [True, False])
async def test_the_client_reads_every_id_of_a_reply_that_no_stop_ends(
    anyio_backend: str, tmp_path: Path, ended: bool
) -> None:
    renderer = make_renderer(tmp_path)
    ids = [*renderer.encode_content("hello"), *(renderer.eos_ids if ended else ())]
    client = _client(renderer, lambda _: ids)
    whole = await client.chat.completions.create(messages=HI)
    assert whole.choices[0].message.content == "hello"
    assert whole.choices[0].finish_reason == ("stop" if ended else "length")
    stream = await client.chat.completions.create(messages=HI, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello"


async def test_the_client_gets_the_text_before_the_stop_it_asked_for(tmp_path: Path) -> None:
    renderer = make_renderer(tmp_path)
    client = _client(renderer, lambda _: TEXT)
    completion = await client.chat.completions.create(messages=HI, stop="STOP")
    assert completion.choices[0].message.content == "hello "
    assert client.graph.turns[-1].stop_reason is StopReason.STOP


def _client(renderer: Renderer, script: Script) -> Client:
    server = ScriptedServer(
        script, vocab_size=renderer.vocab_size, encode=renderer.encode_content, eos_id=renderer.end_of_turn_id
    )
    return Client(
        PolicyBackend(server, renderer, SamplingConfig(max_tokens=50), EpisodeSettings(episode_id="e", task_id="t"))
    )


class _Sink:
    def progress(self, progress: RequestProgress) -> None:
        pass

    def finish(self, progress: RequestProgress) -> None:
        pass


@cache
def _codec() -> TextCodec:
    with TemporaryDirectory() as folder:
        build_tokenizer(Path(folder))
        return TextCodec(folder)


@given(
    pieces=st.lists(
        st.sampled_from(["good", " bad", "<|im_end|>", "ST", "OP", " ", "é", "the", "\n"]), min_size=1, max_size=8
    ),
    stop=st.lists(st.sampled_from(["STOP", "go", "d b", "é", "\n\n", "<|im_end|>", "e", ""]), max_size=2),
    token=st.booleans(),
    ignore_eos=st.booleans(),
    max_new_tokens=st.integers(1, 12),
)
def test_a_scripted_reply_ends_where_the_embedded_server_would_end_it(
    pieces: list[str], stop: list[str], token: bool, ignore_eos: bool, max_new_tokens: int
) -> None:
    codec, text = _codec(), "".join(pieces)
    ids = codec.encode(text)
    [eos] = codec.encode("<|im_end|>")
    sampling = EngineSampling(
        max_new_tokens=max_new_tokens,
        stop=tuple(stop),
        stop_token_ids=(ids[-1],) if token else (),
        ignore_eos=ignore_eos,
    )
    decoded = ReplyText(decode=partial(codec.decode, skip_special_tokens=False))
    got = end_of(ids, sampling, eos_id=eos, text=decoded)
    assert got == end_of(ids, sampling, eos_id=eos, text=ReplyText(text=text, encode=codec.encode))
    sequence = make_sequence(
        EngineRequest(rid="r", input_ids=[1], sampling=sampling),
        _Sink(),
        vocab_size=1 << 20,
        max_context=100,
        codec=codec,
        eos_ids=frozenset({eos}),
        seed=0,
    )
    finish: Finish | None = None
    for sampled in ids:
        sequence.progress.output_ids.append(sampled)
        finish = ending(sequence, sampled, is_eos=sampled == eos and not ignore_eos, codec=codec)
        if finish is not None:
            break
    finish = finish or Finish(kind="length")
    assert got == (len(sequence.progress.output_ids), finish.kind, finish.matched)
