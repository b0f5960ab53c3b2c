"""Playback of scripted replies, token by token, with holds, pauses, weight swaps and aborts.

Invariant: each token carries the version and the log-prob of the weights at the moment it is played. When the client asks
for the rest of an aborted reply, playback continues where it stopped, so an interruption changes no ids.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import orjson

from agentrl.errors import ConfigError, RequestRejected
from agentrl.servers.engine import EngineRequest, Finish, RequestProgress
from agentrl.servers.http.replies import reply as reply_of
from agentrl.servers.scripted.script import (
    End,
    Fault,
    ReplyText,
    Script,
    ScriptedCall,
    ScriptedReply,
    TextDecoder,
    TextEncoder,
    corrupt,
    end_of,
)
from agentrl.types import Int32Array
from agentrl.weights.types import scripted_logprobs

_MAX_UNFINISHED = 1024


@dataclass(slots=True, eq=False, kw_only=True)
class Playback:
    """A reply in progress."""

    player: ScriptPlayer
    call: ScriptedCall
    reply: ScriptedReply
    planned: list[int]
    """All ids of the reply up to its end."""
    end: End
    progress: RequestProgress
    aborted: str | None = None
    is_given_up: bool = False
    """Whether the client wants no more of it, so that nothing continues it."""
    _wait: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def tokens(self) -> AsyncGenerator[RequestProgress, None]:
        """Play the reply and yield the output after each token; stop early when aborted."""
        while await self.play_token():
            yield self.progress

    async def play_token(self) -> bool:
        """Play the next token; False: there is none, or the reply was aborted. A cancelled call may be made again."""
        position = len(self.progress.output_ids)
        if position == len(self.planned):
            return False
        if self.reply.fault is Fault.ABORT and position == len(self.planned) // 2:
            self.abort("aborted by the script")
        for hold in self.reply.holds:
            if hold.at == position:
                hold.reached.set()
                await self.unless_aborted(hold.release.wait)
        await anyio.lowlevel.checkpoint()
        while self.player.gate is not None and self.aborted is None:
            await self.unless_aborted(self.player.gate.wait)
        if self.aborted is not None:
            return False
        self._push(position, self.planned[position])
        return True

    def abort(self, message: str) -> None:
        """End the reply before its next token."""
        self.aborted = message
        self._wait.cancel()

    def give_up(self) -> None:
        """End the reply before its next token, for good."""
        self.is_given_up = True
        self.abort("given up")

    @property
    def finish(self) -> Finish:
        """The end of the reply if no token follows."""
        if len(self.progress.output_ids) < len(self.planned):
            return Finish(kind="abort", message=self.aborted or "the server stops")
        return Finish(kind=self.end.kind, matched=self.end.matched)

    def body(self) -> dict[str, Any]:
        """Return the reply in SGLang's format, with the script's fault in it."""
        version = str(self.player.version)
        progress = replace(self.progress, finish=self.finish)
        body = reply_of(progress, lambda _: "", logprobs=True, prompt_ids=False, weight_version=version, seconds=0.0)
        body = orjson.loads(orjson.dumps(body))  # a copy, for `corrupt` changes it
        return corrupt(body, self.reply.fault, self.player.vocab_size) if progress.output_ids else body

    async def unless_aborted(self, wait: Callable[[], Awaitable[object]]) -> None:
        """Wait for something, or for the end of the reply."""
        with anyio.CancelScope() as self._wait:
            if self.aborted is None:
                await wait()

    def _push(self, position: int, token: int) -> None:
        progress, version = self.progress, self.player.version
        if not progress.versions or progress.versions[-1][0] != str(version):
            progress.versions.append((str(version), position))
        if self.reply.logprobs is not None:
            logprob = float(self.reply.logprobs[position])
        else:
            before = self.planned[position - 1] if position else int(self.call.input_ids[-1])
            logprob = float(scripted_logprobs(np.array([before, token], np.int32), version)[0])
        progress.output_ids.append(token)
        progress.output_logprobs.append(logprob)


class ScriptPlayer:
    """Asks the script for replies and plays them: the state that all replies of one scripted engine share."""

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int,
        encode: TextEncoder | None = None,
        decode: TextDecoder | None = None,
        eos_id: int | None = None,
        version: int = 0,
    ) -> None:
        self._script, self._encode, self._eos_id = script, encode, eos_id
        self.decode = decode
        self.vocab_size = vocab_size
        self.version = version
        self.gate: anyio.Event | None = None
        """Set when the pause ends; None while there is no pause."""
        self.calls: list[ScriptedCall] = []
        self.playing: dict[str, Playback] = {}
        self._answered: defaultdict[str, int] = defaultdict(int)
        self._contexts: dict[bytes, int] = {}
        self._lengths: set[int] = set()
        self._unfinished: OrderedDict[tuple[str, bytes], tuple[Playback, list[int]]] = OrderedDict()
        """Aborted replies and the ids left of them, by episode and context."""

    def begin(self, request: EngineRequest, episode_id: str = "") -> Playback:
        """Ask the script for a reply, or continue one that was aborted; the caller must call `finish` afterwards."""
        if request.rid in self.playing:
            raise RequestRejected(f"request id {request.rid} is in use (a duplicate request id)", status=400)
        input_ids = np.array(request.input_ids, np.int32)
        unfinished = self._unfinished.pop((episode_id, input_ids.tobytes()), None)
        if unfinished is not None:
            original, rest = unfinished
            progress = RequestProgress(request=request)
            playback = replace(original, planned=rest, reply=ScriptedReply(), progress=progress, aborted=None)
            playback.call = replace(original.call, request_id=request.rid, input_ids=input_ids, sampling=request.sampling)
        else:
            playback = self._ask(request, episode_id, input_ids)
        self.playing[request.rid] = playback
        return playback

    def finish(self, request_id: str) -> RequestProgress:
        """Record the end of a reply; return its output."""
        playback = self.playing.pop(request_id)
        progress, call = playback.progress, playback.call
        progress.finish = playback.finish
        context = np.concatenate([call.input_ids, np.array(progress.output_ids, np.int32)])
        rest = playback.planned[len(progress.output_ids) :]
        if playback.aborted is not None and rest and not playback.is_given_up:
            self._unfinished[call.episode_id, context.tobytes()] = (playback, rest)
            if len(self._unfinished) > _MAX_UNFINISHED:
                self._unfinished.popitem(last=False)
        elif not rest:
            self._answered[call.episode_id] += 1
            if not call.episode_id:
                self._contexts[context.tobytes()] = call.turn + 1
                self._lengths.add(len(context))
        return progress

    def pause(self, *, retract: bool) -> None:
        """Hold all replies before their next token."""
        if self.gate is None:
            self.gate = anyio.Event()
        for playback in self.playing.values():
            playback.progress.num_retractions += retract and bool(playback.progress.output_ids)

    def resume(self) -> None:
        """Continue all replies."""
        gate, self.gate = self.gate, None
        if gate is not None:
            gate.set()

    def _ask(self, request: EngineRequest, episode_id: str, input_ids: Int32Array) -> Playback:
        call = ScriptedCall(
            index=len(self.calls),
            turn=self._answered[episode_id] if episode_id else self._turn(input_ids),
            episode_id=episode_id,
            request_id=request.rid,
            input_ids=input_ids,
            sampling=request.sampling,
            version=self.version,
        )
        self.calls.append(call)
        answer = self._script(call)
        reply = answer if isinstance(answer, ScriptedReply) else ScriptedReply(output=answer)
        ids, text = self._ids(reply), reply.output if isinstance(reply.output, str) else None
        reply_text = ReplyText(text=text, encode=self._encode, decode=self.decode)
        end = end_of(ids, request.sampling, eos_id=self._eos_id, text=reply_text)
        progress = RequestProgress(request=request)
        return Playback(player=self, call=call, reply=reply, planned=ids[: end.num_ids], end=end, progress=progress)

    def _turn(self, input_ids: Int32Array) -> int:
        for length in sorted(self._lengths, reverse=True):
            if length < len(input_ids) and (turn := self._contexts.get(input_ids[:length].tobytes())) is not None:
                return turn
        return 0

    def _ids(self, reply: ScriptedReply) -> list[int]:
        if not isinstance(reply.output, str):
            ids = [int(token) for token in reply.output]
        elif self._encode is None and reply.output:
            raise ConfigError("the script answers with text: pass encode= to the scripted server, such as a renderer's")
        else:
            ids = list(self._encode(reply.output)) if self._encode is not None else []
            ids += [] if self._eos_id is None else [self._eos_id]
        if reply.fault is not None and not ids:
            ids = [0, 1]
        if not ids or min(ids) < 0 or max(ids) >= self.vocab_size:
            raise ConfigError(f"a scripted reply needs at least one id, all in 0..{self.vocab_size - 1}; got {ids[:8]}")
        if reply.logprobs is not None and len(reply.logprobs) != len(ids):
            raise ConfigError(f"a scripted reply has {len(ids)} ids but {len(reply.logprobs)} logprobs")
        return ids
