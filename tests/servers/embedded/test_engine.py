"""The embedded engine: exact log-probs through interruptions, prefix reuse, stops, control calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.errors import RequestRejected
from agentrl.servers.embedded.engine import EmbeddedEngine
from agentrl.servers.engine import EngineSampling, RequestProgress
from tests.support.embedded import Collector, ReferenceModel, generate, request, running
from tests.support.tiny import tiny_checkpoint

VOCAB = 357
EOS = 350
TOLERANCE = 1e-5
SPREAD = 0.15  # float32 forward passes of sharper models differ by 1e-5 themselves, HF's from a float64 one, too


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three checkpoints of one shape and different weights."""
    root = tmp_path_factory.mktemp("versions")
    return [tiny_checkpoint(root / str(seed), seed=seed, spread=SPREAD) for seed in range(3)]


@pytest.fixture(scope="module")
def references(versions: list[Path]) -> list[ReferenceModel]:
    return [ReferenceModel(path) for path in versions]


def sampling(max_new_tokens: int = 16, **fields: object) -> EngineSampling:
    values: dict[str, object] = {"ignore_eos": True, **fields}
    return EngineSampling(max_new_tokens=max_new_tokens, **values)  # pyright: ignore[reportArgumentType] - test values


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, EOS, length).tolist()


def spans(progress: RequestProgress) -> list[tuple[int, int, int]]:
    ends = [start for _, start in progress.versions[1:]] + [len(progress.output_ids)]
    return [(int(version), start, end) for (version, start), end in zip(progress.versions, ends, strict=True)]


def worst_difference(progress: RequestProgress, references: Sequence[ReferenceModel]) -> float:
    """Return the largest |log-prob - recompute| over the output, each token judged under the version its span names."""
    ids = [*progress.request.input_ids, *progress.output_ids]
    base = len(progress.request.input_ids)
    temperature = progress.request.sampling.temperature or 1.0
    covered = 0
    worst = 0.0
    for version, start, end in spans(progress):
        assert start == covered
        covered = end
        judged = references[version % len(references)].logprobs(ids, temperature)[base + start : base + end]
        worst = max(worst, float(np.abs(judged - progress.output_logprobs[start:end]).max(initial=0)))
    assert covered == len(progress.output_ids) == len(progress.output_logprobs)
    return worst


async def turns(count: int) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("seed", range(4))
async def test_every_token_equals_a_recompute_under_its_version_through_random_interruptions(
    seed: int, versions: list[Path], references: list[ReferenceModel]
) -> None:
    rng = np.random.default_rng(seed)
    async with running(versions[0], max_running_requests=6) as engine:
        sinks: list[Collector] = []
        version = 0
        for step in range(30):
            for _ in range(int(rng.integers(0, 3))):
                sinks.append(Collector())
                shared = prompt(99, 40)[: int(rng.integers(0, 40))]
                ids = [*shared, *prompt(len(sinks), int(rng.integers(1, 30)))]
                chosen = sampling(int(rng.integers(1, 60)), temperature=float(rng.choice([0.0, 0.7, 1.0, 1.3])))
                engine.submit(request(f"{len(sinks):032x}", ids, chosen), sinks[-1])
            await turns(int(rng.integers(1, 8)))
            if step % 2:
                await engine.pause("retract")
                await turns(int(rng.integers(0, 3)))
                if rng.random() < 0.8:
                    version += 1
                    reply = await engine.update_weights(
                        str(versions[version % 3]),
                        weight_version=str(version),
                        flush_cache=bool(rng.integers(0, 2)),
                        abort_all_requests=False,
                    )
                    assert reply.success, reply.message
                await engine.resume()
        results = [await sink.wait() for sink in sinks]
    assert sum(len(spans(result)) > 1 for result in results) > 5
    assert sum(result.num_retractions > 0 for result in results) > 5
    for result in results:
        assert len(result.output_ids) == result.request.sampling.max_new_tokens
        assert result.finish is not None
        assert result.finish.kind == "length"
        assert worst_difference(result, references) < TOLERANCE


