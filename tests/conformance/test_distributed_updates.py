"""Weights from the trainer's memory: what both servers answer, and that what they then serve is exactly what was sent."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from anyio.abc import TaskGroup
from safetensors.torch import load_file
from torch import Tensor

from agentrl.errors import WeightSyncError
from agentrl.inference.backend import LogprobTolerance, Probe
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool.pool import ServerPool
from agentrl.inference.sglang.server import SGLangServer
from agentrl.weights.process_group import listen
from agentrl.weights.types import GroupRequest, WeightFeed
from tests.support.api import Api
from tests.support.channel import LocalTrainer
from tests.support.embedded import ReferenceModel
from tests.support.servers import Answer, RunningServer

pytestmark = pytest.mark.starts

PROMPT = [5, 6, 7, 8, 9, 10]


def weights(server: RunningServer, version: int) -> dict[str, Tensor]:
    return load_file(server.checkpoints[version] / "model.safetensors")


@asynccontextmanager
async def pool_at(server: RunningServer, **changes: object) -> AsyncGenerator[ServerPool]:
    """Yield a pool over one server that is told to leave its groups at the end."""
    config = InferenceConfig.model_validate({"urls": (server.url,), "health_interval_s": 3600.0, **changes})
    async with ServerPool([SGLangServer(server.url, vocab_size=server.vocab_size)], config) as pool:
        yield pool


class Link:
    """A group of the trainer and one server, and the raw calls that use it."""

    def __init__(self, api: Api, trainer: LocalTrainer, name: str, *, flat: bool) -> None:
        self.api, self.trainer, self.name, self.flat = api, trainer, name, flat

    async def send(self, tensors: Mapping[str, Tensor], **fields: object) -> Answer:
        """Send one bucket and return the server's answer."""
        manifest = self.trainer.manifest(1, tensors)
        self.trainer.sender.begin(manifest, tensors, [self.name])
        [bucket] = manifest.buckets
        self.trainer.sender.start([self.name])
        answer = await self.api.post(
            "/update_weights_from_distributed",
            {
                "names": [spec.name for spec in bucket],
                "dtypes": [spec.dtype for spec in bucket],
                "shapes": [spec.shape for spec in bucket],
                "group_name": self.name,
                **({"load_format": "flattened_bucket"} if self.flat else {}),
                **fields,
            },
        )
        await anyio.to_thread.run_sync(self.trainer.sender.finish, [self.name], () if answer.status == 200 else (self.name,))
        return answer


@asynccontextmanager
async def linked(api: Api, name: str, *, flat: bool = True) -> AsyncGenerator[Link]:
    """Join the server under test to a group; it leaves it, and any session it is in, at the end."""
    trainer = LocalTrainer({})
    [address] = trainer.sender.open([GroupRequest(name, ranks=1, nccl=False, flat=flat)], ())
    body = {
        "master_address": address.host,
        "master_port": address.port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": name,
        "backend": "gloo",
    }
    answer = await api.post("/init_weights_update_group", body)
    assert answer == (200, {"success": True, "message": "Succeeded to initialize custom process group."})
    try:
        yield Link(api, trainer, name, flat=flat)
    finally:
        trainer.sender.open([], [name])
        await api.post("/end_weight_update")
        await api.post("/destroy_weights_update_group", {"group_name": name})


def spans(body: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in body["meta_info"]["weight_versions"]]


async def test_requests_in_flight_go_on_with_exactly_the_weights_that_were_sent(
    api: Api, server: RunningServer, tasks: TaskGroup
) -> None:
    trainer = LocalTrainer(weights(server, 1))
    references = [ReferenceModel(server.checkpoints[version]) for version in (0, 1)]
    expected = references[1].logprobs(PROMPT)[1:].astype(np.float32)
    async with pool_at(server) as pool:
        flights = [api.start(tasks, [*PROMPT, token], 2000) for token in range(20, 24)]
        for flight in flights:
            await flight.reached(10)
        await api.pause("retract")  # the update does so, too, but it may be a while until then
        probe = Probe(token_ids=np.array(PROMPT, np.int32), logprobs=expected, tolerance=LogprobTolerance(largest=1e-5))
        report = await pool.update_weights(WeightFeed(version=1, channel=trainer.channel), probe)
        assert report.updated == (server.url,)
        bodies = [await flight.final() for flight in flights]
    for token, body in zip(range(20, 24), bodies, strict=True):
        first, second = spans(body)
        assert (first[0], first[1], second[0], second[2]) == ("0", 0, "1", 2000)
        cut = first[2]
        assert 10 <= cut == second[1]
        ids = [*PROMPT, token, *body["output_ids"]]
        recorded = np.array([triple[0] for triple in body["meta_info"]["output_token_logprobs"]])
        recomputed = [reference.logprobs(ids)[len(PROMPT) + 1 :] for reference in references]
        assert np.abs(recorded[:cut] - recomputed[0][:cut]).max() < 1e-5
        assert np.abs(recorded[cut:] - recomputed[1][cut:]).max() < 1e-5
        assert np.abs(recorded[cut:] - recomputed[0][cut:]).max() > 1e-3  # the versions can be told apart


