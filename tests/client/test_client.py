"""The client of one episode: real openai objects out, exact turns recorded, budgets and rewards held."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from tokenizers import Tokenizer

from agentrl.client import CallTimeout, Client, EpisodeSettings, PolicyBackend, SamplingConfig
from agentrl.errors import EpisodeLimit, ReplyError, RewardError, ServerUnavailable, TokenError, WorkflowError
from agentrl.inference.backend import GenerateRequest, Generation
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.verify import verify
from agentrl.types import EpisodeFailure, StopReason, Trajectory, Turn, VersionSpan
from tests.client.conftest import Says
from tests.support.chat import CALL, HI, Make, calc


async def test_a_completion_is_a_real_one(client: Client, says: Says):
    says.script = ["Forty two"]
    completion = await client.chat.completions.create(model="any", messages=HI)
    assert isinstance(completion, ChatCompletion)
    assert ChatCompletion.model_validate(completion.model_dump()) == completion
    assert json.loads(completion.model_dump_json())["choices"][0]["message"]["content"] == "Forty two"
    [choice] = completion.choices
    assert (choice.finish_reason, choice.index, completion.model, completion.object) == ("stop", 0, "any", "chat.completion")
    assert choice.message.content == "Forty two"
    assert choice.message.tool_calls is None
    assert choice.model_extra == {"token_ids": says.ids("Forty two<|im_end|>")}
    assert completion.usage is not None
    [request] = says.requests
    assert completion.usage.prompt_tokens == len(request.input_ids)
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + len(says.ids("Forty two<|im_end|>"))
    assert client.graph.turns[0].output_ids.tolist() == says.ids("Forty two<|im_end|>")


async def test_the_server_gets_the_rendered_template_as_ids(client: Client, says: Says):
    await client.chat.completions.create(messages=[{"role": "system", "content": "Be brief."}, *HI])
    [request] = says.requests
    assert says.text(request) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert b"".join(request.context.json) == ",".join(map(str, request.input_ids.tolist())).encode()
    assert len(request.request_id) == 32
    assert request.episode_id == "e1"
    assert type(request) is GenerateRequest


async def test_a_tool_episode_is_one_branch_without_forks(client: Client, says: Says):
    says.script = ["<think>\nadd\n</think>\n\n" + CALL, "It is 42"]
    messages: list[Any] = [{"role": "user", "content": "40+2?"}]
    first = await client.chat.completions.create(messages=messages, tools=[calc.schema])
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    assert message.content is None
    assert message.model_extra == {"reasoning_content": "add"}
    assert message.tool_calls is not None
    messages.append(message)
    messages += [await calc.reply(call) for call in message.tool_calls]
    client.reward(first, -0.02)
    second = await client.chat.completions.create(messages=messages, tools=[calc.schema])
    client.record(busy=1)
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    assert second.choices[0].message.content == "It is 42"
    [sample] = trajectory.branches()
    assert sample.loss_mask.sum() == sum(len(turn.output_ids) for turn in trajectory.turns)
    assert [turn.reward for turn in trajectory.turns] == [-0.02, None]
    assert [turn.fork for turn in trajectory.turns] == [None, None]
    assert (trajectory.final_reward, trajectory.metrics, trajectory.stop_reason) == (
        1.0,
        {"busy": 1.0},
        StopReason.COMPLETED,
    )
    assert says.requests[1].input_ids.tolist()[: len(says.requests[0].input_ids)] == says.requests[0].input_ids.tolist()
    verify(trajectory)


def _compact(message: ChatCompletionMessage) -> dict[str, Any]:
    """History as pydantic-ai sends it back: arguments serialised again, no extra fields."""
    fields = message.model_dump(include={"role", "content", "tool_calls"})
    for call in fields["tool_calls"] or []:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
    return fields


def _dumped(message: ChatCompletionMessage) -> dict[str, Any]:
    return message.model_dump()


def _sparse(message: ChatCompletionMessage) -> dict[str, Any]:
    return message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})


def _objects(message: ChatCompletionMessage) -> dict[str, Any]:
    return {"role": "assistant", "content": message.content or "", "tool_calls": message.tool_calls}


@pytest.mark.parametrize("rewrite", [_compact, _dumped, _sparse, _objects])
async def test_history_rewritten_by_an_agent_framework_does_not_fork(
    client: Client, says: Says, rewrite: Callable[[ChatCompletionMessage], dict[str, Any]]
):
    says.script = ["Let me see." + CALL, "42"]
    first = await client.chat.completions.create(messages=HI, tools=[calc.schema])
    message = first.choices[0].message
    assert message.tool_calls
    history = [*HI, rewrite(message), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}]
    await client.chat.completions.create(messages=history, tools=[calc.schema])
    assert [turn.parent for turn in client.graph.turns] == [None, 0]
    assert client.graph.turns[1].fork is None
    assert not any(client.graph.forks.values())


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_no_message_is_refused_with_its_index(client: Client, stream: bool):
    odd: Any = "hi"
    with pytest.raises(WorkflowError, match=r"messages\[0\] must be a dict or an openai message, got str 'hi'"):
        await client.chat.completions.create(messages=[odd], stream=stream)
    completion = await client.chat.completions.create(messages=HI)
    for more in ([odd], [HI[0], odd]):
        messages: Any = [*HI, completion.choices[0].message, *more]
        with pytest.raises(WorkflowError, match=rf"messages\[{len(messages) - 1}\] must be"):
            await client.chat.completions.create(messages=messages, stream=stream)
    assert len(client.graph.turns) == 1


async def test_edited_history_is_an_explicit_fork(client: Client, says: Says):
    first = await client.chat.completions.create(messages=HI)
    edited = {"role": "assistant", "content": str(first.choices[0].message.content) + "!"}
    await client.chat.completions.create(messages=[*HI, edited, *HI])
    assert client.graph.turns[1].fork is not None


async def test_sampling_arguments_reach_the_server_and_the_turn(client: Client, says: Says):
    await client.chat.completions.create(
        messages=HI, temperature=0.5, top_p=0.8, max_tokens=9, stop=["x"], seed=5, extra_body={"top_k": 3}
    )
    s = says.requests[0].sampling
    assert (s.temperature, s.top_p, s.max_new_tokens, s.stop, s.seed, s.top_k) == (0.5, 0.8, 9, ("x",), 5, 3)
    assert client.graph.turns[0].temperature == 0.5


async def test_logprobs_and_ids_are_returned_when_asked_for(client: Client, says: Says):
    says.script = ["Hi"]
    completion = await client.chat.completions.create(messages=HI, logprobs=True, extra_body={"return_token_ids": True})
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == "Hi<|im_end|>"
    assert [entry.logprob for entry in logprobs.content] == client.graph.turns[0].output_logprobs.tolist()
    assert (completion.model_extra or {})["prompt_token_ids"] == says.requests[0].input_ids.tolist()
    assert ChatCompletion.model_validate(completion.model_dump()) == completion


async def test_a_truncated_answer_says_length(client: Client, says: Says):
    says.script = [says.generation("Hello", StopReason.LENGTH)]
    completion = await client.chat.completions.create(messages=HI, max_tokens=50)
    assert completion.choices[0].finish_reason == "length"
    assert client.graph.turns[0].stop_reason is StopReason.LENGTH


async def test_tools_are_not_rendered_with_tool_choice_none(client: Client, says: Says):
    await client.chat.completions.create(messages=HI, tools=[calc.schema], tool_choice="none")
    await client.chat.completions.create(messages=HI, tools=[calc.schema])
    assert "calc" not in says.text(says.requests[0])
    assert "calc" in says.text(says.requests[1])


@pytest.mark.parametrize("what", ["embeddings", "models", "responses", "images", "legacy", "streaming"])
async def test_what_is_not_served_says_what_is(client: Client, what: str):
    calls: dict[str, Callable[[], Any]] = {
        "embeddings": lambda: client.embeddings.create(input="x", model="m"),
        "models": lambda: client.models.list(),
        "responses": lambda: client.responses.create(input="x", model="m"),
        "images": lambda: client.images.generate(prompt="x"),
        "legacy": lambda: client.completions.create(prompt="x", model="m"),
        "streaming": lambda: client.chat.completions.with_streaming_response.create(
            messages=[{"role": "user", "content": "hi"}], model="m"
        ).__aenter__(),
    }
    with pytest.raises(WorkflowError, match=r"serve[sd]"):
        await calls[what]()
    assert len(client.graph.turns) == 0


async def test_code_that_goes_around_the_client_opens_no_connection(client: Client):
    with pytest.raises(WorkflowError, match="not served"):
        await client._client.get("http://127.0.0.1:1/")  # pyright: ignore[reportPrivateUsage]


async def test_it_is_an_async_openai_for_code_that_checks(client: Client):
    assert isinstance(client, AsyncOpenAI)
    assert str(client.base_url) == "http://agentrl.invalid/v1/"
    assert client.api_key
    assert client.max_retries == 0
    assert client.organization is None
    assert client.timeout is None
    assert not client.is_closed()


async def test_raw_responses_have_headers_and_parse(client: Client, says: Says):
    raw = await client.chat.completions.with_raw_response.create(messages=HI, model="m")  # pyright: ignore
    assert raw.parse().choices[0].message.content == "Hello there"
    assert dict(raw.headers)["x-request-id"] == raw.parse().id
    again = await client.with_raw_response.chat.completions.create(messages=HI, model="m")  # pyright: ignore
    assert isinstance(again.parse(), ChatCompletion)
    streamed = await client.chat.completions.with_raw_response.create(messages=HI, model="m", stream=True)  # pyright: ignore
    assert [chunk.id async for chunk in streamed.parse()]


async def test_options_give_a_client_of_the_same_episode(client: Client, says: Says):
    other = client.with_options(timeout=3.0, max_retries=5)
    completion = await other.chat.completions.create(messages=HI)
    client.reward(completion, 1)
    assert other.graph is client.graph
    assert other.timeout == 3.0
    assert client.timeout is None
    assert isinstance(client.copy(), Client)


async def test_leaving_or_closing_it_as_an_openai_client_keeps_the_episode_open(client: Client):
    async with client as same:
        await same.chat.completions.create(messages=HI)
    await client.close()
    await client.chat.completions.create(messages=HI)
    assert len(client.close(StopReason.COMPLETED).turns) == 2


async def test_after_close_every_call_is_an_error(client: Client):
    completion = await client.chat.completions.create(messages=HI)
    client.close(StopReason.COMPLETED, 1.0)
    for call in (
        lambda: client.chat.completions.create(messages=HI),
        lambda: client.chat.completions.create(messages=HI, stream=True),
        lambda: client.generate([1, 2]),
    ):
        with pytest.raises(WorkflowError, match="closed"):
            await call()
    for sync in (
        lambda: client.reward(completion, 1),
        lambda: client.record(a=1),
        lambda: client.close(StopReason.COMPLETED),
    ):
        with pytest.raises(WorkflowError, match="closed"):
            sync()


async def test_a_call_that_ends_after_close_records_nothing(client: Client, says: Says):
    says.hold = anyio.Event()
    errors: list[Exception] = []

    async def late() -> None:
        try:
            await client.chat.completions.create(messages=HI)
        except WorkflowError as error:
            errors.append(error)

    closed: list[Trajectory] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(late)
        await says.entered.wait()
        closed.append(client.close(StopReason.COMPLETED, 0.0))
        says.hold.set()
    assert closed[0].turns == ()
    assert len(client.graph.turns) == 0
    assert "closed" in str(errors[0])


def test_a_failed_episode_keeps_its_failure(client: Client):
    failure = EpisodeFailure(kind="OSError", message="disk", traceback="")
    trajectory = client.close(StopReason.ENVIRONMENT_FAULT, failure=failure)
    assert (trajectory.failure, trajectory.final_reward) == (failure, None)


@pytest.mark.parametrize("value", [math.nan, math.inf, "1.0", None, [1.0], 1j])
async def test_a_reward_that_is_no_finite_number_is_refused(client: Client, value: Any):  # noqa: ANN401
    completion = await client.chat.completions.create(messages=HI)
    with pytest.raises(RewardError, match="finite number"):
        client.reward(completion, value)
    if value is not None:
        with pytest.raises(RewardError, match="finite number"):
            client.close(StopReason.COMPLETED, value)
    assert client.close(StopReason.COMPLETED, 0.0).turns[0].reward is None


async def test_a_turn_is_rewarded_once(client: Client):
    completion = await client.chat.completions.create(messages=HI)
    client.reward(completion.id, True)
    with pytest.raises(RewardError, match="already has the reward 1"):
        client.reward(completion, 0.5)
    assert client.close(StopReason.COMPLETED).turns[0].reward == 1.0


async def test_a_completion_of_another_episode_cannot_be_rewarded(make_client: Make, client: Client):
    foreign = await make_client(episode_id="e2").chat.completions.create(messages=HI)
    with pytest.raises(WorkflowError, match="no completed model call of this episode"):
        client.reward(foreign, 1.0)
    with pytest.raises(WorkflowError, match="takes a completion"):
        client.reward(0, 1.0)


@pytest.mark.parametrize("value", ["x", None, math.nan, math.inf, pytest.param(10**400, id="huge"), np.float16("inf")])
def test_a_metric_must_be_a_finite_number(client: Client, value: Any):  # noqa: ANN401
    with pytest.raises(WorkflowError, match="busy must be a finite number"):
        client.record(ok=1, busy=value)
    client.record(busy=np.float32(2))  # pyright: ignore
    assert client.close(StopReason.COMPLETED).metrics == {"busy": 2.0}


async def test_the_turn_budget_is_checked_before_the_call(make_client: Make, says: Says):
    client = make_client(max_turns=2)
    for _ in range(2):
        await client.chat.completions.create(messages=HI)
    with pytest.raises(EpisodeLimit, match="2 of 2 turns are spent"):
        await client.chat.completions.create(messages=HI)
    assert len(says.requests) == 2
    assert client.limit_reached is StopReason.TURN_LIMIT


async def test_running_calls_count_against_the_turn_budget(make_client: Make, says: Says):
    client = make_client(max_turns=1)
    says.hold = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: client.chat.completions.create(messages=HI))
        await says.entered.wait()
        with pytest.raises(EpisodeLimit, match="1 of them running"):
            await client.chat.completions.create(messages=HI)
        says.hold.set()
    assert len(client.graph.turns) == 1


async def test_the_token_budget_clips_and_then_refuses(make_client: Make, says: Says):
    client = make_client(max_episode_tokens=10)
    says.script = [lambda r: _of_length(says, min(6, r.sampling.max_new_tokens))]
    await client.chat.completions.create(messages=HI)
    await client.chat.completions.create(messages=HI)
    assert [r.sampling.max_new_tokens for r in says.requests] == [10, 4]
    with pytest.raises(EpisodeLimit, match="10 of 10 sampled tokens are spent"):
        await client.chat.completions.create(messages=HI)
    assert client.limit_reached is StopReason.TOKEN_LIMIT
    assert client.close(StopReason.TOKEN_LIMIT).num_output_tokens == 10


async def test_max_tokens_is_clipped_to_the_context_and_a_full_context_is_refused(make_client: Make, says: Says):
    client = make_client()
    await client.chat.completions.create(messages=HI)
    length = len(says.requests[0].input_ids)
    roomy, full = make_client(max_context_tokens=length + 3), make_client(max_context_tokens=length)
    says.script = [says.generation("a", StopReason.LENGTH)]
    await roomy.chat.completions.create(messages=HI, max_tokens=50)
    assert says.requests[-1].sampling.max_new_tokens == 3
    with pytest.raises(EpisodeLimit, match=f"context of {length} tokens leaves no room for output: the limit is {length}"):
        await full.chat.completions.create(messages=HI)
    assert len(says.requests) == 2
    assert full.limit_reached is StopReason.CONTEXT_LIMIT


async def test_the_models_own_context_limit_holds(make_client: Make, says: Says, renderer: Renderer):
    assert renderer.max_context == 4096
    with pytest.raises(EpisodeLimit, match="the limit is 4096"):
        await make_client().chat.completions.create(messages=[{"role": "user", "content": "a b " * 3000}])


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a b " * 2_500_000}],
        [{"role": "user", "content": "é" * 10_000_000}],
        [{"role": "user", "content": "x"}] * 100_000,
    ],
    ids=["long", "long and not ascii", "many"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_messages_that_no_context_can_hold_are_refused_before_they_are_encoded(
    make_client: Make, says: Says, messages: list[Any], stream: bool
):
    client = make_client()

    async def ask() -> None:
        answer: Any = await client.chat.completions.create(messages=messages, stream=stream)
        await anext(answer)

    with pytest.raises(EpisodeLimit, match=r"4096 tokens.* not encoded"):
        await ask()
    assert client.limit_reached is StopReason.CONTEXT_LIMIT
    assert not says.requests


async def test_a_long_message_after_an_answer_is_refused_before_it_is_encoded(make_client: Make, says: Says):
    client = make_client()
    await client.chat.completions.create(messages=HI)
    answer = {"role": "assistant", "content": "Hello there"}
    with pytest.raises(EpisodeLimit, match="were not encoded"):
        await client.chat.completions.create(messages=[*HI, answer, {"role": "user", "content": "a b " * 1_000_000}])


@pytest.mark.parametrize("kind", ["empty", "mismatch", "vocabulary", "nan", "too long"])
async def test_an_impossible_reply_is_a_named_error_and_records_nothing(client: Client, says: Says, kind: str):
    good = says.whole("ok")
    bad = {
        "empty": says.generation(""),
        "mismatch": _with(good, output_logprobs=good.output_logprobs[1:]),
        "vocabulary": _with(good, output_ids=good.output_ids + 400),
        "nan": _with(good, output_logprobs=good.output_logprobs * np.float32(np.nan)),
        "too long": says.whole("much too long for two tokens"),
    }[kind]
    says.script = [bad]
    for call in (client.chat.completions.create(messages=HI, max_tokens=4), client.generate([1, 2], max_tokens=4)):
        with pytest.raises(ReplyError, match="e1"):
            await call
    assert len(client.graph.turns) == 0


async def test_an_aborted_call_is_no_answer_but_a_token_level_workflow_sees_it(client: Client, says: Says):
    says.script = [says.generation("half an ans", StopReason.ABORT)]
    with pytest.raises(ServerUnavailable, match="aborted the call after"):
        await client.chat.completions.create(messages=HI)
    assert len(client.graph.turns) == 0
    generation = await client.generate([1, 2, 3])
    assert generation.stop_reason is StopReason.ABORT
    assert len(client.graph.turns) == 1


async def test_ids_outside_the_vocabulary_are_never_sent(client: Client, says: Says, renderer: Renderer):
    for ids in ([renderer.vocab_size], [-1, 3], [2**40]):
        with pytest.raises(WorkflowError, match="outside the vocabulary"):
            await client.generate(ids)
    with pytest.raises(WorkflowError, match="at least one context token"):
        await client.generate([])
    for wrong in ([1.5], [[1, 2]], ["a"]):
        with pytest.raises(WorkflowError, match="takes a list of token ids"):
            await client.generate(wrong)  # pyright: ignore
    assert says.requests == []


async def test_token_level_calls_continue_the_turn_they_extend(client: Client, says: Says):
    says.script = ["a", "b", "c"]
    first = await client.generate([5, 6, 7], temperature=0.5, max_tokens=20)
    second = await client.generate([5, 6, 7, *first.output_ids.tolist(), 8])
    third = await client.generate(np.array([5, 6, 9], np.int32))
    assert [turn.parent for turn in client.graph.turns] == [None, 0, None]
    assert client.graph.turns[1].context_ids.tolist() == [8]
    assert client.graph.turns[0].temperature == 0.5
    client.reward(second, 2.0)
    client.reward(third, 1.0)
    with pytest.raises(WorkflowError, match="not of this episode"):
        client.reward(says.whole("z"), 1.0)
    trajectory = client.close(StopReason.COMPLETED)
    assert [turn.reward for turn in trajectory.turns] == [None, 2.0, 1.0]
    assert sorted(len(sample.token_ids) for sample in trajectory.branches()) == [5, 8]
    verify(trajectory)


async def test_parallel_calls_and_sub_conversations_are_all_turns(make_client: Make, says: Says):
    seen: list[Turn] = []
    client = make_client(on_turn=seen.append)
    first = await client.chat.completions.create(messages=HI)
    history = [*HI, first.choices[0].message]

    async def ask(text: str) -> None:
        completion = await client.chat.completions.create(messages=[*history, {"role": "user", "content": text}])
        client.reward(completion, float(text))

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(ask, str(number))
        tasks.start_soon(lambda: client.chat.completions.create(messages=[{"role": "system", "content": "other"}, *HI]))
    trajectory = client.close(StopReason.COMPLETED)
    assert len(trajectory.turns) == 7 == len(seen)
    assert sorted(turn.reward for turn in trajectory.turns if turn.reward is not None) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [turn.parent for turn in trajectory.turns].count(0) == 5
    assert sum(sample.loss_mask.sum() for sample in trajectory.branches()) == trajectory.num_output_tokens
    verify(trajectory)


@pytest.mark.parametrize("how", ["create", "stream", "generate"])
async def test_a_cancelled_call_records_nothing_and_can_be_repeated(make_client: Make, says: Says, how: str):
    client = make_client(max_turns=1)
    says.hold = anyio.Event()

    async def call() -> None:
        match how:
            case "create":
                await client.chat.completions.create(messages=HI)
            case "generate":
                await client.generate([1, 2])
            case _:
                async with await client.chat.completions.create(messages=HI, stream=True) as stream:
                    async for _ in stream:
                        pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await says.entered.wait()
        tasks.cancel_scope.cancel()
    assert len(client.graph.turns) == 0
    assert says.aborted
    says.hold = None
    await call()
    assert len(client.graph.turns) == 1


async def test_a_timeout_is_both_openais_error_and_ours(client: Client, says: Says):
    says.hold = anyio.Event()
    for call in (
        client.chat.completions.create(messages=HI, timeout=0.01),
        client.with_options(timeout=0.01).chat.completions.create(messages=HI),
        client.generate([1], timeout=0.01),
    ):
        with pytest.raises(CallTimeout, match=r"within the call's timeout of 0\.01 s") as caught:
            await call
        assert isinstance(caught.value, openai.APITimeoutError)
        assert isinstance(caught.value, TimeoutError)
        assert "0.01" in caught.value.message
        assert caught.value.request.method == "POST"
    assert len(client.graph.turns) == 0


async def test_a_backends_error_passes_unchanged_and_frees_the_place(make_client: Make, says: Says):
    def refuse(request: GenerateRequest) -> Generation:
        raise ServerUnavailable("gone")

    client = make_client(max_turns=1)
    says.script = [refuse, "ok"]
    with pytest.raises(ServerUnavailable, match="gone"):
        await client.chat.completions.create(messages=HI)
    assert (await client.chat.completions.create(messages=HI)).choices[0].message.content == "ok"


async def test_messages_that_cannot_be_rendered_are_named_errors(client: Client, says: Says):
    for bad in ([{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "wizard", "content": "x"}]):
        with pytest.raises(TokenError):
            await client.chat.completions.create(messages=bad)
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        await client.chat.completions.create(messages=HI, temprature=1)  # pyright: ignore
    assert says.requests == []


MARKUP = ["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</tool_response>"]
HOSTILE = st.lists(st.sampled_from([*MARKUP, "\n", "x", "é", "\x00"]), min_size=1, max_size=6).map("".join)


@settings(max_examples=40, deadline=None)
@given(system=HOSTILE, user=HOSTILE, result=HOSTILE, query=HOSTILE)
def test_hostile_content_never_becomes_a_control_token(
    renderer: Renderer, tokenizer: Tokenizer, system: str, user: str, result: str, query: str
):
    async def episode(texts: tuple[str, ...]) -> list[int]:
        says = Says(tokenizer)
        says.script = ["fine<tool_call>\n" + json.dumps({"name": "calc", "arguments": {"a": 1}}) + "\n</tool_call>", "end"]
        client = Client(PolicyBackend(says, renderer, SamplingConfig(), EpisodeSettings(episode_id="e", task_id="t")))
        schema = {
            "type": "function",
            "function": {"name": "calc", "description": texts[3], "parameters": {"type": "object"}},
        }
        messages: list[Any] = [{"role": "system", "content": texts[0]}, {"role": "user", "content": texts[1]}]
        completion = await client.chat.completions.create(messages=messages, tools=[schema])
        message = completion.choices[0].message
        assert message.tool_calls
        messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": texts[2]}]
        await client.chat.completions.create(messages=messages, tools=[schema])
        verify(client.close(StopReason.COMPLETED))
        markers = {says.ids(text)[0] for text in MARKUP}
        return [token for token in says.requests[1].input_ids.tolist() if token in markers]

    assert anyio.run(episode, (system, user, result, query)) == anyio.run(episode, ("s", "u", "r", "q"))


def test_the_clients_of_all_episodes_share_one_http_client(make_client: Make):
    clients = [make_client() for _ in range(3)]
    assert len({id(client._client) for client in clients}) == 1  # pyright: ignore[reportPrivateUsage]


def _of_length(says: Says, length: int) -> Generation:
    ids = np.array((says.ids("word " * 20))[:length], np.int32)
    return Generation(
        output_ids=ids,
        output_logprobs=np.full(length, -0.5, np.float32),
        spans=(VersionSpan(start=0, end=length, version=0),),
        stop_reason=StopReason.LENGTH,
    )


def _with(generation: Generation, **fields: Any) -> Generation:  # noqa: ANN401
    from dataclasses import replace

    return replace(generation, **fields)
