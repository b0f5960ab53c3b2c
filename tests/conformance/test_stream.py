"""Streamed `/generate` calls: cumulative events, the last one, the end mark, and errors told in the stream."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from anyio.abc import TaskGroup

from tests.support.api import Api, events
from tests.support.servers import RunningServer

pytestmark = pytest.mark.starts

PROMPT = [5, 6, 7, 8]


async def raw(api: Api, body: dict[str, Any]) -> tuple[int, str, list[str]]:
    """Return status, content type and payloads."""
    async with api.session.post(api.url + "/generate", json=body) as response:
        return response.status, response.headers["Content-Type"], [payload async for payload in events(response)]


async def test_events_are_cumulative_and_only_the_last_is_complete(
    api: Api, server: RunningServer, tasks: TaskGroup
) -> None:
    count = server.tokens_of_a_second // 10  # a fast server sends many tokens in each event
    flight = api.start(tasks, PROMPT, count, sampling={"temperature": 0}, return_prompt_token_ids=True)
    last = await flight.final()
    assert flight.raw_end == "[DONE]"
    assert len(flight.chunks) > 2
    for before, after in pairwise(flight.chunks):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        triples = before["meta_info"]["output_token_logprobs"]
        assert after["meta_info"]["output_token_logprobs"][: len(triples)] == triples
        assert [triple[1] for triple in triples] == before["output_ids"]
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
        assert before["meta_info"]["completion_tokens"] == len(before["output_ids"])
        assert not {"weight_versions", "e2e_latency"} & set(before["meta_info"])
        assert (before["prompt_token_ids"], before["meta_info"]["id"], "index" in before) == (PROMPT, flight.rid, False)
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": count}
    assert last["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": count}]
    whole = await api.generate(PROMPT, count, sampling={"temperature": 0})
    assert (last["output_ids"], last["text"]) == (whole["output_ids"], whole["text"])
    assert [("response_sent_to_client_ts" in chunk["meta_info"]) for chunk in flight.chunks[:2]] == [True, False]
    assert set(last["meta_info"]) == set(whole["meta_info"]) - {"response_sent_to_client_ts"}


async def test_the_last_event_has_the_stop_and_its_text_without_it(api: Api, tasks: TaskGroup) -> None:
    whole = await api.generate(PROMPT, 12, sampling={"temperature": 0})
    stop = whole["output_ids"][4]
    cut = await api.generate(PROMPT, 12, sampling={"temperature": 0, "ignore_eos": False, "stop_token_ids": [stop]})
    sampling = {"temperature": 0, "ignore_eos": False, "stop_token_ids": [stop]}
    last = await api.start(tasks, PROMPT, 12, sampling=sampling).final()
    assert (last["output_ids"], last["text"]) == (cut["output_ids"], cut["text"])
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_scoring_streams_one_event(api: Api, tasks: TaskGroup) -> None:
    flight = api.start(tasks, PROMPT, 0, logprob_start_len=1)
    last = await flight.final()
    assert len(flight.chunks) == 1
    assert [triple[1] for triple in last["meta_info"]["input_token_logprobs"]] == PROMPT[1:]
    assert (last["output_ids"], flight.raw_end) == ([], "[DONE]")


async def test_an_interval_thins_out_the_events(api: Api, tasks: TaskGroup) -> None:
    flight = api.start(tasks, PROMPT, 40, sampling={"stream_interval": 16})
    await flight.final()
    counts = [len(chunk["output_ids"]) for chunk in flight.chunks]
    assert len(counts) <= 4
    assert counts[-1] == 40


async def test_the_events_of_a_batch_carry_their_index(api: Api, tasks: TaskGroup) -> None:
    for prompts, sampling, count in (([[5], [6, 7]], {}, 2), ([5, 6], {"n": 2}, 2), ([[5]], {}, 1)):
        body = {
            "input_ids": prompts,
            "sampling_params": {"max_new_tokens": 5, "ignore_eos": True, **sampling},
            "stream": True,
        }
        flight = api.start_body(tasks, body)
        await flight.final()
        last = {chunk["index"]: chunk for chunk in flight.chunks}
        assert sorted(last) == list(range(count))
        assert all(len(chunk["output_ids"]) == 5 for chunk in last.values())
        assert all(chunk["meta_info"]["finish_reason"]["type"] == "length" for chunk in last.values())
        assert flight.raw_end == "[DONE]"


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_ids": []},
        {"input_ids": [5], "sampling_params": {"top_p": 5}},
        {"input_ids": [5] * 5000},
        {"input_ids": [5], "sampling_params": {"max_new_tokens": 5000}},
        {"input_ids": [[5], [6]], "rid": ["a", "a"]},
    ],
)
async def test_what_is_wrong_with_a_streamed_call_is_told_in_the_stream(wrong: dict[str, Any], api: Api) -> None:
    status, kind, payloads = await raw(api, {**wrong, "stream": True})
    assert (status, kind, payloads[-1], len(payloads)) == (200, "text/event-stream; charset=utf-8", "[DONE]", 2)
    error = api.decoded(payloads[0])["error"]
    assert (error["code"], error["type"], error["retryable"]) == (400, "invalid_request_error", False)
    assert error["message"]
    assert (await api.post("/generate", wrong)).status == 400


async def test_a_body_that_cannot_be_read_is_a_400_even_if_it_asks_for_a_stream(api: Api) -> None:
    for wrong in ({"input_ids": [5], "sampling_params": {"tempreature": 1}}, {"input_ids": "five"}):
        assert (await api.post("/generate", {**wrong, "stream": True})).status == 400
