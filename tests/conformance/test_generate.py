"""`/generate`, whole replies: fields, log-probs, finish reasons, batches, the context's edge, the prefix cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentrl.inference.backend import CONTEXT_RESERVE
from tests.support.api import LOGPROBS, META, Api
from tests.support.embedded import ReferenceModel
from tests.support.servers import RunningServer

pytestmark = pytest.mark.starts

PROMPT = [5, 6, 7, 8]
TOLERANCE = 1e-5


def logprobs(body: dict[str, Any]) -> list[float]:
    return [triple[0] for triple in body["meta_info"]["output_token_logprobs"]]


async def test_a_reply_has_these_fields_and_no_others(api: Api) -> None:
    body = await api.generate(PROMPT, 6, rid="f" * 32, return_prompt_token_ids=True)
    meta = body["meta_info"]
    assert set(body) == {"text", "output_ids", "meta_info", "prompt_token_ids"}
    assert set(meta) == META | LOGPROBS
    assert body["prompt_token_ids"] == PROMPT
    assert len(body["output_ids"]) == meta["completion_tokens"] == meta["output_token_logprobs_length"] == 6
    assert [triple[1:] for triple in meta["output_token_logprobs"]] == [[token, None] for token in body["output_ids"]]
    expected = {
        "id": "f" * 32, "finish_reason": {"type": "length", "length": 6}, "prompt_tokens": 4, "cached_tokens": 0,
        "cached_tokens_details": None, "reasoning_tokens": 0, "num_retractions": 0, "dp_rank": None, "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": 6}], "input_token_logprobs": [],
    }  # fmt: skip
    assert {key: meta[key] for key in expected} == expected
    assert meta["e2e_latency"] > 0


async def test_log_probs_come_when_asked_for(api: Api) -> None:
    answer = await api.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}})
    assert answer.status == 200
    assert set(answer.body) == {"text", "output_ids", "meta_info"}
    assert set(answer.body["meta_info"]) == META


@pytest.mark.parametrize(
    ("sampling", "temperature"),
    [
        ({"temperature": 1.0}, 1.0),
        ({"temperature": 0.5, "top_p": 0.9}, 0.5),
        ({"temperature": 1.5, "top_k": 20, "min_p": 0.01}, 1.5),
        ({"temperature": 0.0}, 1.0),
    ],
)
async def test_log_probs_are_those_of_the_scaled_untruncated_distribution(
    sampling: dict[str, float], temperature: float, api: Api, reference: ReferenceModel
) -> None:
    body = await api.generate(PROMPT, 48, sampling=dict(sampling))
    expected = reference.logprobs(PROMPT + body["output_ids"], temperature)[len(PROMPT) :]
    assert np.abs(np.array(logprobs(body)) - expected).max() < TOLERANCE


@pytest.mark.parametrize("sampling", [{"presence_penalty": 1.0}, {"frequency_penalty": 0.7, "presence_penalty": 0.3}])
async def test_log_probs_are_those_of_the_penalized_distribution(
    sampling: dict[str, float], api: Api, reference: ReferenceModel, server: RunningServer
) -> None:
    count = 120
    body = await api.generate(PROMPT, count, sampling={**sampling, "temperature": 0.8})
    ids: list[int] = body["output_ids"]
    table = reference.logits(PROMPT + ids)[len(PROMPT) - 1 : -1].numpy()

    def expected(at: int, counted: list[int]) -> float:
        counts = np.bincount(counted, minlength=server.vocab_size)
        penalties = counts * sampling.get("frequency_penalty", 0.0) + (counts > 0) * sampling["presence_penalty"]
        logits = (table[at] - penalties) / 0.8
        return float(logits[ids[at]] - np.logaddexp.reduce(logits))

    recorded = np.array(logprobs(body))
    free = np.array([expected(at, []) for at in range(count)])
    exact = np.array([expected(at, ids[:at]) for at in range(count)])
    differences = np.abs(recorded - exact)
    if server.kind == "sglang":  # it may count a token late, see `embedded.hazards`
        late = np.array([expected(at, [PROMPT[-1], *ids][:at]) for at in range(count)])
        differences = np.minimum(differences, np.abs(recorded - late))
    assert differences.max() < TOLERANCE
    assert np.abs(recorded - free).max() > 1e-2


async def test_a_penalty_keeps_greedy_sampling_from_repeating_itself(api: Api) -> None:
    free, penalized = [
        (await api.generate(PROMPT, 60, sampling={"temperature": 0, "presence_penalty": penalty}))["output_ids"]
        for penalty in (0.0, 2.0)
    ]
    assert free != penalized
    assert len(set(free)) < len(set(penalized))


async def test_greedy_takes_the_most_probable_token(api: Api, reference: ReferenceModel) -> None:
    ids = list(PROMPT)
    body = await api.generate(PROMPT, 24, sampling={"temperature": 0})
    for token in body["output_ids"]:
        logits = reference.logits(ids)[-1]
        assert float(logits[token]) >= float(logits.max()) - 1e-4
        ids.append(token)


async def test_scoring_returns_the_prompt_with_a_null_first(api: Api, reference: ReferenceModel) -> None:
    expected = reference.logprobs(PROMPT)
    for start in range(len(PROMPT) + 1):
        body = await api.generate(PROMPT, 0, logprob_start_len=start)
        meta = body["meta_info"]
        triples = meta["input_token_logprobs"]
        assert [triple[1:] for triple in triples] == [[token, None] for token in PROMPT[start:]]
        assert [triple[0] for triple in triples[:1]] == [None] * (start < len(PROMPT))
        assert np.allclose([triple[0] for triple in triples[1:]], expected[start + 1 :], atol=TOLERANCE)
        assert (body["output_ids"], body["text"], meta["output_token_logprobs"]) == ([], "", [])
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 0}]


async def test_prompts_are_scored_at_temperature_one_whatever_they_are_continued_with(
    api: Api, reference: ReferenceModel
) -> None:
    body = await api.generate(PROMPT, 4, sampling={"temperature": 0.5}, logprob_start_len=0)
    values = [triple[0] for triple in body["meta_info"]["input_token_logprobs"][1:]]
    assert np.allclose(values, reference.logprobs(PROMPT)[1:], atol=TOLERANCE)


async def test_without_log_probs_nothing_is_scored(api: Api) -> None:
    sent = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
    answer = await api.post("/generate", sent)
    assert answer.status == 200
    assert "input_token_logprobs" not in answer.body["meta_info"]


async def test_the_end_of_the_context_is_kept_free(api: Api, server: RunningServer) -> None:
    longest = server.context - CONTEXT_RESERVE - 1
    for asked in (1, 5, 6, 7):
        body = await api.generate([1] * longest, asked)
        got = min(asked, server.context - 2 - longest)
        assert len(body["output_ids"]) == got
        assert body["meta_info"]["finish_reason"] == {"type": "length", "length": got}
    unlimited = {"input_ids": [1] * longest, "sampling_params": {"max_new_tokens": None, "ignore_eos": True}}
    assert len((await api.post("/generate", unlimited)).body["output_ids"]) == server.context - 2 - longest


async def test_without_a_limit_128_tokens_come(api: Api) -> None:
    answer = await api.post("/generate", {"input_ids": PROMPT, "sampling_params": {"ignore_eos": True}})
    assert len(answer.body["output_ids"]) == 128


async def test_batches_come_back_in_order_each_with_its_own_parameters(api: Api) -> None:
    sent = {
        "input_ids": [[5], [6, 7], [8, 9, 10]],
        "rid": ["a" * 32, "b" * 32, "c" * 32],
        "sampling_params": [{"max_new_tokens": count, "ignore_eos": True} for count in (3, 2, 1)],
        "return_logprob": [True, False, True],
        "logprob_start_len": [0, -1, 2],
    }
    status, bodies = await api.post("/generate", sent)
    assert status == 200
    metas = [body["meta_info"] for body in bodies]
    assert [meta["id"] for meta in metas] == sent["rid"]
    assert [meta["prompt_tokens"] for meta in metas] == [1, 2, 3]
    assert [meta["completion_tokens"] for meta in metas] == [3, 2, 1]
    assert ["output_token_logprobs" in meta for meta in metas] == [True, False, True]
    assert [triple[1] for triple in metas[2]["input_token_logprobs"]] == [10]


async def test_one_rid_for_a_batch_is_numbered_and_a_list_of_one_is_a_batch(api: Api) -> None:
    sampling = {"max_new_tokens": 1}
    _, bodies = await api.post("/generate", {"input_ids": [[5], [6]], "rid": "x", "sampling_params": sampling})
    assert [body["meta_info"]["id"] for body in bodies] == ["x_0", "x_1"]
    _, bodies = await api.post("/generate", {"input_ids": [[5]], "rid": ["y"], "sampling_params": sampling})
    assert [body["meta_info"]["id"] for body in bodies] == ["y"]


async def test_several_samples_stand_together_under_new_ids(api: Api) -> None:
    sent = {"input_ids": [[5], [6, 7]], "rid": ["a", "b"], "sampling_params": {"n": 2, "max_new_tokens": 20}}
    _, bodies = await api.post("/generate", sent)
    assert [body["meta_info"]["prompt_tokens"] for body in bodies] == [1, 1, 2, 2]
    ids = [body["meta_info"]["id"] for body in bodies]
    assert len(set(ids)) == 4
    assert all(len(rid) == 32 for rid in ids)
    assert bodies[0]["output_ids"] != bodies[1]["output_ids"]
    for count in (0, -1):
        status, body = await api.post("/generate", {"input_ids": [5], "sampling_params": {"n": count, "max_new_tokens": 1}})
        assert (status, len(body["output_ids"])) == (200, 1)


async def test_text_is_encoded_without_special_tokens_and_ids_come_before_it(api: Api) -> None:
    sent = {"text": "hello", "sampling_params": {"max_new_tokens": 1}, "return_prompt_token_ids": True}
    status, body = await api.post("/generate", sent)
    assert (status, body["prompt_token_ids"]) == (200, [257, 75, 75, 78])
    status, body = await api.post("/generate", {**sent, "input_ids": [1]})
    assert (status, body["prompt_token_ids"]) == (200, [1])
    status, bodies = await api.post("/generate", {"text": ["hello", "you"], "sampling_params": {"max_new_tokens": 1}})
    assert (status, len(bodies)) == (200, 2)


async def test_unknown_fields_of_the_body_are_ignored_and_seeds_accepted(api: Api) -> None:
    for seed in (0, -1, 2**63 - 1):
        body = await api.generate(PROMPT, 2, sampling={"sampling_seed": seed}, unheard_of=1)
        assert len(body["output_ids"]) == 2


async def cached(api: Api, ids: list[int], **fields: Any) -> int:  # noqa: ANN401 - SGLang's fields
    meta = (await api.generate(ids, 1, **fields))["meta_info"]
    count = meta["cached_tokens"]
    assert meta["cached_tokens_details"] == ({"device": count, "host": 0} if count else None)
    return count


async def test_a_second_turn_finds_the_first_in_the_cache(api: Api) -> None:
    first = await api.generate(list(range(40, 80)), 20)
    assert first["meta_info"]["cached_tokens"] == 0
    context = [*range(40, 80), *first["output_ids"]]
    assert await cached(api, [*context, 7, 8, 9]) == len(context) - 1
    assert await cached(api, [*range(40, 80)]) == 39
    assert await cached(api, [*range(40, 80)], logprob_start_len=10) == 10
    assert await cached(api, [1, *range(40, 80)]) == 0


async def test_only_equal_salts_and_keys_share_prefixes(api: Api) -> None:
    ids = list(range(100, 140))
    kinds: list[dict[str, str]] = [
        {}, {"cache_salt": "a"}, {"extra_key": "a"}, {"extra_key": "a", "cache_salt": "b"},
        {"extra_key": "b", "cache_salt": "a"}, {"cache_salt": "ab"},
    ]  # fmt: skip
    assert [await cached(api, ids, **kind) for kind in kinds] == [0] * len(kinds)
    assert [await cached(api, ids, **kind) for kind in kinds] == [39] * len(kinds)
    assert await cached(api, ids, cache_salt="", extra_key="") == 39


async def test_a_session_changes_no_answer_and_closing_it_keeps_what_it_cached(api: Api) -> None:
    ids = [*range(40, 80)]
    plain = await api.generate(ids, 8, sampling={"temperature": 0.0})
    for _ in range(2):
        body = await api.generate(ids, 8, sampling={"temperature": 0.0}, session_id="a session")
        assert body["output_ids"] == plain["output_ids"]
        assert body["meta_info"]["cached_tokens"] == 39
    for name in ("a session", "a session", "another that was never opened"):
        assert await api.post("/close_session", {"session_id": name}) == (200, "")
    assert await cached(api, ids, session_id="a session") == 39


async def test_a_server_says_whether_it_has_sessions(api: Api) -> None:
    answer = await api.get("/server_info")
    assert answer.body["enable_session_radix_cache"] is True
