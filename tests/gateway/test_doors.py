"""An episode behind a door: unmodified openai clients play it over HTTP, and its record is that of an in-process client."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import anyio
import openai
import pytest

from agentrl.client import Door
from agentrl.client.backend import Answer, AskedCall
from agentrl.servers.scripted.script import Hold, ScriptedReply
from agentrl.tokens.verify import verify
from agentrl.types import Speaker, StopReason
from agentrl_doors.gateway.fields import MAX_IGNORED
from agentrl_doors.gateway.sessions.calls import RecentCalls, SharedCall
from agentrl_doors.gateway.sessions.session import IGNORED_METRIC
from tests.support.doors import CALC, CALLING, HI, client_of, door_client, played, scripted_client, scripted_server, until
from tests.support.scripted import pool_of, publication

DEADLINE_S = 300


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def tool_conversation(client: Any) -> str:  # noqa: ANN401
    """Play two turns: a call of a tool, and the text after its result."""
    first = await client.chat.completions.create(model="any", messages=HI, tools=[CALC])
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
    history = [*HI, message.model_dump(exclude_none=True), result]
    stream = await client.chat.completions.create(model="any", messages=history, tools=[CALC], stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_an_openai_client_behind_a_door_records_what_the_client_in_process_records():
    replies = [CALLING, "It is 5."]
    inside, _ = scripted_client(replies)
    expected_text = await tool_conversation(inside)
    outside, _ = scripted_client(replies)
    async with outside.served() as door, door_client(door) as remote:
        text = await tool_conversation(remote)
    expected, found = (each.close(StopReason.COMPLETED, 1.0) for each in (inside, outside))
    assert text == expected_text == "It is 5."
    assert len(found.branches()) == 1
    verify(found)
    for before, after in zip(expected.turns, found.turns, strict=True):
        assert (before.context_ids == after.context_ids).all()
        assert (before.output_ids == after.output_ids).all()
        assert before.message == after.message


async def test_the_secret_is_taken_in_the_path_and_as_the_key_of_either_kind_of_client():
    client, _ = scripted_client(["a", "b", "c", "d"])
    body = {"messages": HI}
    async with client.served() as door, aiohttp.ClientSession() as http:
        for url, headers in (
            (f"{door.url}/v1/chat/completions", {"Authorization": "Bearer something else"}),
            (f"{door.url}/chat/completions", {}),
            (f"{door.server_url}/v1/chat/completions", {"Authorization": f"Bearer {door.key}"}),
            (f"{door.server_url}/chat/completions", {"x-api-key": door.key}),
        ):
            body = {"messages": [{"role": "user", "content": url}]}
            async with http.post(url, json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
    assert len(client.turns) == 4


async def test_a_wrong_an_ended_and_a_missing_secret_open_nothing():
    client, policy = scripted_client(["a"])
    other, _ = scripted_client(["b"])
    async with other.served() as still_open, aiohttp.ClientSession() as http:
        async with client.served() as door:
            pass
        for key, reason in ((door.key, "has ended"), ("x" * 43, "no episode"), ("", "no episode"), ("ü", "no episode")):
            url = f"{still_open.server_url}/v1/chat/completions"
            headers = {"Authorization": f"Bearer {key}".encode().decode("latin-1")}
            async with http.post(url, json={"messages": HI}, headers=headers) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (401, "invalid_api_key")
                assert reason in error["message"]
                assert key not in error["message"] or not key
    assert not policy.calls
    assert not other.turns


async def test_doors_of_a_process_share_one_server_that_ends_with_the_last():
    clients = [scripted_client([f"I am {index}"])[0] for index in range(3)]
    async with clients[0].served() as first:
        async with clients[1].served() as second, clients[2].served() as third:
            assert first.server_url == second.server_url == third.server_url
            assert len({first.key, second.key, third.key}) == 3
            async with door_client(second) as remote:
                await remote.chat.completions.create(model="policy", messages=HI)
        async with door_client(first) as remote:
            await remote.chat.completions.create(model="policy", messages=HI)
    assert [len(client.turns) for client in clients] == [1, 1, 0]
    with pytest.raises(aiohttp.ClientConnectionError):
        async with aiohttp.ClientSession() as http, http.get(first.url):
            pass


async def test_a_page_of_another_site_and_another_host_are_turned_away():
    client, policy = scripted_client(["a"])
    async with client.served() as door, aiohttp.ClientSession() as http:
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            async with http.post(f"{door.base_url}/chat/completions", json={"messages": HI}, headers=headers) as response:
                assert response.status == 403
                assert "message" in (await response.json())["error"]
    assert not policy.calls


async def test_a_client_that_disconnects_aborts_its_call_and_what_it_had_sampled_is_a_turn():
    hold = Hold(at=2)
    client, policy = scripted_client([ScriptedReply(output="never heard", holds=(hold,)), "heard"])
    async with client.served() as door, door_client(door) as remote:
        with anyio.fail_after(DEADLINE_S):
            stream = await remote.chat.completions.create(model="policy", messages=HI, stream=True)
            await hold.reached.wait()
            await stream.close()
            await until(lambda: policy.aborted)
        completion = await remote.chat.completions.create(model="policy", messages=HI)
    assert completion.choices[0].message.content == "heard"
    assert [turn.stop_reason for turn in client.episode.turns] == [StopReason.ABORT, StopReason.STOP]
    assert client.turns[0].message["content"] == "ne"


async def test_a_marked_retry_joins_its_open_call_and_a_later_request_is_a_new_sample():
    hold = Hold()
    client, policy = scripted_client([ScriptedReply(output="one", holds=(hold,)), "two"])
    texts: list[str | None] = []
    async with client.served() as door, door_client(door) as remote:

        async def ask(stream: bool, count: str = "0") -> None:
            headers = {"x-stainless-retry-count": count}
            arguments: Any = {"model": "policy", "messages": HI, "stream": stream, "extra_headers": headers}
            found = await remote.chat.completions.create(**arguments)
            texts.append("".join([c.choices[0].delta.content or "" async for c in found]) if stream else played(found))

        with anyio.fail_after(DEADLINE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, True)
                await hold.reached.wait()
                tasks.start_soon(ask, False, "1")
                tasks.start_soon(ask, True, "2")
                await until(lambda: client.episode.metrics.get("gateway.joined_retries") == 2)
                hold.release.set()
            await ask(False)
    assert texts == ["one", "one", "one", "two"]
    assert len(client.turns) == len(policy.calls) == 2


@pytest.mark.parametrize(
    "headers", [{"x-stainless-retry-count": "0"}, {"X-Stainless-Retry-Count": "00"}, {}, {"x-stainless-retry-count": "?"}]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_equal_calls_in_parallel_that_no_client_marks_as_made_again_are_samples_of_their_own(
    headers: dict[str, str], stream: bool
):
    hold = Hold()
    client, policy = scripted_client([ScriptedReply(output=each, holds=(hold,)) for each in "abcd"])
    texts: list[str] = []
    async with client.served() as door, aiohttp.ClientSession() as http:

        async def ask() -> None:
            body = {"messages": HI, "stream": stream}
            async with http.post(f"{door.base_url}/chat/completions", json=body, headers=headers) as response:
                texts.append(await response.text())

        with anyio.fail_after(DEADLINE_S):
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(ask)
                await until(lambda: len(policy.calls) == 4 or "gateway.joined_retries" in client.episode.metrics)
                hold.release.set()
    assert len(client.turns) == 4
    assert sorted(turn.message["content"] for turn in client.episode.turns) == ["a", "b", "c", "d"]
    assert len(set(texts)) == 4
    verify(client.close(StopReason.COMPLETED, 1.0))


async def test_an_answer_that_did_not_arrive_is_sent_again_and_a_marked_retry_gets_its_answer_again():
    client, policy = scripted_client(["one", "two"])
    async with client.served() as door, aiohttp.ClientSession() as http:
        for count, expected in (("0", "one"), ("1", "one"), ("0", "two"), ("1", "two")):
            headers = {"x-stainless-retry-count": count}
            async with http.post(f"{door.base_url}/chat/completions", json={"messages": HI}, headers=headers) as response:
                assert (await response.json())["choices"][0]["message"]["content"] == expected
    assert len(client.turns) == len(policy.calls) == 2


async def test_a_spent_budget_is_answered_as_a_full_context_and_the_episode_knows_its_limit():
    client, _ = scripted_client(["one", "two"], max_turns=1)
    async with client.served() as door, door_client(door) as remote:
        await remote.chat.completions.create(model="policy", messages=HI)
        for stream in (False, True):
            arguments: Any = {"model": "policy", "messages": [*HI, *HI], "stream": stream}
            with pytest.raises(openai.BadRequestError) as caught:
                await remote.chat.completions.create(**arguments)
            assert caught.value.code == "context_length_exceeded"
    assert client.limit_reached is StopReason.TURN_LIMIT


async def test_a_call_that_still_runs_ends_with_the_door():
    hold = Hold()
    client, policy = scripted_client([ScriptedReply(output="never", holds=(hold,))])
    statuses: list[int] = []

    async def ask(door: Door) -> None:
        url = f"{door.base_url}/chat/completions"
        async with aiohttp.ClientSession() as http, http.post(url, json={"messages": HI}) as response:
            statuses.append(response.status)

    other, _ = scripted_client(["x"])
    with anyio.fail_after(DEADLINE_S):
        async with other.served(), anyio.create_task_group() as tasks, client.served() as door:
            tasks.start_soon(ask, door)
            await hold.reached.wait()
    assert statuses == [410]
    assert policy.aborted
    assert not client.turns


async def test_headers_and_paths_name_the_role_and_the_player_of_a_turn():
    client, _ = scripted_client(["a", "b", "c"])
    async with client.as_player("white").served() as door, aiohttp.ClientSession() as http:
        for path, headers in (
            ("v1", {}),
            ("role/critic/player/black/v1", {}),
            ("v1", {"x-agentrl-role": "planner", "x-agentrl-player": "red"}),
        ):
            body = {"messages": [{"role": "user", "content": path + str(headers)}]}
            async with http.post(f"{door.url}/{path}/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200
    found = [(turn.role, turn.player) for turn in client.episode.turns]
    assert found == [("", "white"), ("critic", "black"), ("planner", "red")]


async def test_rewards_over_http_are_checked_as_in_process():
    client, _ = scripted_client(["a"])
    other, _ = scripted_client(["b"])
    async with client.served() as door, other.served() as foreign, aiohttp.ClientSession() as http:

        async def post(where: Door, body: object) -> tuple[int, str]:
            async with http.post(where.reward_url, json=body) as response:
                return response.status, await response.text()

        async with door_client(door) as remote:
            answer = await remote.chat.completions.create(model="policy", messages=HI)
        assert (await post(foreign, {"reward": 1.0, "response_id": answer.id}))[0] == 404
        for wrong in ("high", None, [1], float("inf")):
            assert (await post(door, {"reward": json.loads(json.dumps(wrong, allow_nan=True))}))[0] == 400
        assert (await post(door, {"score": 1.0}))[0] == 400
        assert (await post(door, {"reward": 0.25, "response_id": answer.id}))[0] == 200
        assert (await post(door, {"reward": 0.25, "response_id": answer.id}))[0] == 409
        assert (await post(door, {"reward": {"right": 1.0, "length": -0.5}}))[0] == 200
        assert (await post(door, {"reward": 1.0}))[0] == 409
        trajectory = client.close(StopReason.COMPLETED)
        async with client.served() as late:
            assert (await post(late, {"reward": 1.0}))[0] == 409
        assert (await post(late, {"reward": 1.0}))[0] == 409
    assert trajectory.final_reward == 0.5
    assert trajectory.turns[0].reward == 0.25
    assert trajectory.reward_parts == {"right": 1.0, "length": -0.5}
    assert not other.turns


async def cut(door: Door, hold: Hold | None, received: bytes) -> None:
    """Send a streamed call by hand, and close the connection when `received` has come and the reply is at its hold."""
    body = json.dumps({"model": "policy", "messages": HI, "stream": True}).encode()
    host, _, port = door.server_url.removeprefix("http://").partition(":")
    path = door.base_url.removeprefix(door.server_url)
    head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        data = b""
        while received not in data:
            data += await stream.receive()
        if hold is not None:
            await hold.reached.wait()


@pytest.mark.parametrize("at", [1, 2, 5, 9])
async def test_a_stream_that_is_cut_in_its_middle_and_asked_again_is_a_turn_beside_the_one_that_goes_on(at: int):
    hold = Hold(at=at)
    client, policy = scripted_client([ScriptedReply(output="0123456789", holds=(hold,)), "whole", "thanks"])
    async with client.served() as door, door_client(door) as remote:
        await cut(door, hold, b'"role"')
        await until(lambda: policy.aborted)
        again = await remote.chat.completions.create(model="policy", messages=HI, stream=False)
        history: list[Any] = [*HI, again.choices[0].message.model_dump(exclude_none=True), *HI]
        await remote.chat.completions.create(model="policy", messages=history)
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    assert played(again) == "whole"
    cut_off, whole, last = trajectory.turns
    assert (cut_off.stop_reason, cut_off.message["content"]) == (StopReason.ABORT, "0123456789"[:at])
    assert (last.parent, last.fork, whole.context_ids.tolist()) == (1, None, cut_off.context_ids.tolist())
    assert len(trajectory.branches()) == 2
    verify(trajectory)


async def test_of_two_samples_for_one_request_the_one_that_comes_back_is_continued():
    client, _ = scripted_client(["unused", "used", "thanks"])
    async with client.served() as door, door_client(door) as remote:
        await cut(door, None, b"[DONE]")  # all of it was sent, so nothing says that it was not used
        again = await remote.chat.completions.create(model="policy", messages=HI)
        history: list[Any] = [*HI, again.choices[0].message.model_dump(exclude_none=True), *HI]
        await remote.chat.completions.create(model="policy", messages=history)
    assert [turn.parent for turn in client.episode.turns] == [None, None, 1]
    assert client.episode.turns[2].fork is None


async def test_calls_wait_while_weights_are_swapped_and_keep_what_both_versions_sampled():
    hold = Hold(at=2)
    server = scripted_server([ScriptedReply(output="swapped", holds=(hold,)), "after"])
    async with pool_of(server) as pool:
        client = client_of(pool)
        async with client.served() as door, door_client(door) as remote:

            async def ask(text: str) -> None:
                messages: list[Any] = [{**HI[0], "content": text}]
                completion = await remote.chat.completions.create(model="policy", messages=messages)
                assert played(completion)

            with anyio.fail_after(DEADLINE_S):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(ask, "before")
                    await hold.reached.wait()
                    await server.pause("in_place")
                    tasks.start_soon(ask, "during")
                    await until(lambda: client.episode.calls.in_flight == 2)
                    await pool.update_weights(publication(1))
                    assert not client.turns
                    hold.release.set()
    spans = {turn.messages[0]["content"]: turn.spans for turn in client.episode.turns}
    assert [(span.start, span.version) for span in spans["before"]] == [(0, 0), (2, 1)]
    assert [span.version for span in spans["during"]] == [1]


async def test_an_answer_that_reached_nobody_is_sent_again_and_one_that_arrived_only_to_a_marked_retry():
    client, _ = scripted_client(["one"])
    kept: list[Answer] = []
    call = SharedCall(client.backend, AskedCall(HI, {}, Speaker(), None), stream=True, on_answer=kept.append)
    recent = RecentCalls()
    recent.add(b"body", call)
    assert [recent.repeated(b"body", is_retry=mark) for mark in (True, None, False)] == [call, None, None]
    await call.run()
    assert [recent.repeated(b"body", is_retry=mark) for mark in (True, None, False)] == [call, call, None]
    with call.followed() as pieces:
        assert recent.repeated(b"body", is_retry=None) is None, "somebody is about to get it"
        assert [piece async for piece in pieces][-1] is kept[0]
    assert recent.awaited(b"body") is call
    call.is_delivered = True
    assert recent.awaited(b"body") is None
    assert recent.repeated(b"body", is_retry=None) is None
    assert recent.repeated(b"body", is_retry=True) is call
    assert recent.repeated(b"other", is_retry=True) is None


async def test_a_call_that_everybody_left_is_aborted_and_no_repetition_joins_it():
    client, policy = scripted_client([ScriptedReply(output="one", holds=(Hold(),))])
    call = SharedCall(client.backend, AskedCall(HI, {}, Speaker(), None), stream=False, on_answer=lambda _: None)
    recent = RecentCalls()
    recent.add(b"body", call)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call.run)
        with call.followed(), call.followed():
            await until(lambda: policy.calls)
        assert recent.repeated(b"body", is_retry=True) is None
    assert call.is_over
    assert policy.aborted
    assert not client.turns


ROUTES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI},
    "responses": {"input": HI},
    "messages": {"messages": HI, "max_tokens": 100},
}


@pytest.mark.parametrize("route", ROUTES)
async def test_every_dialect_records_a_turn_that_its_own_id_rewards_and_refuses_in_its_own_shape(route: str):
    client, _ = scripted_client(["a", "b", "c"], max_turns=1)
    body = {"model": "policy", **ROUTES[route]}
    async with client.served() as door, aiohttp.ClientSession() as http:

        async def post(key: str, fields: object, url: str = "") -> tuple[int, Any]:
            async with http.post(url or f"{door.server_url}/e/{key}/v1/{route}", json=fields) as response:
                return response.status, await response.json()

        status, answer = await post(door.key, body)
        assert status == 200
        assert (await post("x" * 43, body))[0] == 401
        for fields in (body, {**body, "stream": True}):  # the only turn is spent
            status, refusal = await post(door.key, {**fields, "top_p": 0.5})
            assert status == 400
            assert refusal["error"]["message"]
            assert (refusal.get("type") == "error") == (route == "messages")
        assert (await post("", {"reward": 0.5, "response_id": answer["id"]}, door.reward_url))[0] == 200
    assert [turn.reward for turn in client.episode.turns] == [0.5]


async def test_a_response_continues_an_earlier_one_of_its_episode_by_its_id_and_no_other():
    client, _ = scripted_client(["one", "two"])
    stranger, _ = scripted_client(["three"])
    async with client.served() as door, stranger.served() as other, door_client(door) as remote:
        first = await remote.responses.create(model="policy", input="Hi")
        second = await remote.responses.create(model="policy", input="And?", previous_response_id=first.id)
        async with door_client(other) as foreign:
            with pytest.raises(openai.APIStatusError) as caught:
                await foreign.responses.create(model="policy", input="And?", previous_response_id=first.id)
    assert (first.output_text, second.output_text) == ("one", "two")
    assert caught.value.status_code in (400, 404)
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    assert [turn.parent for turn in trajectory.turns] == [None, 0]
    verify(trajectory)


async def test_tokens_are_counted_as_the_call_itself_counts_them_and_nothing_is_sent():
    client, policy = scripted_client(["a"])
    body = {"model": "policy", "messages": HI, "max_tokens": 100}
    async with client.served() as door, aiohttp.ClientSession() as http:
        async with http.post(f"{door.url}/v1/messages/count_tokens", json=body) as response:
            counted = await response.json()
        assert not policy.calls
        async with http.post(f"{door.url}/v1/messages", json=body) as response:
            usage = (await response.json())["usage"]
    assert counted == {"input_tokens": usage["input_tokens"]}
    assert len(client.turns) == 1


async def test_a_client_cannot_fill_the_metrics_of_an_episode_with_names_of_its_own():
    client, _ = scripted_client(["a"])
    body = {"messages": HI, **{f"unknown_{number}" + "x" * 1000: True for number in range(1000)}}
    async with (
        client.served() as door,
        aiohttp.ClientSession() as http,
        http.post(f"{door.base_url}/chat/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
    ignored = {name: count for name, count in client.episode.metrics.items() if name.startswith(IGNORED_METRIC)}
    assert len(ignored) == MAX_IGNORED + 1
    assert max(map(len, ignored)) < 150
    assert ignored[IGNORED_METRIC + "other"] == 1000 - MAX_IGNORED


async def test_tokens_of_a_message_with_the_beginning_of_its_answer_are_counted_though_the_call_is_refused():
    client, policy = scripted_client(["a"])
    prefilled = {"messages": [*HI, {"role": "assistant", "content": "The sum of the two is"}]}
    async with client.served() as door, aiohttp.ClientSession() as http:
        counts: list[int] = []
        for body in ({"messages": HI}, prefilled):
            async with http.post(f"{door.url}/v1/messages/count_tokens", json=body) as response:
                assert response.status == 200, await response.text()
                counts.append((await response.json())["input_tokens"])
        async with http.post(f"{door.url}/v1/messages", json={**prefilled, "max_tokens": 9}) as response:
            assert response.status == 400
    assert counts[1] > counts[0]
    assert not policy.calls