@pytest.mark.parametrize("pause_mode", ["exact", "fast"])
async def test_digests_equal_those_of_the_same_weights_from_disk(api: Api, server: RunningServer, pause_mode: str) -> None:
    assert (await api.update(server.checkpoints[2], "2")).status == 200
    from_disk = await api.checksums()
    async with pool_at(server, pause_mode=pause_mode) as pool:
        for version, wanted in ((3, 1), (4, 2)):
            trainer = LocalTrainer(weights(server, wanted))
            await pool.update_weights(WeightFeed(version=version, channel=trainer.channel))
        assert await api.checksums() == from_disk
    assert (await api.get("/model_info")).body["weight_version"] == "4"


async def test_a_session_gates_updates(api: Api, server: RunningServer) -> None:
    bucket = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]], "group_name": "none"}
    before = await api.checksums()
    for path, body in (("/update_weights_from_distributed", bucket), ("/end_weight_update", {})):
        status, reply = await api.post(path, body)
        assert (status, reply["success"]) == (400, False)
    assert (await api.post("/begin_weight_update")) == (200, {"success": True, "message": "Success"})
    status, reply = await api.post("/begin_weight_update")
    assert (status, reply["success"]) == (400, False)
    status, reply = await api.post("/update_weights_from_distributed", bucket)
    assert (status, reply["success"]) == (400, False)
    assert "none" in reply["message"]
    assert (await api.post("/end_weight_update")) == (200, {"success": True, "message": "Success"})
    assert await api.checksums() == before
    assert (await api.get("/model_info")).body["weight_version"] == "0"


async def test_an_unknown_group_cannot_be_left_nor_sent_to(api: Api) -> None:
    status, reply = await api.post("/destroy_weights_update_group", {"group_name": "never"})
    assert (status, reply) == (400, {"success": False, "message": "The group to be destroyed does not exist."})
    assert (await api.post("/begin_weight_update")).status == 200
    bucket = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[32]], "group_name": "never"}
    status, reply = await api.post("/update_weights_from_distributed", bucket)
    assert (status, reply["success"]) == (400, False)
    assert "Group never not in" in reply["message"]
    assert (await api.post("/end_weight_update")).status == 200


@pytest.mark.parametrize(("name", "backend"), [("joined", "gloo"), ("other", "pigeons")])
async def test_a_group_whose_name_is_taken_or_whose_backend_is_unknown_is_not_joined(
    name: str, backend: str, api: Api, server: RunningServer
) -> None:
    # One that nobody leads is not asked for: SGLang waits half an hour for it.
    store = listen("127.0.0.1", timedelta(seconds=20))
    body = {
        "master_address": "127.0.0.1",
        "master_port": store.port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": name,
        "backend": backend,
    }
    async with linked(api, "joined") as link:
        status, reply = await api.post("/init_weights_update_group", body)
        assert (status, reply["success"]) == (400, False)
        await api.pause("retract")
        await api.post("/begin_weight_update")
        assert (await link.send(weights(server, 1), weight_version="1")).status == 200
        await api.resume()


async def test_a_flush_is_refused_while_requests_keep_their_place(api: Api, server: RunningServer, tasks: TaskGroup) -> None:
    async with linked(api, "flushed") as link:
        flight = api.start(tasks, PROMPT, 4000)
        await flight.reached(10)
        await api.pause("in_place")
        await api.post("/begin_weight_update")
        status, reply = await link.send(weights(server, 1), weight_version="1", flush_cache=True)
        assert (status, reply["success"]) == (400, False)
        assert "flush" in reply["message"]
        assert (await api.get("/model_info")).body["weight_version"] == "0"
        await api.post("/end_weight_update")
        await api.resume()
        await api.post("/abort_request", {"rid": flight.rid})
        await flight.final()


async def test_our_client_flushes_nothing_that_keeps_its_place(api: Api, server: RunningServer, tasks: TaskGroup) -> None:
    trainer = LocalTrainer(weights(server, 1))
    async with pool_at(server, pause_mode="fast") as pool:
        flight = api.start(tasks, PROMPT, 4000)
        await flight.reached(10)
        await api.pause("in_place")  # as the update does, too, but it may be a while until then
        assert (await pool.update_weights(WeightFeed(version=1, channel=trainer.channel))).updated == (server.url,)
        await flight.reached(len(flight.ids) + 10)
        await api.post("/abort_request", {"rid": flight.rid})
        body = await flight.final()
    assert [version for version, _, _ in spans(body)] == ["0", "1"]
    assert body["meta_info"]["num_retractions"] == 0