async def test_tokens_do_not_change_when_the_run_is_interrupted_under_the_same_weights(versions: list[Path]) -> None:
    requests = [request(f"{i:032x}", prompt(i, 5 + 3 * i), sampling(40, seed=i)) for i in range(8)]
    async with running(versions[0]) as engine:
        calm = await generate(engine, *requests)
    async with running(versions[0], max_running_requests=3) as engine:
        sinks = [Collector() for _ in requests]
        for one, sink in zip(requests, sinks, strict=True):
            engine.submit(one, sink)
        for index in range(12):
            await turns(3)
            await engine.pause("in_place" if index % 2 else "retract")
            if not index % 2:
                assert await engine.flush_cache(0)
            await engine.resume()
        stormy = [await sink.wait() for sink in sinks]
    for one, other in zip(calm, stormy, strict=True):
        assert one.output_ids == other.output_ids
        assert np.allclose(one.output_logprobs, other.output_logprobs, atol=TOLERANCE)


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(versions: list[Path]) -> None:
    chosen = sampling(24, seed=7, top_p=0.9, top_k=50)
    async with running(versions[0]) as engine:
        (alone,) = await generate(engine, request("a" * 32, prompt(1, 12), chosen))
        crowd = [request(f"{i:032x}", prompt(i + 50, 4 + i), sampling(10 + i)) for i in range(11)]
        *_, crowded = await generate(engine, *crowd, request("b" * 32, prompt(1, 12), chosen))
        (other,) = await generate(engine, request("c" * 32, prompt(1, 12), sampling(24, seed=8, top_p=0.9, top_k=50)))
    assert alone.output_ids == crowded.output_ids
    assert alone.output_ids != other.output_ids


async def test_greedy_tokens_are_those_of_transformers(versions: list[Path], references: list[ReferenceModel]) -> None:
    async with running(versions[0]) as engine:
        results = await generate(
            engine, *(request(f"{i:032x}", prompt(i, 4 + 9 * i), sampling(20, temperature=0.0)) for i in range(5))
        )
    for result in results:
        ids = list(result.request.input_ids)
        for token in result.output_ids:
            assert token == int(references[0].logits(ids)[-1].argmax())
            ids.append(token)
        assert worst_difference(result, references[:1]) < TOLERANCE


async def test_rows_stay_apart_while_sequences_come_and_go(versions: list[Path], references: list[ReferenceModel]) -> None:
    """Moving rows together must move their keys: sampling from a neighbour's cache looks merely weak."""
    async with running(versions[0], max_running_requests=16) as engine:
        requests = [request(f"{i:032x}", prompt(i, 3 + (i * 7) % 23), sampling(1 + (i * 13) % 50)) for i in range(80)]
        results = await generate(engine, *requests)
    assert max(worst_difference(result, references[:1]) for result in results) < TOLERANCE


async def test_a_second_turn_reuses_the_first_ones_cache(versions: list[Path], references: list[ReferenceModel]) -> None:
    async with running(versions[0]) as engine:
        (first,) = await generate(engine, request("a" * 32, prompt(1, 30), sampling(10)))
        assert first.cached_tokens == 0
        history = [*first.request.input_ids, *first.output_ids]
        (second,) = await generate(engine, request("b" * 32, [*history, *prompt(2, 9)], sampling(10)))
        assert second.cached_tokens == len(history) - 1
        assert worst_difference(second, references[:1]) < TOLERANCE
        await engine.flush_cache(0)
        (third,) = await generate(engine, request("c" * 32, [*history, *prompt(3, 9)], sampling(10)))
        assert third.cached_tokens == 0


async def test_a_group_computes_its_shared_prompt_once(versions: list[Path], references: list[ReferenceModel]) -> None:
    async with running(versions[0]) as engine:
        shared = prompt(5, 120)
        results = await generate(engine, *(request(f"{i:032x}", shared, sampling(20)) for i in range(8)))
    assert sorted(result.cached_tokens for result in results) == [0, *[119] * 7]
    assert len({tuple(result.output_ids) for result in results}) > 1
    assert max(worst_difference(result, references[:1]) for result in results) < TOLERANCE


