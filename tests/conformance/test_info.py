"""What a server says about itself."""

from __future__ import annotations

import pytest
from anyio.abc import TaskGroup

from agentrl.inference.backend import CONTEXT_RESERVE
from agentrl.inference.sglang.wire import check_sglang_version
from tests.support.api import Api
from tests.support.servers import RunningServer

pytestmark = pytest.mark.starts


def test_a_server_starts_with_default_weights(server: RunningServer) -> None:
    assert server.first_version == "default"


async def test_model_info_names_the_model_and_its_version(api: Api, server: RunningServer) -> None:
    path = str(server.checkpoints[0])
    expected = {
        "model_path": path, "served_model_name": path, "tokenizer_path": path, "is_generation": True, "weight_version": "0",
        "load_format": "auto", "tool_call_parser": None, "reasoning_parser": None, "preferred_sampling_params": None,
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
    }  # fmt: skip
    for route in ("/model_info", "/get_model_info"):
        status, info = await api.get(route)
        assert (status, {key: info[key] for key in expected}) == (200, expected)


async def test_the_path_follows_updates_and_the_tokenizer_does_not(api: Api, server: RunningServer) -> None:
    await api.update(server.checkpoints[1], "1")
    info = (await api.get("/model_info")).body
    assert (info["model_path"], info["tokenizer_path"]) == (str(server.checkpoints[1]), str(server.checkpoints[0]))


async def test_server_info_has_what_the_client_reads_and_the_version_it_started_with(
    api: Api, server: RunningServer
) -> None:
    await api.update(server.checkpoints[1], "1")
    for route in ("/server_info", "/get_server_info"):
        status, info = await api.get(route)
        assert (status, info["version"], info["weight_version"]) == (200, "0.5.23", server.first_version)
        assert info["internal_states"][0]["weight_version"] == "1"
        check_sglang_version(info["version"], server.url)
        assert info["incremental_streaming_output"] is False
        assert (info["device"], info["dtype"], info["tp_size"], info["dp_size"]) == ("cpu", "float32", 1, 1)
        assert info["max_req_input_len"] == server.context - CONTEXT_RESERVE
        assert info["max_total_num_tokens"] >= server.context
        assert info["status"] == "ready"


async def test_loads_count_what_runs(api: Api, server: RunningServer) -> None:
    status, body = await api.get("/v1/loads")
    (load,) = body["loads"]
    assert (status, body["version"]) == (200, "0.5.23")
    assert (load["dp_rank"], load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0, 0)
    assert {
        "num_used_tokens", "max_total_num_tokens", "max_running_requests", "token_usage", "gen_throughput", "cache_hit_rate",
    } <= set(load)  # fmt: skip
    assert {"waiting", "paused", "retracted"} <= set(load["queues"])


async def test_loads_see_a_request_come_and_go(api: Api, tasks: TaskGroup) -> None:
    flight = api.start(tasks, [5], 4000)
    await api.until(lambda load: load["num_running_reqs"] == 1, "one runs")
    await api.post("/abort_request", {"rid": flight.rid})
    await flight.final()
    await api.idle()


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready"])
async def test_a_running_server_is_healthy(path: str, api: Api) -> None:
    assert await api.get(path) == (200, "")


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_a_paused_server_is_not_ready_but_answers_about_itself(mode: str, api: Api) -> None:
    await api.pause(mode)
    assert (await api.get("/ready")).status == 503
    for path in ("/model_info", "/server_info", "/v1/loads"):
        assert (await api.get(path)).status == 200
