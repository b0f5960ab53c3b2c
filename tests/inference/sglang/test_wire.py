"""SGLang's messages: bodies assembled from bytes, and replies that are refused unless everything in them fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ReplyError, RequestRejected, ServerUnavailable
from agentrl.inference.backend import Context, SamplingParams
from agentrl.inference.sglang.calls import Assembly
from agentrl.inference.sglang.wire import (
    GenerateReply,
    ServerInfo,
    check_request,
    check_sglang_version,
    generate_body,
    parse_reply,
    parse_scores,
    parse_version,
    score_body,
)
from agentrl.servers.scripted.script import Fault, corrupt
from agentrl.types import StopReason, VersionSpan
from tests.support.scripted import request

URL = "http://s"


def wire_reply(ids: list[int], spans: list[tuple[str, int, int]] | None = None, **finish: object) -> dict[str, Any]:
    spans = [("3", 0, len(ids))] if spans is None else spans
    return {
        "text": "x",
        "output_ids": list(ids),
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": ids[-1] if ids else None, **finish},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans],
            "cached_tokens": 2,
        },
    }


def parse(reply: dict[str, Any]) -> GenerateReply:
    return parse_reply(orjson.dumps(reply), vocab_size=100, url=URL)


def test_the_body_holds_the_ids_as_they_were_given() -> None:
    sampling = SamplingParams(max_new_tokens=9, temperature=0.5, stop=("a", "b"), stop_token_ids=(7,), seed=3, top_k=5)
    body = orjson.loads(generate_body(sampling, rid="r", ids_json=[b"5,6", b",7"], limit=4, stream=True, cache_salt="v2"))
    assert body == {
        "rid": "r",
        "input_ids": [5, 6, 7],
        "sampling_params": {
            "max_new_tokens": 4,
            "temperature": 0.5,
            "top_k": 5,
            "stop": ["a", "b"],
            "stop_token_ids": [7],
            "sampling_seed": 3,
        },
        "return_logprob": True,
        "stream": True,
        "cache_salt": "v2",
    }


def test_a_reply_is_read_whole() -> None:
    reply = parse(wire_reply([5, 6, 7], [("default", 0, 1), ("4", 1, 3)]))
    assert reply.output_ids.tolist() == [5, 6, 7]
    assert reply.output_ids.dtype == np.int32
    assert reply.output_logprobs.dtype == np.float32
    assert reply.spans == (VersionSpan(start=0, end=1, version=0), VersionSpan(start=1, end=3, version=4))
    assert (reply.finish, reply.matched, reply.cached_tokens) == ("stop", 7, 2)


def test_empty_and_equal_neighbouring_spans_are_joined() -> None:
    reply = parse(wire_reply([5, 6, 7], [("1", 0, 0), ("2", 0, 2), ("2", 2, 3), ("3", 3, 3)]))
    assert reply.spans == (VersionSpan(start=0, end=3, version=2),)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault.SHORT_LOGPROBS, "3 output ids, got 2 log-probs"),
        (Fault.MISMATCHED_IDS, "log-probs of other ids"),
        (Fault.OUTSIDE_VOCABULARY, "id 100"),
        (Fault.NAN_LOGPROB, "got `null`"),
        (Fault.POSITIVE_LOGPROB, "at most 0, got 0.5"),
        (Fault.SPAN_GAP, "over all 3 output ids, got spans over 2"),
        (Fault.NO_FINISH, "finish reason stop, length or abort, got none"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_expected_and_got(fault: Fault, message: str) -> None:
    with pytest.raises(ReplyError, match=message):
        parse(corrupt(wire_reply([5, 6, 7]), fault, 100))


@pytest.mark.parametrize(
    "spans",
    [[("1", 1, 3)], [("1", 0, 2), ("2", 1, 3)], [("2", 0, 2), ("1", 2, 3)], [("x", 0, 3)], [("-1", 0, 3)], []],
)
def test_spans_that_do_not_cover_the_ids_in_order_are_refused(spans: list[tuple[str, int, int]]) -> None:
    with pytest.raises(ReplyError):
        parse(wire_reply([5, 6, 7], spans))


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"meta_info": 1}', b"\xff", b'{"meta_info":{"x":NaN}}'])
def test_what_is_not_a_reply_is_refused_with_its_beginning(body: bytes) -> None:
    with pytest.raises(ReplyError, match="breaks the protocol"):
        parse_reply(body, vocab_size=100, url=URL)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    ["meta_info", "output_ids", "finish_reason", "type", "output_token_logprobs", "weight_versions"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=20,
    )
)
def test_no_json_value_gets_through_or_breaks_the_parser(value: object) -> None:
    try:
        body = orjson.dumps(value)
    except TypeError:  # integers over 64 bits
        return
    try:
        reply = parse_reply(body, vocab_size=100, url=URL)
    except ReplyError:
        return
    assert len(reply.output_ids) == len(reply.output_logprobs)
    assert np.isfinite(reply.output_logprobs).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"context": Context.of([1, 100, 2])}, "input id 100 is outside the vocabulary of 100"),
        ({"context": Context.of([])}, "0 input ids"),
        ({"sampling": SamplingParams(max_new_tokens=0)}, "max_new_tokens 0"),
        ({"sampling": SamplingParams(max_new_tokens=1, seed=2**70)}, "seed 1180591620717411303424 does not fit"),
    ],
)
def test_a_request_that_would_kill_a_server_is_not_sent(changed: dict[str, object], message: str) -> None:
    with pytest.raises(RequestRejected, match=message):
        check_request(dataclasses.replace(request(1, 2, 3), **changed), 100)  # pyright: ignore[reportArgumentType] - test data


def test_ids_of_a_larger_vocabulary_are_looked_at_one_by_one() -> None:
    inside = msgspec.structs.replace(Context.of([1, 99]), bound=5000)
    check_request(dataclasses.replace(request(), context=inside), 100)
    with pytest.raises(RequestRejected, match="input id 99 is outside the vocabulary of 99"):
        check_request(dataclasses.replace(request(), context=inside), 99)


def test_a_version_is_a_whole_number_or_the_default() -> None:
    assert [parse_version(v, URL) for v in ("default", "0", "17", 5)] == [0, 0, 17, 5]
    for bad in ("step-3", "-1", "", None, "1.5"):
        with pytest.raises(ReplyError, match="not a policy version"):
            parse_version(bad, URL)


def test_scores_are_those_of_the_ids_sent() -> None:
    ids = np.array([4, 5, 6], np.int32)
    assert orjson.loads(score_body(ids))["input_ids"] == [4, 5, 6]
    body = orjson.dumps({"meta_info": {"input_token_logprobs": [[None, 4, None], [-1.0, 5, None], [-2.0, 6, None]]}})
    assert parse_scores(body, ids, URL).tolist() == [-1.0, -2.0]
    with pytest.raises(ReplyError, match="or of other ids"):
        parse_scores(body, np.array([4, 5, 7], np.int32), URL)
    null = orjson.dumps({"meta_info": {"input_token_logprobs": [[None, 4, None], [None, 5, None], [-2.0, 6, None]]}})
    with pytest.raises(ReplyError, match="finite"):
        parse_scores(null, ids, URL)


@pytest.mark.parametrize("version", ["0.5.21rc1", "0.5.23", "v0.5.23.post1", "0.6.0.dev12+g1234", "1.0.0"])
def test_an_sglang_with_the_protocol_of_0_5_21_is_accepted(version: str) -> None:
    check_sglang_version(version, URL)


@pytest.mark.parametrize("version", ["0.4.9", "0.5.6", "0.5.20.post3"])
def test_an_older_sglang_is_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(ReplyError, match=rf"expected SGLang 0\.5\.21 or newer, got {version}; upgrade"):
        check_sglang_version(version, URL)


def test_a_version_that_is_no_number_is_refused() -> None:
    with pytest.raises(ReplyError, match="got 'main'"):
        check_sglang_version("main", URL)


def test_checksums_of_agentrls_own_servers_are_those_of_a_publication() -> None:
    assert ServerInfo(version="0.5.23", engine="embedded").checksum_kind == "agentrl"
    assert ServerInfo(version="0.5.23").checksum_kind == "sglang 0.5.23"


def piece(ids: list[int], version: int, finish: str = "abort") -> GenerateReply:
    return parse(wire_reply(ids, [(str(version), 0, len(ids))], type=finish))


def take(assembly: Assembly, reply: GenerateReply, *, caller: bool = False) -> None:
    assembly.take(reply, caller_aborted=caller)


def test_pieces_are_joined_and_the_rest_is_asked_for_under_a_new_id() -> None:
    assembly = Assembly(request(1, 2, max_new_tokens=5), URL)
    first, _ = assembly.body()
    take(assembly, piece([10, 11], 3))
    rid, body = assembly.body()
    sent = orjson.loads(body)
    assert rid != first
    assert sent["input_ids"] == [1, 2, 10, 11]
    assert sent["sampling_params"]["max_new_tokens"] == 3
    take(assembly, piece([12], 4))
    take(assembly, piece([13], 4, "stop"))
    generation = assembly.generation()
    assert generation.output_ids.tolist() == [10, 11, 12, 13]
    assert generation.spans == (VersionSpan(start=0, end=2, version=3), VersionSpan(start=2, end=4, version=4))
    assert (generation.stop_reason, generation.matched_stop) == (StopReason.STOP, 13)


def test_the_rest_of_an_interrupted_call_draws_noise_of_its_own_and_the_same_when_it_is_repeated() -> None:
    def seeds(seed: int | None) -> list[int | None]:
        sampling = SamplingParams(max_new_tokens=9, seed=seed)
        assembly = Assembly(dataclasses.replace(request(1, 2), sampling=sampling), URL)
        found: list[int | None] = []
        for ids in ([10, 11], [12], [13]):
            found.append(orjson.loads(assembly.body()[1])["sampling_params"].get("sampling_seed"))
            take(assembly, piece(ids, 3))
        return found

    assert seeds(5) == seeds(5)
    assert seeds(5)[0] == 5
    assert len(set(seeds(5))) == 3
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds(2**63 - 1))
    assert seeds(None) == [None] * 3


def test_a_call_with_stop_strings_starts_over_when_interrupted() -> None:
    assembly = Assembly(request(1, 2, stop=("END",)), URL)
    take(assembly, piece([10, 11], 3))
    assert orjson.loads(assembly.body()[1])["input_ids"] == [1, 2]


def test_ids_without_versions_are_refused() -> None:
    reply = wire_reply([10, 11], type="abort")
    del reply["meta_info"]["weight_versions"]
    with pytest.raises(ReplyError, match=r"version spans \(weight_versions\) over all 2 output ids, got spans over 0"):
        parse(reply)


def test_all_tokens_sampled_before_an_abort_are_a_whole_completion() -> None:
    assembly = Assembly(request(1, 2, max_new_tokens=2), URL)
    take(assembly, piece([10, 11], 3))
    assert assembly.generation().stop_reason is StopReason.LENGTH


def test_what_the_caller_aborted_is_returned_as_it_is() -> None:
    assembly = Assembly(request(1, 2), URL)
    take(assembly, piece([10, 11], 3), caller=True)
    assert assembly.generation().stop_reason is StopReason.ABORT
    empty = Assembly(request(1, 2), URL)
    empty.abort()
    assert empty.generation().output_ids.tolist() == []


def test_a_server_that_keeps_aborting_is_given_up() -> None:
    assembly = Assembly(request(1, 2), URL)
    for _ in range(8):
        take(assembly, piece([], 3))
    with pytest.raises(ServerUnavailable, match=r"aborted request .* 9 times"):
        take(assembly, piece([], 3))


def test_a_version_that_goes_back_within_a_call_is_refused() -> None:
    assembly = Assembly(request(1, 2), URL)
    take(assembly, piece([10], 3))
    with pytest.raises(ServerUnavailable, match="version 2 after version 3"):
        take(assembly, piece([11], 2))


def test_an_empty_or_overlong_completion_is_refused() -> None:
    with pytest.raises(ReplyError, match="at least one output id, got an empty completion"):
        parse(wire_reply([], []))
    with pytest.raises(ReplyError, match=r"more tokens \(3\) than asked for"):
        take(Assembly(request(1, 2, max_new_tokens=2), URL), piece([1, 2, 3], 0, "length"))


def test_an_abort_that_carries_an_http_status_is_that_error() -> None:
    for status, error in ((400, RequestRejected), (503, ServerUnavailable)):
        reply = piece([], 0)._replace(status_code=status, message="too long")
        with pytest.raises(error, match=f"HTTP {status} in the reply: too long"):
            take(Assembly(request(1, 2), URL), reply)


@given(
    pieces=st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=5),
    last=st.lists(st.integers(0, 99), min_size=1, max_size=5),
)
def test_joining_keeps_every_token_its_log_prob_and_its_version(pieces: list[list[int]], last: list[int]) -> None:
    assembly = Assembly(request(1, 2, max_new_tokens=100), URL)
    for version, ids in enumerate(pieces):
        take(assembly, piece(ids, version))
    take(assembly, piece(last, len(pieces), "stop"))
    generation = assembly.generation()
    assert generation.output_ids.tolist() == [token for ids in [*pieces, last] for token in ids]
    assert len(generation.output_logprobs) == len(generation.output_ids)
    versions = [version for version, ids in enumerate([*pieces, last]) for _ in ids]
    assert [span.version for span in generation.spans for _ in range(span.end - span.start)] == versions
    assert all(a.end == b.start for a, b in zip(generation.spans, generation.spans[1:], strict=False))