@pytest.mark.parametrize("flat", [True, False])
async def test_buckets_add_up_and_the_one_with_a_version_names_them(api: Api, server: RunningServer, flat: bool) -> None:
    await api.update(server.checkpoints[1], "1")
    from_disk = await api.checksums()
    await api.update(server.checkpoints[0], "0")
    new = weights(server, 1)
    names = sorted(new)
    halves = [{name: new[name] for name in part} for part in (names[::2], names[1::2])]
    async with linked(api, f"halves-{flat}", flat=flat) as link:
        await api.pause("retract")
        assert (await api.post("/begin_weight_update")).status == 200
        status, reply = await link.send(halves[0], flush_cache=False)
        assert (status, reply["success"]) == (200, True)
        assert (await api.get("/model_info")).body["weight_version"] == "0"
        status, reply = await link.send(halves[1], weight_version="5")
        assert (status, reply["message"]) == (200, "Succeeded to update parameter online. Weight version updated to 5.")
        assert (await api.get("/model_info")).body["weight_version"] == "5"
        assert (await api.post("/end_weight_update")).status == 200
        await api.resume()
        assert await api.checksums() == from_disk
        assert spans(await api.generate(PROMPT, 3)) == [("5", 0, 3)]


async def test_after_the_end_of_a_session_what_was_sent_is_served_also_without_a_version(
    api: Api, server: RunningServer
) -> None:
    await api.update(server.checkpoints[1], "1")
    from_disk = await api.checksums()
    await api.update(server.checkpoints[0], "0")
    async with linked(api, "nameless") as link:
        await api.pause("retract")
        await api.post("/begin_weight_update")
        assert (await link.send(weights(server, 1))).status == 200
        await api.post("/end_weight_update")
        await api.resume()
        assert await api.checksums() == from_disk
        assert (await api.get("/model_info")).body["weight_version"] == "0"


async def test_a_group_can_be_left_and_another_joined(api: Api, server: RunningServer) -> None:
    for name in ("first", "second"):
        async with linked(api, name) as link:
            assert (await api.post("/destroy_weights_update_group", {"group_name": name})).status == 200
            await api.pause("retract")
            await api.post("/begin_weight_update")
            status, reply = await api.post(
                "/update_weights_from_distributed",
                {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]], "group_name": link.name},
            )
            assert (status, reply["success"]) == (400, False)
            await api.resume()


async def test_a_trainer_that_goes_away_in_the_middle_is_a_refusal_and_the_server_works_on(
    api: Api, server: RunningServer, tasks: TaskGroup
) -> None:
    answers: list[Answer] = []
    async with linked(api, "lost") as link:
        await api.pause("retract")
        await api.post("/begin_weight_update")
        manifest = link.trainer.manifest(1, weights(server, 1))
        link.trainer.sender.begin(manifest, weights(server, 1), ["lost"])
        [bucket] = manifest.buckets
        body = {
            "names": [spec.name for spec in bucket],
            "dtypes": [spec.dtype for spec in bucket],
            "shapes": [spec.shape for spec in bucket],
            "group_name": "lost",
            "load_format": "flattened_bucket",
        }

        async def update() -> None:
            answers.append(await api.post("/update_weights_from_distributed", body))

        async with anyio.create_task_group() as waiting:
            waiting.start_soon(update)
            assert (await api.get("/model_info")).status == 200  # answers while it waits
            link.trainer.sender.finish(["lost"], ["lost"])  # closes the group, nothing was sent
        [(status, reply)] = answers
        assert (status, reply["success"]) == (400, False)
        assert "Failed to receive weights" in reply["message"]
        await api.resume()
    trainer = LocalTrainer(weights(server, 1))
    async with pool_at(server) as pool:
        await pool.update_weights(WeightFeed(version=1, channel=trainer.channel))
    assert spans(await api.generate(PROMPT, 2)) == [("1", 0, 2)]


async def test_a_session_that_was_left_open_does_not_stop_the_next_update(api: Api, server: RunningServer) -> None:
    assert (await api.post("/begin_weight_update")).status == 200
    trainer = LocalTrainer(weights(server, 1))
    async with pool_at(server) as pool:
        report = await pool.update_weights(WeightFeed(version=1, channel=trainer.channel))
    assert report.updated == (server.url,)
    assert (await api.post("/end_weight_update")).status == 400


async def test_weights_of_another_model_are_an_error_and_the_pool_does_not_serve_them(
    api: Api, server: RunningServer
) -> None:
    wrong = weights(server, 1)
    wrong["model.norm.weight"] = wrong["model.norm.weight"][:7].clone()
    async with pool_at(server) as pool:
        with pytest.raises(WeightSyncError, match="no server holds version 1"):
            await pool.update_weights(WeightFeed(version=1, channel=LocalTrainer(wrong).channel))
        assert pool.describe().servers[0].state != "serving"
