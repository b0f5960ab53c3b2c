"""The client on the scripted server that users test their workflows with: faults end in named errors, never in a turn."""

from __future__ import annotations

import anyio
import pytest
from tokenizers import Tokenizer

from agentrl.client import Client, EpisodeSettings, PolicyBackend, SamplingConfig
from agentrl.errors import ServerError
from agentrl.servers.scripted.script import Fault, ScriptedReply
from agentrl.servers.scripted.server import ScriptedServer
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.verify import verify
from agentrl.types import StopReason
from tests.support.chat import CALL, HI, calc


def make(renderer: Renderer, tokenizer: Tokenizer, replies: list[ScriptedReply | str]) -> Client:
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    server = ScriptedServer(
        lambda call: replies[min(call.index, len(replies) - 1)],
        vocab_size=renderer.vocab_size,
        eos_id=end,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
    )
    return Client(PolicyBackend(server, renderer, SamplingConfig(), EpisodeSettings(episode_id="e", task_id="t")))


async def test_a_tool_episode_runs_on_the_scripted_server(renderer: Renderer, tokenizer: Tokenizer):
    client = make(renderer, tokenizer, [CALL, "42"])
    first = await client.chat.completions.create(messages=HI, tools=[calc.schema])
    message = first.choices[0].message
    assert message.tool_calls
    history = [*HI, message, await calc.reply(message.tool_calls[0])]
    stream = await client.chat.completions.create(messages=history, tools=[calc.schema], stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    assert text == "42"
    assert len(trajectory.branches()) == 1
    verify(trajectory)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault", [fault for fault in Fault if fault not in (Fault.HANG, Fault.SLOW_DRIP, Fault.WRONG_WEIGHTS, Fault.ABORT)]
)
async def test_every_fault_is_a_server_error_and_no_turn(
    renderer: Renderer, tokenizer: Tokenizer, fault: Fault, stream: bool
):
    client = make(renderer, tokenizer, [ScriptedReply(output="fine", fault=fault), "fine"])

    async def call() -> None:
        if stream:
            async for _ in await client.chat.completions.create(messages=HI, stream=True):
                pass
        else:
            await client.chat.completions.create(messages=HI)

    with pytest.raises(ServerError):
        await call()
    assert len(client.graph.turns) == 0
    await call()
    assert len(client.graph.turns) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hanging_server_ends_with_the_calls_timeout(renderer: Renderer, tokenizer: Tokenizer, stream: bool):
    client = make(renderer, tokenizer, [ScriptedReply(fault=Fault.HANG)])

    async def call() -> None:
        if stream:
            async for _ in await client.chat.completions.create(messages=HI, stream=True, timeout=0.05):
                pass
        else:
            await client.chat.completions.create(messages=HI, timeout=0.05)

    with anyio.fail_after(300), pytest.raises(TimeoutError, match=r"timeout of 0\.05"):
        await call()
    assert len(client.graph.turns) == 0