async def test_the_cache_is_never_shared_across_weights(versions: list[Path], references: list[ReferenceModel]) -> None:
    ids = prompt(3, 60)
    async with running(versions[0]) as engine:
        await generate(engine, request("a" * 32, ids, sampling(8)))
        sink = Collector()
        engine.submit(request("b" * 32, ids, sampling(80), stream=True), sink)
        await sink.started.wait()
        await engine.pause("in_place")
        reply = await engine.update_weights(
            str(versions[1]), weight_version="1", flush_cache=False, abort_all_requests=False
        )
        assert reply.success
        await engine.resume()
        (fresh,) = await generate(engine, request("c" * 32, ids, sampling(8)))
        mixed = await sink.wait()
        assert (fresh.cached_tokens, worst_difference(fresh, references[:2]) < TOLERANCE) == (0, True)
        assert [version for version, _ in mixed.versions] == ["0", "1"]
        assert mixed.num_retractions == 0
        # What the mixed row computed is of no single version: nobody may find it.
        (after,) = await generate(engine, request("d" * 32, [*ids, *mixed.output_ids], sampling(4)))
        assert after.cached_tokens <= 60
        assert worst_difference(after, references[:2]) < TOLERANCE


async def test_prompt_scores_are_those_of_transformers_across_chunks(
    versions: list[Path], references: list[ReferenceModel]
) -> None:
    ids = prompt(4, 1300)
    expected = references[0].logprobs(ids)
    async with running(versions[0]) as engine:
        for start in (0, 700, 1299):
            (result,) = await generate(engine, request("a" * 32, ids, sampling(0), logprob_start_len=start))
            assert result.input_logprobs is not None
            assert result.output_ids == []
            assert result.input_logprobs[0] is None
            got = np.array(result.input_logprobs[1:], np.float64)
            assert got.shape == (1300 - start - 1,)
            assert np.abs(got - expected[start + 1 :]).max(initial=0) < 2 * TOLERANCE


async def test_output_ends_at_the_first_stop(versions: list[Path]) -> None:
    async with running(versions[0]) as engine:
        (free,) = await generate(engine, request("a" * 32, prompt(1, 8), sampling(30, seed=3)))
        ids = free.output_ids
        token = ids[9]
        (by_id,) = await generate(
            engine, request("b" * 32, prompt(1, 8), sampling(30, seed=3, ignore_eos=False, stop_token_ids=(token, EOS)))
        )
        assert by_id.finish is not None
        assert (by_id.finish.kind, by_id.finish.matched) == ("stop", token)
        assert by_id.output_ids == ids[: ids.index(token) + 1]
        word = engine.decode(ids, skip_special_tokens=False)[6:9]
        (by_text,) = await generate(engine, request("c" * 32, prompt(1, 8), sampling(30, seed=3, stop=("\0\0", word))))
        assert by_text.finish is not None
        assert (by_text.finish.kind, by_text.finish.matched) == ("stop", word)
        assert by_text.output_ids == ids[: len(by_text.output_ids)]
        assert word in engine.decode(by_text.output_ids, skip_special_tokens=False)
        assert word not in engine.decode(by_text.output_ids[:-1], skip_special_tokens=False)


async def test_end_of_sequence_stops_unless_ignored_and_not_before_the_minimum(versions: list[Path]) -> None:
    async with running(versions[0]) as engine:
        requests = [
            request(f"{i:032x}", prompt(i, 6), sampling(400, seed=i, temperature=4.0, ignore_eos=False)) for i in range(12)
        ]
        results = await generate(engine, *requests)
        stopped = [result for result in results if result.finish is not None and result.finish.kind == "stop"]
        assert stopped
        for result in stopped:
            assert result.finish is not None
            assert (result.finish.matched, result.output_ids.index(EOS)) == (EOS, len(result.output_ids) - 1)
        shortest = min(stopped, key=lambda result: len(result.output_ids))
        held = sampling(
            400, seed=shortest.request.sampling.seed, temperature=4.0, ignore_eos=False,
            min_new_tokens=len(shortest.output_ids) + 3,
        )  # fmt: skip
        (longer,) = await generate(engine, request("d" * 32, shortest.request.input_ids, held))
        assert len(longer.output_ids) >= held.min_new_tokens


