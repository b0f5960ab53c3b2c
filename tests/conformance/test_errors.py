"""What is refused, how, and that the server goes on: compared by status, shape, and the word that names the fault."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.inference.sglang.transport import error_message
from tests.support.api import Api

pytestmark = pytest.mark.starts

SCRIPTED = True
VALUES: list[tuple[dict[str, Any], str]] = [
    ({}, "text, input_ids"),
    ({"input_ids": []}, "empty"),
    ({"input_ids": [1] * 5000}, "longer than the model's context length"),
    ({"input_ids": [1] * 4000, "sampling_params": {"max_new_tokens": 500}}, "4500"),
    ({"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 3}, "logprob_start_len"),
    ({"input_ids": [1], "cache_salt": ["a"]}, "cache_salt"),
    ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid"),
    ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "uplicate"),
    ({"input_ids": [[1], [2]], "sampling_params": [{"n": 1}, {"n": 2}]}, "same for all"),
    *(
        ({"input_ids": [1], "sampling_params": {name: value}}, name)
        for name, value in (
            ("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("top_k", 0), ("top_k", -2), ("min_p", 2), ("min_p", -1),
            ("frequency_penalty", 3), ("presence_penalty", -3), ("repetition_penalty", 0), ("repetition_penalty", 3),
            ("max_new_tokens", -1), ("min_new_tokens", 500), ("min_new_tokens", -1),
        )
    ),
    ({"input_ids": [1], "sampling_params": {"stop": ["a"] * 33}}, "32"),
]  # fmt: skip
SAMPLING: list[tuple[str, object]] = [
    ("tempreature", 1), ("temperature", "hot"), ("max_new_tokens", "5"), ("max_new_tokens", 2.5), ("top_k", 2.5),
    ("stop", 5), ("stop_token_ids", ["a"]), ("sampling_seed", 2**70), ("sampling_seed", 5.5), ("ignore_eos", "x"),
]  # fmt: skip
BODIES: list[dict[str, Any]] = [
    {"input_ids": "x"}, {"input_ids": [1.5]}, {"input_ids": [[1], 2]}, {"input_ids": [1], "stream": "maybe"},
    {"input_ids": [1], "rid": 5}, {"input_ids": [1], "sampling_params": 5}, {"input_ids": [1], "return_logprob": "x"},
    {"input_ids": [1], "logprob_start_len": "x"}, {"input_ids": [1], "cache_salt": 5},
]  # fmt: skip


@pytest.fixture(autouse=True)
async def _the_server_goes_on(api: Api) -> Any:  # noqa: ANN401 - a generator
    yield
    assert len((await api.generate([1], 1))["output_ids"]) == 1


@pytest.mark.parametrize(("body", "word"), VALUES)
async def test_a_value_that_cannot_be_served_is_named(body: dict[str, Any], word: str, api: Api) -> None:
    assert word in await api.refused(body)


@pytest.mark.parametrize(("name", "value"), SAMPLING)
async def test_unknown_or_mistyped_sampling_parameters_are_refused(name: str, value: object, api: Api) -> None:
    status, body = await api.post("/generate", {"input_ids": [1], "sampling_params": {name: value}})
    assert status == 400
    assert isinstance(body["error"], str)


@pytest.mark.parametrize("sent", BODIES)
async def test_a_body_of_another_shape_is_a_validation_error(sent: dict[str, Any], api: Api) -> None:
    status, body = await api.post("/generate", sent)
    assert status == 400
    assert (body["object"], body["code"]) == ("error", 400)
    assert "validation error" in body["message"]


JOIN: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
BUCKET: dict[str, Any] = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "none"}
CONTROL: list[tuple[str, object]] = [
    ("/pause_generation", {"mode": "soft"}),
    ("/pause_generation", {"mode": None}),
    ("/pause_generation", []),
    ("/continue_generation", []),
    ("/abort_request", {"rid": 5}),
    ("/abort_request", {"rid": ["a", "b"]}),
    ("/update_weights_from_disk", {}),
    ("/update_weights_from_disk", {"model_path": "x", "weight_version": 7}),
    ("/update_weight_version", {}),
    ("/update_weight_version", {"new_version": 5}),
    ("/weights_checker", []),
    ("/init_weights_update_group", {}),
    ("/init_weights_update_group", {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1}),
    ("/init_weights_update_group", {**JOIN, "master_port": "here"}),
    ("/init_weights_update_group", {**JOIN, "world_size": 2.5}),
    ("/init_weights_update_group", {**JOIN, "group_name": 5}),
    ("/destroy_weights_update_group", {"group_name": 5}),
    ("/destroy_weights_update_group", []),
    ("/begin_weight_update", []),
    ("/begin_weight_update", {"selector": "none"}),
    ("/end_weight_update", []),
    ("/update_weights_from_distributed", {}),
    ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"]}),
    ("/update_weights_from_distributed", {**BUCKET, "names": "a"}),
    ("/update_weights_from_distributed", {**BUCKET, "shapes": [["a"]]}),
    ("/update_weights_from_distributed", {**BUCKET, "weight_version": 7}),
]


@pytest.mark.parametrize(("path", "sent"), CONTROL)
async def test_control_calls_check_their_bodies(path: str, sent: object, api: Api) -> None:
    status, body = await api.post(path, sent)
    assert (status, body["object"], body["code"]) == (400, "error", 400)
    assert (await api.get("/ready")).status == 200
    assert (await api.get("/model_info")).body["weight_version"] == "0"


@pytest.mark.parametrize(
    "path",
    ["/generate", "/pause_generation", "/continue_generation", "/abort_request", "/update_weights_from_disk"],
)
@pytest.mark.parametrize("data", [b"", b"{not json"])
async def test_bodies_are_json_and_not_empty(path: str, data: bytes, api: Api) -> None:
    headers = {"Content-Type": "application/json"}
    async with api.session.post(api.url + path, data=data, headers=headers) as response:
        body = await response.read()
        assert response.status == 400
    assert "validation error" in error_message(body)


async def test_flushes_and_checksums_need_no_body(api: Api) -> None:
    for path in ("/flush_cache", "/weights_checker"):
        assert (await api.get(path)).status == 200
        async with api.session.post(api.url + path) as response:
            assert response.status == 200


@pytest.mark.parametrize("seconds", ["soon", "-1"])
async def test_a_flush_waits_a_number_of_seconds(seconds: str, api: Api) -> None:
    status, body = await api.post(f"/flush_cache?timeout={seconds}")
    assert (status, "timeout" in body["message"]) == (400, True)


async def test_unknown_paths_and_methods_are_refused(api: Api) -> None:
    assert await api.get("/no_such_route") == (404, {"detail": "Not Found"})
    assert await api.post("/model_info") == (405, {"detail": "Method Not Allowed"})
    assert (await api.get("/pause_generation")).status == 405
    assert (await api.get("/get_weight_version")).status == 404


async def test_unknown_checks_are_refused(api: Api) -> None:
    status, body = await api.post("/weights_checker", {"action": "guess"})
    assert (status, body["success"]) == (400, False)
    assert "guess" in body["message"]
