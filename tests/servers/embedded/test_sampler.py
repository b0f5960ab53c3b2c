"""Drawing tokens: distributions, cuts, seeds; and finding prefixes in the cache."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.servers.embedded.cache import KVCache
from agentrl.servers.embedded.sampler import SampleBatch, mix_seed, sample, uniform
from agentrl.servers.embedded.spec import ModelSpec, RopeScaling

SPEC = ModelSpec(
    architecture="LlamaForCausalLM", model_type="llama", vocab_size=8, hidden_size=4, intermediate_size=4, num_layers=1,
    num_heads=1, num_kv_heads=1, head_dim=2, rms_norm_eps=1e-6, max_positions=64, rope_theta=1e4,
    rope=RopeScaling(kind="default"), tied=True, qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False,
    eos_ids=frozenset(),
)  # fmt: skip


def batch(
    count: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 1 << 30,
    min_p: float = 0.0,
    draws: np.ndarray | None = None,
) -> SampleBatch:
    return SampleBatch(
        temperature=np.full(count, temperature, np.float32),
        top_p=np.full(count, top_p, np.float32),
        top_k=np.full(count, top_k, np.int64),
        min_p=np.full(count, min_p, np.float32),
        draws=uniform(np.full(count, 12345, np.uint64), np.arange(count)) if draws is None else draws,
        cut=np.full(count, top_p < 1 or min_p > 0 or top_k < 1 << 30),
    )


def frequencies(ids: torch.Tensor, size: int) -> torch.Tensor:
    return torch.bincount(ids, minlength=size).double() / len(ids)


def test_samples_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -30.0])
    for temperature in (0.5, 1.0, 2.0):
        drawn = sample(logits.repeat(40_000, 1), batch(40_000, temperature=temperature))
        expected = torch.log_softmax(logits / temperature, -1)
        assert (frequencies(drawn.ids, 5) - expected.exp()).abs().max() < 0.01
        assert torch.allclose(drawn.logprobs, expected[drawn.ids], atol=1e-6)


def test_cuts_renormalize_what_they_keep_but_report_the_uncut_log_probs() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]))
    count = 20_000
    for cut, kept in (
        (batch(count, top_k=2), 2),
        (batch(count, top_p=0.75), 3),
        (batch(count, min_p=0.3), 3),
        (batch(count, top_p=1e-6), 1),
    ):
        drawn = sample(logits.repeat(count, 1), cut)
        expected = torch.where(torch.arange(5) < kept, logits.exp(), 0.0)
        assert (frequencies(drawn.ids, 5) - expected / expected.sum()).abs().max() < 0.015
        assert torch.allclose(drawn.logprobs, logits[drawn.ids], atol=1e-5)


@given(
    st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=40),
    st.floats(0.01, 1.0),
    st.integers(1, 50),
    st.floats(0.0, 1.0),
    st.sampled_from([0.0, 0.5, 1.0 - 2.0**-52]),
)
@settings(max_examples=200, deadline=None)
def test_a_token_that_was_cut_is_never_drawn(
    logits: list[float], top_p: float, top_k: int, min_p: float, draw: float
) -> None:
    row = torch.tensor([logits])
    drawn = sample(row, batch(1, top_p=top_p, top_k=top_k, min_p=min_p, draws=np.array([draw])))
    token = int(drawn.ids[0])
    probabilities = torch.softmax(row[0], -1)
    rank = int((probabilities > probabilities[token]).sum())
    assert rank < top_k
    assert probabilities[token] >= probabilities.max() * min_p * (1 - 1e-6) or rank == 0
    assert probabilities[probabilities > probabilities[token]].sum() <= top_p + 1e-5


def test_greedy_takes_the_largest_logit_and_reports_it_at_temperature_one() -> None:
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(0)) * 4
    drawn = sample(logits, batch(16, temperature=0.0))
    assert torch.equal(drawn.ids, logits.argmax(-1))
    assert torch.allclose(drawn.logprobs, torch.log_softmax(logits, -1).max(-1).values)


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    mixed = batch(64)
    mixed.temperature[::2] = 0.0
    drawn = sample(logits, mixed)
    assert torch.equal(drawn.ids[::2], logits[::2].argmax(-1))
    assert torch.equal(drawn.ids[1::2], sample(logits, batch(64)).ids[1::2])


def test_uniform_numbers_are_in_range_spread_and_different_for_neighbouring_seeds() -> None:
    seeds = np.array([mix_seed(seed) for seed in range(200)], np.uint64)
    numbers = uniform(seeds[:, None], np.arange(200))
    assert 0 <= numbers.min() < 1e-3
    assert 1 - 1e-3 < numbers.max() < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.01
    assert abs(float(np.mean((numbers[0] - 0.5) * (numbers[1] - 0.5)))) < 0.02
    assert len(np.unique(numbers)) == numbers.size


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=200), min_size=1, max_size=6), st.data())
@settings(max_examples=100, deadline=None)
def test_the_longest_cached_prefix_is_found(rows: list[list[int]], data: st.DataObject) -> None:
    cache = KVCache(SPEC, num_rows=8, max_context=256, device=torch.device("cpu"), dtype=torch.float32)
    for row, ids in enumerate(rows):
        cache.tokens[row, : len(ids)] = ids
        cache.lengths[row] = cache.known[row] = len(ids)
    source = data.draw(st.sampled_from(rows))
    wanted = source[: data.draw(st.integers(0, len(source)))] + data.draw(st.lists(st.integers(0, 1), max_size=60))
    limit = len(wanted)
    best = max(common(ids, wanted) for ids in rows)
    match = cache.match(np.array(wanted, np.int32), limit)
    assert (match.length if match is not None else 0) == best


def test_rows_of_other_weights_are_never_found_and_are_overwritten_first() -> None:
    cache = KVCache(SPEC, num_rows=3, max_context=64, device=torch.device("cpu"), dtype=torch.float32)
    ids = np.arange(6, dtype=np.int32)
    row, reused = cache.claim(ids, None)
    assert reused == 0
    cache.lengths[row] = 6
    cache.release(row)
    assert cache.match(ids, 5) is not None
    cache.next_epoch()
    assert cache.match(ids, 5) is None
    assert cache.claim(ids, None)[0] == row


def test_a_short_match_does_not_destroy_a_long_row() -> None:
    cache = KVCache(SPEC, num_rows=3, max_context=64, device=torch.device("cpu"), dtype=torch.float32)
    long = np.arange(40, dtype=np.int32) % 8
    row, _ = cache.claim(long, None)
    cache.data[:, :, row] = 7.0
    cache.lengths[row] = 40
    cache.release(row)
    short = np.concatenate((long[:5], np.array([7, 7, 7], np.int32)))
    other, reused = cache.claim(short, cache.match(short, 7))
    assert (other != row, reused) == (True, 5)
    assert bool((cache.data[:, :, other, :, :5] == 7.0).all())
    assert cache.lengths[row] == 40


def finished(cache: KVCache, ids: list[int], session: str = "") -> int:
    """Let a sequence of these ids run to its end, and return its row."""
    array = np.array(ids, np.int32)
    row, _ = cache.claim(array, cache.match(array, len(ids) - 1), session=session)
    cache.lengths[row] = len(ids)
    cache.release(row)
    return row


def held(cache: KVCache, ids: list[int]) -> int:
    match = cache.match(np.array(ids, np.int32), len(ids))
    return 0 if match is None else match.length


def test_open_sessions_keep_their_rows_and_the_oldest_keep_them_longest() -> None:
    cache = KVCache(SPEC, num_rows=4, max_context=64, device=torch.device("cpu"), dtype=torch.float32)
    for number in range(3):
        finished(cache, [number, 1, 1], f"s{number}")
    for number in range(3, 7):
        finished(cache, [number, 1, 1])
    assert [held(cache, [number, 1, 1]) for number in range(7)] == [3, 3, 3, 0, 0, 0, 3]
    for number in range(3, 7):
        finished(cache, [number, 2, 2], f"s{number}")
    assert [held(cache, [number, 1, 1]) for number in range(3)] == [3, 3, 3]
    assert (cache.num_sessions, cache.dropped) == (7, 3)


def test_a_closed_session_gives_its_row_back_and_its_prefix_can_still_be_matched() -> None:
    cache = KVCache(SPEC, num_rows=2, max_context=64, device=torch.device("cpu"), dtype=torch.float32)
    first = finished(cache, [1, 1, 1], "a")
    finished(cache, [2, 2, 2], "b")
    cache.close_session("a")
    cache.close_session("unknown")
    assert held(cache, [1, 1, 1]) == 3
    assert finished(cache, [3, 3, 3]) == first
    assert (held(cache, [2, 2, 2]), cache.num_sessions, cache.dropped) == (3, 1, 0)


def test_a_session_that_falls_silent_counts_as_closed() -> None:
    cache = KVCache(SPEC, num_rows=2, max_context=64, device=torch.device("cpu"), dtype=torch.float32)
    finished(cache, [1, 1, 1], "gone")
    for number in range(17):
        assert held(cache, [1, 1, 1]) == 3, number
        finished(cache, [2 + number % 5, number % 7, 3], f"s{number}")
    finished(cache, [7, 7, 7], "another")
    assert held(cache, [1, 1, 1]) == 0


def test_a_session_never_takes_the_row_of_another_one() -> None:
    cache = KVCache(SPEC, num_rows=4, max_context=64, device=torch.device("cpu"), dtype=torch.float32)
    finished(cache, [1, 1, 1, 1, 5], "a")
    finished(cache, [1, 1, 1, 1, 6], "b")
    assert (held(cache, [1, 1, 1, 1, 5]), held(cache, [1, 1, 1, 1, 6])) == (5, 5)
    row = finished(cache, [1, 1, 1, 1, 5, 7], "a")
    assert held(cache, [1, 1, 1, 1, 5, 7]) == 6
    assert cache.claim(np.array([1, 1, 1, 1, 5, 7, 8], np.int32), None)[0] != row
    cache.next_epoch()
    assert held(cache, [1, 1, 1, 1, 5]) == 0