async def test_penalties_follow_their_formulas(versions: list[Path], references: list[ReferenceModel]) -> None:
    chosen = sampling(25, temperature=0.8, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3)
    plain = request("f" * 32, prompt(9, 30), sampling(25))
    async with running(versions[0]) as engine:
        result, other = await generate(engine, request("a" * 32, prompt(1, 10), chosen), plain)
    assert worst_difference(other, references[:1]) < TOLERANCE
    ids = [*result.request.input_ids]
    for index, token in enumerate(result.output_ids):
        logits = references[0].logits(ids)[-1].clone()
        counts = torch.bincount(torch.tensor(result.output_ids[:index], dtype=torch.int64), minlength=VOCAB)
        logits -= 0.7 * counts + 0.4 * (counts > 0)
        seen = counts > 0
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.3, logits[seen] * 1.3)
        expected = torch.log_softmax(logits / 0.8, -1)[token]
        assert abs(float(expected) - result.output_logprobs[index]) < TOLERANCE
        ids.append(token)


async def test_penalties_survive_a_retraction(versions: list[Path]) -> None:
    one = request("a" * 32, prompt(1, 10), sampling(60, seed=1, presence_penalty=1.5, repetition_penalty=1.2))
    async with running(versions[0]) as engine:
        (calm,) = await generate(engine, one)
        sink = Collector()
        engine.submit(one, sink)
        await turns(5)
        await engine.pause("retract")
        await engine.flush_cache(0)
        await engine.resume()
        stormy = await sink.wait()
    assert calm.output_ids == stormy.output_ids


async def test_requests_beyond_the_limit_wait_their_turn(versions: list[Path]) -> None:
    async with running(versions[0], max_running_requests=2) as engine:
        sinks = [Collector() for _ in range(5)]
        for index, sink in enumerate(sinks):
            engine.submit(request(f"{index:032x}", prompt(index, 4), sampling(300)), sink)
        await turns(3)
        assert (engine.load.num_running, engine.load.num_waiting) == (2, 3)
        for sink in sinks:
            await sink.wait()
        assert (engine.load.num_running, engine.load.num_waiting) == (0, 0)


async def test_requests_that_arrive_at_a_pause_are_held_and_served_after_it(versions: list[Path]) -> None:
    async with running(versions[0]) as engine:
        await engine.pause("retract")
        sink = Collector()
        engine.submit(request("a" * 32, prompt(1, 4), sampling(4)), sink)
        await turns(20)
        assert sink.finishes == 0
        assert (engine.load.num_waiting, engine.load.paused) == (1, "retract")
        await engine.resume()
        assert len((await sink.wait()).output_ids) == 4


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_abort_reaches_paused_requests_at_once_with_all_their_tokens(mode: str, versions: list[Path]) -> None:
    async with running(versions[0]) as engine:
        sink, held = Collector(), Collector()
        engine.submit(request("a" * 32, prompt(1, 4), sampling(2000), stream=True), sink)
        await sink.started.wait()
        await turns(10)
        await engine.pause("in_place" if mode == "in_place" else "retract")
        engine.submit(request("b" * 32, prompt(1, 4), sampling(10)), held)
        assert engine.abort("a") == 1
        assert engine.abort("b" * 32, exact=True) == 1
        assert engine.abort("c") == 0
        assert engine.abort("") == 0
        result = await sink.wait()
        assert result.finish is not None
        assert result.finish.kind == "abort"
        assert len(result.output_ids) == sink.lengths[-1] > 1
        assert (await held.wait()).output_ids == []
        await engine.pause("abort")  # at SGLang this deadlocks
        assert await engine.flush_cache(0)
        await engine.resume()
        assert len((await generate(engine, request("a" * 32, prompt(1, 4), sampling(3))))[0].output_ids) == 3


async def test_abort_matches_by_prefix_unless_exact(versions: list[Path]) -> None:
    async with running(versions[0]) as engine:
        sinks = {rid: Collector() for rid in ("ep-1", "ep-10", "ep-2")}
        for rid, sink in sinks.items():
            engine.submit(request(rid, prompt(1, 4), sampling(3000)), sink)
        with pytest.raises(RequestRejected, match="duplicate request id 'ep-1'"):
            engine.submit(request("ep-1", prompt(1, 4), sampling(1)), Collector())
        assert engine.abort("ep-1", exact=True) == 1
        assert engine.abort("ep-1") == 1
        assert engine.abort(abort_all=True) == 1
        for sink in sinks.values():
            await sink.wait()


