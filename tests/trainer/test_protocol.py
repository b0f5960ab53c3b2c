"""Frames and batches on the wire."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import InvariantError
from agentrl.trainer.base import StepReport, TrainBatch, TrainSample
from agentrl.trainer.worker.protocol import (
    Array,
    Failed,
    LogprobsReply,
    Publish,
    Stepped,
    TrainStep,
    decode_reply,
    decode_request,
    encode,
    pack_batch,
    pack_float32,
    pack_int32,
    pack_report,
    pack_sequences,
    split_logprobs,
    unpack_batch,
    unpack_report,
    unpack_sequences,
)
from agentrl.types import Sample


def _sample(random: np.random.Generator, length: int) -> TrainSample:
    sample = Sample(
        token_ids=random.integers(0, 1 << 31, length).astype(np.int32),
        loss_mask=random.random(length) < 0.5,
        behavior_logprobs=random.normal(size=length).astype(np.float32),
        token_versions=random.integers(-1, 9, length).astype(np.int32),
        turn_index=random.integers(0, 9, length).astype(np.int32),
        temperatures=random.random(length).astype(np.float32),
    )
    return TrainSample(sample=sample, advantages=random.normal(size=length).astype(np.float32))


@given(lengths=st.lists(st.integers(0, 30), max_size=6), version=st.integers(0, 1 << 40), seed=st.integers(0, 99))
def test_a_batch_comes_back_bit_for_bit(lengths: list[int], version: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    batch = TrainBatch(samples=tuple(_sample(random, length) for length in lengths), policy_version=version)

    number, request = decode_request(encode(pack_batch(batch), 7))

    assert number == 7
    assert isinstance(request, TrainStep)
    back = unpack_batch(request)
    assert back.policy_version == version
    for ours, theirs in zip(batch.samples, back.samples, strict=True):
        np.testing.assert_array_equal(ours.advantages, theirs.advantages)
        for name in ("token_ids", "loss_mask", "behavior_logprobs", "token_versions", "turn_index", "temperatures"):
            sent, received = getattr(ours.sample, name), getattr(theirs.sample, name)
            np.testing.assert_array_equal(sent, received)
            assert sent.dtype == received.dtype


def test_the_values_of_a_critic_travel_with_all_samples_or_with_none() -> None:
    random = np.random.default_rng(0)
    one, other = _sample(random, 5), _sample(random, 3)
    numbers = np.arange(5, dtype=np.float32)
    valued = [replace(item, values=numbers[:n], value_targets=-numbers[:n]) for item, n in ((one, 5), (other, 3))]
    back = unpack_batch(pack_batch(TrainBatch(samples=tuple(valued), policy_version=1)))
    for sent, received in zip(valued, back.samples, strict=True):
        np.testing.assert_array_equal(received.values, sent.values)
        np.testing.assert_array_equal(received.value_targets, sent.value_targets)
    assert unpack_batch(pack_batch(TrainBatch(samples=(one,), policy_version=1))).samples[0].values is None
    with pytest.raises(InvariantError, match="1 of 2 samples have no values or targets"):
        pack_batch(TrainBatch(samples=(valued[0], other), policy_version=1))


@given(lengths=st.lists(st.integers(0, 9), max_size=5))
def test_logprobs_of_each_sequence_find_their_way_back(lengths: list[int]) -> None:
    sequences = [np.arange(length, dtype=np.int32) for length in lengths]

    unpacked, temperatures = unpack_sequences(pack_sequences(sequences, [0.5] * len(sequences)))
    assert [ids.tolist() for ids in unpacked] == [ids.tolist() for ids in sequences]
    assert [each.tolist() for each in temperatures] == [[0.5] * length for length in lengths]
    joined = np.concatenate([np.empty(0, np.float32), *(np.full(max(0, n - 1), n, np.float32) for n in lengths)])
    split = split_logprobs(LogprobsReply(pack_float32(joined)), sequences)
    assert [part.tolist() for part in split] == [[float(n)] * max(0, n - 1) for n in lengths]


@given(lengths=st.dictionaries(st.integers(0, 9), st.integers(0, 9), max_size=5))
def test_the_report_of_a_step_comes_back_with_the_log_probs_of_its_samples(lengths: dict[int, int]) -> None:
    found = {at: np.linspace(-1, 0, length, dtype=np.float32) for at, length in lengths.items()}
    report = StepReport(metrics={"loss": 0.5}, skipped=None, proximal_logprobs=found)
    _, reply = decode_reply(encode(pack_report(report)))
    assert isinstance(reply, Stepped)
    back = unpack_report(reply)
    assert (back.metrics, back.skipped, [*back.proximal_logprobs]) == (report.metrics, None, [*found])
    for at, values in found.items():
        np.testing.assert_array_equal(back.proximal_logprobs[at], values)


def test_arrays_of_unequal_lengths_are_refused_before_they_are_sent() -> None:
    item = _sample(np.random.default_rng(0), 5)
    batch = TrainBatch(samples=(TrainSample(sample=item.sample, advantages=np.zeros(4, np.float32)),), policy_version=0)

    with pytest.raises(InvariantError, match=r"sample 0 of 5 tokens has arrays of lengths \[5, 5, 5, 5, 5, 4\]"):
        pack_batch(batch)


@pytest.mark.parametrize("body", [b"", b"garbage", b"\x81\xa4type\xa4Eval", encode(Failed("TrainError", "x"))])
def test_what_is_not_a_request_is_refused(body: bytes) -> None:
    with pytest.raises(InvariantError, match="not a request to the trainer worker"):
        decode_request(body)


def test_a_request_is_not_a_reply() -> None:
    with pytest.raises(InvariantError, match="not a reply of the trainer worker"):
        decode_reply(encode(Publish(1, "x")))


@pytest.mark.parametrize(
    ("lengths", "ids", "message"),
    [
        (pack_int32([3]), pack_int32([1, 2]), "expected 3 elements of <i4, got 8 bytes"),
        (pack_int32([-1, 3]), pack_int32([1, 2]), "negative length -1"),
        (pack_float32(np.ones(1, np.float32)), pack_int32([1]), "expected an array of <i4, got <f4"),
        (Array("<i4", b"abc"), pack_int32([1]), "expected whole elements of <i4, got 3 bytes"),
    ],
)
def test_lengths_that_contradict_the_arrays_are_refused(lengths: Array, ids: Array, message: str) -> None:
    request = pack_sequences([])

    with pytest.raises(InvariantError, match=message):
        unpack_sequences(type(request)(lengths=lengths, token_ids=ids, temperatures=request.temperatures))


def test_a_reply_with_too_few_logprobs_is_refused() -> None:
    with pytest.raises(InvariantError, match="expected 2 elements"):
        split_logprobs(LogprobsReply(pack_float32(np.zeros(1, np.float32))), [np.arange(3, dtype=np.int32)])
