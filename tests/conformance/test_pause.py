"""Pauses: what runs, what is held, what is recorded; log-probs are judged by HF's own forward pass in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio.abc import TaskGroup

from tests.support.api import Api, Flight
from tests.support.embedded import ReferenceModel
from tests.support.servers import RunningServer

pytestmark = pytest.mark.starts

TOLERANCE = 1e-5
ENDLESS = 4000
"""More tokens than any test waits for: what has come by its end is aborted, and judged. So no test races a clock."""


@pytest.fixture(scope="session")
def references(checkpoints: dict[int, Path]) -> dict[str, ReferenceModel]:
    """By weight version, for the checkpoint of that number."""
    return {str(version): ReferenceModel(checkpoints[version]) for version in (0, 1, 2)}


def differences(prompt: list[int], body: dict[str, Any], references: dict[str, ReferenceModel]) -> dict[str, float]:
    """Return by weight version how far its tokens' recorded log-probs are, at most, from a recompute under it."""
    meta, ids = body["meta_info"], prompt + body["output_ids"]
    recorded = np.array([triple[0] for triple in meta["output_token_logprobs"]])
    worst: dict[str, float] = {}
    for span in meta["weight_versions"]:
        expected = references[span["version"]].logprobs(ids)[len(prompt) :]
        part = slice(span["start"], span["end"])
        worst[span["version"]] = float(np.abs(recorded[part] - expected[part]).max())
    return worst


def start_three(api: Api, tasks: TaskGroup) -> list[Flight]:
    """The second is not streamed: what is said of it is seen only in its reply."""
    return [api.start(tasks, [5, 6, 7 + at], ENDLESS, stream=at != 1) for at in range(3)]


async def go_on(flights: list[Flight], tokens: int) -> None:
    """Wait until each streamed flight has that many more tokens."""
    for flight in flights[::2]:
        await flight.reached(len(flight.ids) + tokens)