async def test_flush_is_refused_while_requests_run_or_are_paused_in_place(versions: list[Path]) -> None:
    async with running(versions[0]) as engine:
        sink = Collector()
        engine.submit(request("a" * 32, prompt(1, 4), sampling(1500), stream=True), sink)
        await sink.started.wait()
        assert not await engine.flush_cache(0)
        await engine.pause("in_place")
        assert not await engine.flush_cache(0)
        refused = await engine.update_weights(
            str(versions[1]), weight_version="1", flush_cache=True, abort_all_requests=False
        )
        assert not refused.success
        assert "weights are unchanged" in refused.message
        assert engine.info.weight_version == "0"
        await engine.pause("retract")
        assert await engine.flush_cache(0)
        await engine.resume()
        await turns(2)
        assert await engine.flush_cache(300.0)
        assert sink.finishes == 1


async def test_an_update_without_a_pause_waits_for_running_requests(
    versions: list[Path], references: list[ReferenceModel]
) -> None:
    async with running(versions[0]) as engine:
        sink, later = Collector(), Collector()
        engine.submit(request("a" * 32, prompt(1, 4), sampling(100), stream=True), sink)
        await sink.started.wait()
        async with anyio.create_task_group() as group:
            group.start_soon(update, engine, versions[1], "1")
            sent = False
            while engine.load.num_running:
                if sink.progress_calls >= 50 and not sent:
                    engine.submit(request("b" * 32, prompt(2, 4), sampling(5)), later)
                    sent = True
                await anyio.lowlevel.checkpoint()
        assert [version for version, _ in (await sink.wait()).versions] == ["0"]
        if later.result is not None or engine.load.num_waiting:
            assert worst_difference(await later.wait(), references) < TOLERANCE
        assert engine.info.weight_version == "1"
        assert engine.info.model_path == str(versions[1])


async def test_a_waiting_update_is_released_by_a_pause(versions: list[Path], references: list[ReferenceModel]) -> None:
    async with running(versions[0]) as engine:
        sink = Collector()
        engine.submit(request("a" * 32, prompt(1, 4), sampling(3000), stream=True), sink)
        await sink.started.wait()
        async with anyio.create_task_group() as group:
            group.start_soon(update, engine, versions[1], "1")
            await turns(30)
            await engine.pause("retract")
        assert engine.info.weight_version == "1"
        await engine.resume()
        await turns(20)
        engine.abort(abort_all=True)
        result = await sink.wait()
        assert [version for version, _ in result.versions] == ["0", "1"]
        assert worst_difference(result, references) < TOLERANCE


async def update(engine: EmbeddedEngine, path: Path, version: str) -> None:
    with anyio.fail_after(300):
        reply = await engine.update_weights(str(path), weight_version=version, flush_cache=True, abort_all_requests=False)
    assert reply.success, reply.message


