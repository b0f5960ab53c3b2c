"""Episodes whose model answers from a list, and unmodified clients of their doors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
from openai import AsyncOpenAI

from agentrl.client import Client, Door, EpisodeSettings, PolicyBackend
from agentrl.inference.backend import Backend
from agentrl.rollout.scripted_policy import UNLIMITED, plain_tokenizer
from agentrl.servers.scripted.script import ScriptedCall, ScriptedReply
from agentrl.servers.scripted.server import ScriptedServer

HI: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
CALC: Any = {
    "type": "function",
    "function": {
        "name": "calc",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}, "exact": {"type": "boolean", "default": False}},
        },
    },
}
CALLING = 'I add.\n<tool_call>\n{"name": "calc", "arguments": {"b" :  3.0, "a": 2}}\n</tool_call>'


def scripted_client(replies: Sequence[str | ScriptedReply], **settings: Any) -> tuple[Client, ScriptedServer]:  # noqa: ANN401
    """Return a client whose calls get the replies in order, and the server that gives them."""
    server = scripted_server(replies)
    return client_of(server, **settings), server


def scripted_server(replies: Sequence[str | ScriptedReply]) -> ScriptedServer:
    """Return a server that gives the replies in order."""
    plain = plain_tokenizer()

    def script(call: ScriptedCall) -> ScriptedReply | str:
        return replies[call.index]

    return ScriptedServer(
        script,
        vocab_size=plain.renderer.vocab_size,
        encode=plain.encode_output,
        eos_id=min(plain.renderer.eos_ids),
    )


def client_of(inference: Backend, **settings: Any) -> Client:  # noqa: ANN401
    """Return the client of an episode on any backend."""
    options = EpisodeSettings(**dict[str, Any](episode_id="e", task_id="t") | settings)
    return Client(PolicyBackend(inference, plain_tokenizer().renderer, UNLIMITED, options))


async def until(condition: Callable[[], object]) -> None:
    """Wait until what another task does without an event has happened, at most five minutes."""
    with anyio.fail_after(300):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await anyio.sleep(0.001)


def door_client(door: Door) -> AsyncOpenAI:
    """Return an unmodified openai client that is given the door as programs are: by the environment's values."""
    given = door.environment()
    return AsyncOpenAI(base_url=given["OPENAI_BASE_URL"], api_key=given["OPENAI_API_KEY"], max_retries=0)


def played(completion: Any) -> str | None:  # noqa: ANN401
    """Return the text of a completion."""
    return completion.choices[0].message.content
