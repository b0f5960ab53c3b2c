"""A server that answers from a script: for agentrl's tests and for those of your workflows. No model, no torch, no sockets.

Invariant: it keeps every promise of `Backend` and `Inference` that a real server keeps, and breaks exactly those a
`Fault` names; its replies pass through the same checks as those of a real server. Runs under asyncio and trio.

Example:
    >>> import anyio
    >>> from agentrl.context import Context
    >>> from agentrl.inference.base import GenerateRequest, SamplingParams
    >>> def encode(text: str) -> list[int]:
    ...     return list(text.encode())
    >>> server = ScriptedServer.from_texts(encode, ["<tool_call>...", "The answer is 4"], vocab_size=300, eos_id=299)
    >>> request = GenerateRequest(request_id="0" * 32, episode_id="e", context=Context.of([1, 2, 3]),
    ...                           sampling=SamplingParams(max_new_tokens=64))
    >>> generation = anyio.run(server.generate, request)
    >>> bytes(generation.output_ids[:-1].tolist()).decode(), generation.matched_stop
    ('<tool_call>...', 299)
    >>> server.calls[0].turn, len(server.calls)
    (0, 1)

A script is a function, so it can look at the call, and fail as it likes:

    def script(call: ScriptedCall) -> ScriptedReply:
        if call.index == 0:
            return ScriptedReply(fault=Fault.REFUSE)
        return ScriptedReply(output="The answer is 4")
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import numpy as np
import orjson

from agentrl.errors import RequestRejected, ServerUnavailable
from agentrl.inference.assembly import Assembly
from agentrl.inference.base import GenerateRequest, Generation, GenerationChunk
from agentrl.inference.performance import Stage
from agentrl.inference.scope import Deadline
from agentrl.inference.script import Fault, Hold, Script, ScriptedCall, ScriptedReply, scripted_logprobs
from agentrl.inference.scripted_control import ScriptedControl
from agentrl.inference.scripted_stops import Decode, Encode
from agentrl.inference.wire import check_request, parse_reply

__all__ = ["Fault", "Hold", "Script", "ScriptedCall", "ScriptedReply", "ScriptedServer", "scripted_logprobs"]


class ScriptedServer(ScriptedControl):
    """Implements `Inference`, and the pool's `Server`, in process.

    What happened is recorded: `calls`, `updates` and `aborted`. What is to fail: `ScriptedReply.fault` for a model call,
    `control_faults` for a control call, `die` and `revive` for the whole server.
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int,
        encode: Encode | None = None,
        decode: Decode | None = None,
        eos_id: int | None = None,
        url: str = "scripted://0",
        version: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        """Begin with no call answered.

        Args:
            script: answers each call with a `ScriptedReply`, text or ids.
            vocab_size: ids sent and received are below it.
            encode: turns the script's text into ids; needed only for text.
            decode: turns ids into text, control tokens included; needed only to find stop strings in a script's ids.
            eos_id: the model's end token: it ends a reply wherever it comes, and is appended to text.
            url: its name in messages.
            version: of the weights it starts with.
            timeout_s: deadline of each model and control call, seconds; what `Fault.HANG` runs into.
        """
        stage = Stage(script, vocab_size=vocab_size, encode=encode, decode=decode, eos_id=eos_id, version=version)
        super().__init__(stage, url=url, timeout_s=timeout_s)
        self.aborted: list[str] = []
        """Request ids of calls that were cancelled."""

    @classmethod
    def from_texts(
        cls, encode: Encode, texts: Sequence[str], *, vocab_size: int, eos_id: int | None = None
    ) -> ScriptedServer:
        """Return a server that gives `texts[turn]` in each episode; a call beyond the last is rejected.

        Args:
            encode: turns what the model would write, markup included, into ids.
            texts: one for each turn.
            vocab_size: ids are below it.
            eos_id: ends each turn.
        """

        def script(call: ScriptedCall) -> ScriptedReply:
            if call.turn >= len(texts):
                raise RequestRejected(
                    f"the script has {len(texts)} turns; episode {call.episode_id!r} asked for one more", status=400
                )
            return ScriptedReply(output=texts[call.turn])

        return cls(script, vocab_size=vocab_size, encode=encode, eos_id=eos_id)

    @property
    def calls(self) -> Sequence[ScriptedCall]:
        """All calls the script was asked, in order."""
        return self.stage.calls

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return what the script answers; see `Backend.generate`.

        Raises:
            ServerError: what the script's fault stands for.
            ConfigError: the script's reply cannot be played.

        Cancellation: the request id is added to `aborted`.
        """
        check_request(request, self.stage.vocab_size)
        assembly = Assembly(request, self.url)
        with Deadline(self._timeout_s, lambda: f"{self.url}: request {request.request_id} got no answer", self.url):
            while not assembly.done:
                async with aclosing(self._play(assembly)) as positions:
                    async for _ in positions:
                        pass
        return assembly.generation()

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[GenerationChunk], None]:
        """Yield what the script answers, one token at a time; see `Backend.stream`.

        Raises:
            ServerError: as for `generate`.

        Cancellation: the request id is added to `aborted`, also when the block is left early.
        """
        check_request(request, self.stage.vocab_size)
        async with aclosing(self._chunks(request)) as chunks:
            yield chunks

    def release(self, episode_id: str) -> None:
        """Do nothing: one server is every episode's home."""

    async def _chunks(self, request: GenerateRequest) -> AsyncGenerator[GenerationChunk, None]:
        assembly = Assembly(request, self.url)
        while not assembly.done:
            async with aclosing(self._play(assembly, streamed=True)) as positions:
                async for token in positions:
                    yield GenerationChunk(output_ids=np.array([token], np.int32))
        yield GenerationChunk(output_ids=np.empty(0, np.int32), generation=assembly.generation())

    async def _play(self, assembly: Assembly, *, streamed: bool = False) -> AsyncGenerator[int, None]:
        """Play one piece, yield its tokens, and add it to the assembly."""
        request, sampled = assembly.request, assembly.output_ids
        sampling = replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - len(sampled))
        rid, _ = assembly.body()
        await self.misbehave(None)
        performance = self.stage.begin(rid, request.episode_id, np.concatenate([request.input_ids, sampled]), sampling)
        fault = performance.reply.fault
        try:
            await self.misbehave(fault)
            async with aclosing(performance.tokens()) as positions:
                async for _ in positions:
                    if fault in (Fault.DIE, Fault.RESET_MID_BODY):
                        raise ServerUnavailable(f"{self.url}: died mid-request, as scripted", url=self.url)
                    yield performance.ids[-1]
            await self.misbehave(None)
        except BaseException as error:
            if not isinstance(error, Exception):  # cancelled, or the stream was left
                self.aborted.append(request.request_id)
            raise
        finally:
            self.stage.finish(rid)
        reply = parse_reply(orjson.dumps(performance.body(rid)), vocab_size=self.stage.vocab_size, url=self.url)
        assembly.take(reply, None, expected=False, caller_aborted=False, streamed=streamed)
