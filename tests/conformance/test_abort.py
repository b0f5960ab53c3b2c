"""Aborts: by id, by prefix, of all, by disconnecting; what an aborted call returns.

Ids are new in every test: SGLang aborts the id of a streamed reply once more, 2 s after its end, whoever has it by then.
"""

from __future__ import annotations

from uuid import uuid4

import anyio
import pytest
from anyio.abc import TaskGroup

from tests.support.api import CONTROL_S, LOGPROBS, META, Api

pytestmark = pytest.mark.starts

FULL = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
SHORT = {"type": "abort", "message": "Abort in waiting queue"}
SHORT_META = {"id", "finish_reason", "weight_version", "weight_versions", "completion_tokens", "e2e_latency"}
LONG = 4000
"""Output limit of calls that are aborted; none comes near it."""
WHOLE = 2000
"""Output limit of a call that ends by itself."""


@pytest.mark.parametrize("stream", [True, False])
async def test_an_aborted_call_returns_what_it_has_as_http_200(stream: bool, api: Api, tasks: TaskGroup) -> None:
    flight = api.start(tasks, [5, 6], LONG, stream=stream)
    other = api.start(tasks, [5, 7], LONG)
    await other.reached(10)
    await api.until(lambda load: load["num_running_reqs"] == 2, "both run")
    assert await api.post("/abort_request", {"rid": flight.rid}) == (200, "")
    body = await flight.final()
    meta = body["meta_info"]
    assert meta["finish_reason"] == FULL
    assert set(meta) - {"response_sent_to_client_ts"} == (META | LOGPROBS) - {"response_sent_to_client_ts"}
    count = len(body["output_ids"])
    assert 0 < count == meta["completion_tokens"] == len(meta["output_token_logprobs"]) < LONG
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": count}]
    assert not other.over


async def test_an_abort_matches_every_id_that_begins_with_it(api: Api, tasks: TaskGroup) -> None:
    name = uuid4().hex
    first, longer, other = (api.start(tasks, [5, 6], LONG, rid=rid) for rid in (name + "1", name + "10", name + "2"))
    for flight in (first, longer, other):
        await flight.reached(3)
    await api.post("/abort_request", {"rid": name + "1"})
    for flight in (first, longer):
        assert (await flight.final())["meta_info"]["finish_reason"] == FULL
    await other.reached(len(other.ids) + 5)
    await api.post("/abort_request", {"rid": "", "abort_all": True})
    assert (await other.final())["meta_info"]["finish_reason"] == FULL


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": "unknown"}, {"rid": "", "abort_all": False}])
async def test_an_abort_of_nothing_is_a_silent_200(body: dict[str, object], api: Api, tasks: TaskGroup) -> None:
    flight = api.start(tasks, [5, 6], 60)
    await flight.reached(2)
    assert await api.post("/abort_request", body) == (200, "")
    assert (await flight.final())["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_retracted_request_that_is_aborted_returns_the_short_form(api: Api, tasks: TaskGroup) -> None:
    flight = api.start(tasks, [5, 6], LONG, logprob_start_len=0)
    await flight.reached(60)
    await api.pause("retract")
    await api.post("/abort_request", {"rid": flight.rid})
    streamed = flight.ids
    body = await flight.final()
    meta = body["meta_info"]
    assert meta["finish_reason"] == SHORT
    assert set(meta) == SHORT_META | LOGPROBS
    assert body["output_ids"][: len(streamed)] == streamed
    assert len(body["output_ids"]) == meta["completion_tokens"] == len(meta["output_token_logprobs"])
    assert [triple[1] for triple in meta["input_token_logprobs"]] == [5, 6]
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": len(body["output_ids"])}]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_id_in_use_is_refused_and_free_again_afterwards(stream: bool, api: Api, tasks: TaskGroup) -> None:
    first = api.start(tasks, [5, 6], LONG)
    await first.reached(3)
    second = api.start(tasks, [5, 6], 1, rid=first.rid, stream=stream)
    await second.ended()
    error = second.chunks[0]["error"] if stream else second.error["error"]
    assert second.status == (200 if stream else 400)
    assert "uplicate" in error["message"]
    await first.reached(len(first.ids) + 5)
    await api.post("/abort_request", {"rid": first.rid})
    await first.final()
    assert (await api.generate([5, 6], 1, rid=first.rid))["meta_info"]["id"] == first.rid


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_frees_its_id_and_disturbs_no_other(
    stream: bool, api: Api, tasks: TaskGroup
) -> None:
    leaving = api.start(tasks, [5, 6], LONG, stream=stream)
    staying = api.start(tasks, [5, 7], WHOLE)
    await staying.reached(20)  # it was sent second, so both run
    leaving.scope.cancel()
    again = {"input_ids": [5, 6], "rid": leaving.rid, "sampling_params": {"max_new_tokens": 1}}
    with anyio.fail_after(CONTROL_S):
        # Its id is in use until it has been aborted; SGLang looks every 4 s only, and by then `staying` may be over.
        while (await api.post("/generate", again)).status != 200:
            await anyio.lowlevel.checkpoint()
    assert (await staying.final())["meta_info"]["finish_reason"] == {"type": "length", "length": WHOLE}
    await api.idle()
