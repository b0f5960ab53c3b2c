"""The sampling of the run in calls of programs, and rewards that arrive as JSON: nothing half counts."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from agentrl.client import Client, DoorSettings, EpisodeSettings, PolicyBackend
from agentrl.rollout.scripted_policy import UNLIMITED, plain_tokenizer
from agentrl.servers.scripted.server import ScriptedServer
from agentrl.types import StopReason
from agentrl_doors.gateway.sessions.session import MAX_ROLES, OTHER_PLAYER, OTHER_ROLE
from tests.support.doors import HI, scripted_client, scripted_server


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def sampled(replies: int, **sampling: Any) -> tuple[Client, ScriptedServer]:  # noqa: ANN401
    """Return the client of an episode whose run file has this sampling."""
    server = scripted_server(["fine"] * replies)
    run = UNLIMITED.model_copy(update={"temperature": 0.8, **sampling})
    settings = EpisodeSettings(episode_id="e", task_id="t")
    return Client(PolicyBackend(server, plain_tokenizer().renderer, run, settings)), server


async def asked(client: Client, body: dict[str, object], route: str = "chat/completions", **settings: Any) -> int:  # noqa: ANN401
    said: dict[str, dict[str, object]] = {"responses": {"input": HI}, "messages": {"messages": HI, "max_tokens": 100}}
    fields = {**said.get(route, {"messages": HI}), **body}
    async with (
        client.served(DoorSettings(**settings)) as door,
        aiohttp.ClientSession() as http,
        http.post(f"{door.base_url}/{route}", json=fields) as response,
    ):
        return response.status


SENT: dict[str, tuple[str, dict[str, object]]] = {
    "aider": ("chat/completions", {"temperature": 0}),
    "llama-index": ("chat/completions", {"temperature": 0.1}),
    "browser-use": ("chat/completions", {"temperature": 0.2, "frequency_penalty": 0.3}),
    "presence": ("chat/completions", {"presence_penalty": -2.0}),
    "truncation": ("chat/completions", {"top_p": 0.1, "top_k": 1, "min_p": 0.5}),
    "a seed for all": ("chat/completions", {"seed": 42}),
    "responses": ("responses", {"temperature": 0, "top_p": 0.5}),
    "messages": ("messages", {"temperature": 0, "top_p": 0.5, "top_k": 5}),
}


@pytest.mark.parametrize(("route", "body"), SENT.values(), ids=SENT)
async def test_the_run_files_sampling_holds_and_what_a_program_sends_is_counted(route: str, body: dict[str, object]):
    client, server = sampled(1)
    assert await asked(client, body, route) == 200
    used = server.calls[0].sampling
    assert (used.temperature, used.top_p, used.top_k, used.min_p) == (0.8, 1.0, -1, 0.0)
    assert (used.frequency_penalty, used.presence_penalty, used.seed) == (0.0, 0.0, None)
    assert {name for name in client.episode.metrics if "ignored" in name} == {f"gateway.ignored.{name}" for name in body}
    assert client.episode.turns[0].in_loss


async def test_what_the_run_does_anyway_is_not_counted_and_a_smaller_limit_holds():
    client, server = sampled(1)
    body: dict[str, object] = {"temperature": 0.8, "top_p": 1, "frequency_penalty": 0, "max_tokens": 7, "stop": ["x"]}
    assert await asked(client, body) == 200
    assert server.calls[0].sampling.max_new_tokens == 7
    assert server.calls[0].sampling.stop == ("x",)
    assert not client.episode.metrics


@pytest.mark.parametrize(
    ("route", "name"),
    [
        ("chat/completions", "max_tokens"),
        ("chat/completions", "max_completion_tokens"),
        ("responses", "max_output_tokens"),
        ("messages", "max_tokens"),
    ],
)
async def test_a_program_asks_for_no_more_tokens_than_the_run_file_says(route: str, name: str):
    client, server = sampled(1, max_tokens=32)
    assert await asked(client, {name: 32_000}, route) == 200
    assert server.calls[0].sampling.max_new_tokens == 32
    [(counted, number)] = client.episode.metrics.items()
    assert counted.startswith("gateway.ignored.max_")
    assert number == 1.0


async def test_a_program_may_choose_where_the_run_file_says_so_and_its_greedy_calls_are_counted():
    client, server = sampled(1, of_programs="program")
    assert await asked(client, {"temperature": 0, "top_p": 0.5}) == 200
    assert (server.calls[0].sampling.temperature, server.calls[0].sampling.top_p) == (0.0, 0.5)
    assert client.episode.metrics == {"gateway.greedy_calls": 1.0}


async def test_side_calls_that_are_not_trained_keep_their_own_temperature():
    client, server = sampled(1)
    rules: Any = {"side_calls": {"prompts": ["2 + 3"], "answer": "policy"}}
    assert await asked(client, {"temperature": 0, "frequency_penalty": 1}, **rules) == 200
    assert server.calls[0].sampling.temperature == 0.0


@pytest.mark.parametrize("body", [{"temperature": "hot"}, {"temperature": -1}, {"frequency_penalty": 9}])
async def test_a_wrong_value_is_refused_although_it_would_not_be_used(body: dict[str, object]):
    client, _ = sampled(0)
    assert await asked(client, body) == 400


async def test_a_workflow_in_python_samples_as_its_author_says():
    client, server = sampled(1)
    await client.chat.completions.create(messages=HI, temperature=0.0)
    assert server.calls[0].sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [("true", 1.0), ("false", 0.0), ('{"a": true, "b": -0.5}', 0.5), ("1e2", 100.0)],
)
async def test_a_reward_in_json_is_the_number_that_it_stands_for(text: str, reward: float):
    client, _ = scripted_client(["a"])
    async with client.served() as door, aiohttp.ClientSession() as http:
        headers = {"Content-Type": "application/json"}
        async with http.post(door.reward_url, data=f'{{"reward": {text}}}', headers=headers) as response:
            assert response.status == 200
    assert client.close(StopReason.COMPLETED).final_reward == reward


@pytest.mark.parametrize(
    "text", ['"1"', "null", "[1]", "NaN", "Infinity", "1e999", "9" * 400, "{}", '{"a": {"b": 1}}', '{"a": "1"}', "1e31"]
)
async def test_what_is_no_reward_is_refused_before_anything_is_set(text: str):
    client, _ = scripted_client(["a"])
    async with client.served() as door, aiohttp.ClientSession() as http:
        headers = {"Content-Type": "application/json"}
        async with http.post(door.reward_url, data=f'{{"reward": {text}}}', headers=headers) as response:
            assert response.status == 400
    assert client.episode.final_reward is None


async def test_the_key_of_another_open_and_of_an_ended_episode_pays_nothing():
    first, second = scripted_client([])[0], scripted_client([])[0]
    async with first.served() as one, aiohttp.ClientSession() as http:
        async with second.served() as two:
            async with http.post(f"{one.server_url}/e/{two.key}/reward", json={"reward": 1}) as response:
                assert response.status == 403
            async with http.post(f"{one.server_url}/e/{one.reward_key}/v1/responses", json={"input": HI}) as response:
                assert response.status == 401
        async with http.post(f"{one.server_url}/e/{two.reward_key}/reward", json={"reward": 1}) as response:
            assert response.status == 409
    assert first.episode.final_reward is second.episode.final_reward is None


async def test_programs_get_neither_the_reward_url_nor_two_keys_of_one_api():
    client, _ = scripted_client([])
    async with client.served() as door:
        given = door.environment()
        assert door.reward_key is not None
        assert not any(door.reward_key in value for value in given.values())
        assert "ANTHROPIC_AUTH_TOKEN" not in given
        assert door.environment(with_rewards=True)["AGENTRL_REWARD_URL"] == door.reward_url


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer"])
async def test_the_scheme_of_a_key_ignores_case(scheme: str):
    client, _ = scripted_client(["a"])
    async with client.served() as door, aiohttp.ClientSession() as http:
        headers = {"Authorization": f"{scheme} {door.key}"}
        async with http.post(f"{door.server_url}/v1/chat/completions", json={"messages": HI}, headers=headers) as response:
            assert response.status == 200


@pytest.mark.parametrize(("kind", "other"), [("role", OTHER_ROLE), ("player", OTHER_PLAYER)])
async def test_roles_and_players_that_clients_make_up_are_bounded(kind: str, other: str):
    count = MAX_ROLES + 3
    client, _ = scripted_client(["a"] * count)
    async with client.served() as door, aiohttp.ClientSession() as http:
        for number in range(count):
            async with http.post(f"{door.url}/{kind}/r{number}/v1/chat/completions", json={"messages": HI}) as response:
                assert response.status == 200
    names = [getattr(turn, kind) for turn in client.episode.turns]
    assert names.count(other) == 3
    assert len(set(names)) == MAX_ROLES + 1