async def end(api: Api, flights: list[Flight]) -> list[dict[str, Any]]:
    """Abort what flies and return the last messages."""
    await api.post("/abort_request", {"abort_all": True})
    bodies = [await flight.final() for flight in flights]
    for body in bodies:
        assert body["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(body["output_ids"]) == len(body["meta_info"]["output_token_logprobs"]) < ENDLESS
    return bodies


def spans(body: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in body["meta_info"]["weight_versions"]]


async def test_retract_and_flush_keep_every_token_and_label_it_exactly(
    api: Api, server: RunningServer, tasks: TaskGroup, references: dict[str, ReferenceModel]
) -> None:
    flights = start_three(api, tasks)
    for version in (1, 2):
        await go_on(flights, 20)
        await api.pause("retract")
        assert (await api.get("/ready")).status == 503
        assert (await api.post("/flush_cache")).status == 200
        status, answer = await api.update(server.checkpoints[version], str(version))
        assert (status, answer["success"], answer["num_paused_requests"]) == (200, True, 0)
        assert (await api.get("/model_info")).body["weight_version"] == str(version)
        await api.resume()
        assert (await api.get("/ready")).status == 200
    await go_on(flights, 20)
    for at, body in enumerate(await end(api, flights)):
        assert (body["meta_info"]["num_retractions"], body["meta_info"]["weight_version"]) == (2, "2")
        labels = spans(body)
        assert [version for version, _, _ in labels] == ["0", "1", "2"]
        assert [labels[0][1], labels[2][2]] == [0, len(body["output_ids"])]
        assert [labels[0][2], labels[1][2]] == [labels[1][1], labels[2][1]]
        assert max(differences([5, 6, 7 + at], body, references).values()) < TOLERANCE


async def test_a_retraction_without_an_update_loses_and_repeats_nothing(
    api: Api, tasks: TaskGroup, references: dict[str, ReferenceModel]
) -> None:
    flights = start_three(api, tasks)
    for _ in range(2):
        await go_on(flights, 10)
        await api.pause("retract")
        assert (await api.post("/flush_cache")).status == 200
        await api.resume()
    await go_on(flights, 10)
    for at, body in enumerate(await end(api, flights)):
        assert spans(body) == [("0", 0, len(body["output_ids"]))]
        assert body["meta_info"]["num_retractions"] == 2
        assert differences([5, 6, 7 + at], body, references)["0"] < TOLERANCE


async def test_in_place_keeps_requests_where_they_are(
    api: Api, server: RunningServer, tasks: TaskGroup, references: dict[str, ReferenceModel]
) -> None:
    flights = start_three(api, tasks)
    await go_on(flights, 20)
    await api.pause("in_place")
    for query in ("", "?timeout=0.1"):
        assert (await api.post(f"/flush_cache{query}")).status == 400
    answer = await api.update(server.checkpoints[1], "1", flush_cache=False)
    assert (answer.status, answer.body["success"]) == (200, True)
    await api.resume()
    await go_on(flights, 10)
    for at, body in enumerate(await end(api, flights)):
        assert [version for version, _, _ in spans(body)] == ["0", "1"]
        assert body["meta_info"]["num_retractions"] == 0
        assert differences([5, 6, 7 + at], body, references)["0"] < TOLERANCE


async def test_abort_mode_ends_what_runs_with_what_it_has(
    api: Api, tasks: TaskGroup, references: dict[str, ReferenceModel]
) -> None:
    flights = start_three(api, tasks)
    await go_on(flights, 5)
    await api.pause("abort")
    for at, flight in enumerate(flights):
        body = await flight.final()
        meta = body["meta_info"]
        assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        assert 0 < len(body["output_ids"]) == len(meta["output_token_logprobs"]) < ENDLESS
        assert differences([5, 6, 7 + at], body, references)["0"] < TOLERANCE
    assert (await api.get("/ready")).status == 503


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_requests_that_come_during_a_pause_are_held_and_served_after_it(
    mode: str, api: Api, server: RunningServer, tasks: TaskGroup
) -> None:
    await api.pause(mode)
    streamed = api.start(tasks, [1, 2, 3], 12)
    whole = api.start(tasks, [1, 2, 4], 12, stream=False)
    await streamed.answered()
    assert (await api.post("/flush_cache")).status == 200
    assert (await api.update(server.checkpoints[1], "1")).status == 200
    assert (streamed.status, streamed.chunks, whole.chunks) == (200, [], [])
    await api.resume()
    for flight in (streamed, whole):
        body = await flight.final()
        assert (spans(body), body["meta_info"]["num_retractions"]) == ([("1", 0, 12)], 0)
        assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


async def test_pauses_and_continues_may_be_repeated_and_modes_changed(
    api: Api, tasks: TaskGroup, references: dict[str, ReferenceModel]
) -> None:
    await api.resume()
    flight = api.start(tasks, [5, 6, 7], ENDLESS)
    await flight.reached(10)
    for mode in ("in_place", "in_place", "retract", "retract", "in_place"):
        await api.pause(mode)
        assert (await api.get("/ready")).status == 503
    for _ in range(2):
        await api.resume()
        assert (await api.get("/ready")).status == 200
    await flight.reached(len(flight.ids) + 20)
    await api.post("/abort_request", {"rid": flight.rid})
    body = await flight.final()
    assert (body["meta_info"]["num_retractions"], body["meta_info"]["finish_reason"]["type"]) == (1, "abort")
    assert differences([5, 6, 7], body, references)["0"] < TOLERANCE


async def test_an_idle_server_may_be_paused_flushed_and_updated_in_any_mode(api: Api, server: RunningServer) -> None:
    for version, mode in enumerate(("abort", "retract", "in_place"), start=1):
        await api.pause(mode)
        assert (await api.post("/flush_cache")).status == 200
        assert (await api.update(server.checkpoints[version], str(version))).status == 200
        await api.resume()
        assert spans(await api.generate([5], 2)) == [(str(version), 0, 2)]


async def test_a_flush_is_refused_while_anything_runs_and_waits_if_asked_to(
    api: Api, server: RunningServer, tasks: TaskGroup
) -> None:
    flight = api.start(tasks, [5, 6, 7], server.tokens_of_a_second)
    await flight.reached(2)
    assert (await api.post("/flush_cache")).status == 400
    assert (await api.post("/flush_cache?timeout=50")).status == 200
    assert (await flight.final())["meta_info"]["finish_reason"]["type"] == "length"
    assert (await api.generate([5, 6, 7, 8], 1))["meta_info"]["cached_tokens"] == 0