async def test_weights_that_cannot_be_used_change_nothing(
    versions: list[Path], references: list[ReferenceModel], tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    tensors = load_file(versions[1] / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, bad / "model.safetensors")
    async with running(versions[0]) as engine:
        before = engine.checksums()
        for path, message in ((bad, "has no tensor model.norm.weight"), (tmp_path / "none", "no directory")):
            reply = await engine.update_weights(str(path), weight_version="9", flush_cache=True, abort_all_requests=True)
            assert not reply.success
            assert message in reply.message
        assert (engine.checksums(), engine.info.weight_version) == (before, "0")
        (result,) = await generate(engine, request("a" * 32, prompt(1, 4), sampling(4)))
        assert worst_difference(result, references[:1]) < TOLERANCE


async def test_renaming_the_weights_splits_the_span_but_keeps_the_cache(versions: list[Path]) -> None:
    async with running(versions[0]) as engine:
        sink = Collector()
        engine.submit(request("a" * 32, prompt(1, 40), sampling(200), stream=True), sink)
        await sink.started.wait()
        await engine.set_weight_version("renamed", abort_all_requests=False)
        result = await sink.wait()
        assert [version for version, _ in result.versions] == ["0", "renamed"]
        (again,) = await generate(engine, request("b" * 32, prompt(1, 40), sampling(2)))
        assert again.cached_tokens == 39


async def test_logits_that_are_not_finite_abort_the_request_and_spare_the_others(
    versions: list[Path], references: list[ReferenceModel], tmp_path: Path
) -> None:
    wild = tmp_path / "wild"
    tiny_checkpoint(wild)
    tensors = load_file(wild / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 3e38)
    save_file(tensors, wild / "model.safetensors")
    async with running(wild) as engine:
        (result,) = await generate(engine, request("a" * 32, prompt(1, 4), sampling(4)))
        assert result.finish is not None
        assert (result.finish.kind, result.output_ids, result.versions) == ("abort", [], [])
        await update(engine, versions[0], "0")
        (result,) = await generate(engine, request("b" * 32, prompt(1, 4), sampling(4)))
        assert worst_difference(result, references[:1]) < TOLERANCE


async def test_streaming_reports_each_step_and_nothing_after_the_end(versions: list[Path]) -> None:
    async with running(versions[0]) as engine:
        sink = Collector()
        engine.submit(request("a" * 32, prompt(1, 4), sampling(10), stream=True), sink)
        await sink.wait()
        await turns(5)
    assert sink.lengths == list(range(1, 10))


async def test_cancelling_the_engine_finishes_what_is_in_flight_as_aborted(versions: list[Path]) -> None:
    sinks = [Collector() for _ in range(3)]
    async with running(versions[0], max_running_requests=2) as engine:
        for index, sink in enumerate(sinks):
            engine.submit(request(f"{index:032x}", prompt(1, 4), sampling(3000), stream=True), sink)
        await sinks[0].started.wait()
    for sink in sinks:
        assert (await sink.wait()).finish is not None


async def test_a_cancelled_update_flush_or_pause_leaves_the_engine_serving(
    versions: list[Path], references: list[ReferenceModel]
) -> None:
    async with running(versions[0]) as engine:
        sink = Collector()
        engine.submit(request("a" * 32, prompt(1, 4), sampling(600), stream=True), sink)
        await sink.started.wait()
        for delay in range(0, 40, 5):
            async with anyio.create_task_group() as group:
                group.start_soon(update, engine, versions[1], "1")
                await turns(delay)
                group.cancel_scope.cancel()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await engine.flush_cache(30.0)
        for call in (lambda: engine.pause("retract"), engine.resume):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await call()
        result = await sink.wait()
        assert len(result.output_ids) == 600
        assert worst_difference(result, references) < TOLERANCE
        assert len((await generate(engine, request("b" * 32, prompt(1, 4), sampling(3))))[0].output_ids) == 3


async def test_sequences_grow_past_the_first_capacity_of_the_cache(
    versions: list[Path], references: list[ReferenceModel]
) -> None:
    async with running(versions[0], max_context_tokens=900) as engine:
        results = await generate(
            engine,
            request("a" * 32, prompt(1, 100), sampling(800)),
            request("b" * 32, prompt(2, 200), sampling(100)),
        )
    assert [len(result.output_ids) for result in results] == [800, 100]
    assert max(worst_difference(result, references[:1]) for result in results) < 2 * TOLERANCE


async def test_requests_that_cannot_be_computed_are_refused(versions: list[Path]) -> None:
    async with running(versions[0], max_context_tokens=64) as engine:
        for ids in ([], [VOCAB], [-1]):
            with pytest.raises(RequestRejected, match=f"ids below {VOCAB}"):
                engine.submit(request("a" * 32, ids, sampling(1)), Collector())
        with pytest.raises(RequestRejected, match="exceed the context of 64"):
            engine.submit(request("a" * 32, prompt(1, 60), sampling(5)), Collector())
        assert len((await generate(engine, request("a" * 32, prompt(1, 60), sampling(4))))[0].output_ids) == 4


async def test_stop_strings_need_a_tokenizer(versions: list[Path], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((versions[0] / name).read_bytes())
    async with running(tmp_path) as engine:
        with pytest.raises(RequestRejected, match="has no tokenizer"):
            engine.submit(request("a" * 32, [1], sampling(1, stop=("x",))), Collector())
        with pytest.raises(RequestRejected, match="has no tokenizer"):
            engine.encode("text")
        assert engine.decode([1, 2], skip_special_tokens=True) == ""
