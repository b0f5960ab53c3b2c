"""Every family through the embedded engine: log-probs of a whole pass, through chunks, crowds and interruptions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from agentrl.servers.embedded.engine import EmbeddedEngine
from agentrl.servers.engine import EngineSampling, RequestProgress
from agentrl.weights.tensors import held_checksums
from tests.support.embedded import Collector, ReferenceModel, generate, request, running
from tests.support.families import FAMILIES, HELD, WINDOW, family_checkpoint

VOCAB = 350
TOLERANCE = 1e-5


@pytest.fixture
def anyio_backend() -> str:
    """The engine runs on both loops in its own tests."""
    return "asyncio"


@pytest.fixture(scope="module", params=HELD)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def versions(family: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one shape and different weights."""
    root = tmp_path_factory.mktemp(family)
    return [family_checkpoint(root / str(seed), family, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def references(versions: list[Path]) -> list[ReferenceModel]:
    return [ReferenceModel(path) for path in versions]


def sampling(max_new_tokens: int, **fields: object) -> EngineSampling:
    values: dict[str, object] = {"ignore_eos": True, **fields}
    return EngineSampling(max_new_tokens=max_new_tokens, **values)  # pyright: ignore[reportArgumentType] - test values


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def worst_difference(progress: RequestProgress, references: Sequence[ReferenceModel]) -> float:
    """Return the largest |log-prob - recompute| of the output, each token under the version that sampled it."""
    ids, base = [*progress.request.input_ids, *progress.output_ids], len(progress.request.input_ids)
    ends = [start for _, start in progress.versions[1:]] + [len(progress.output_ids)]
    worst = 0.0
    for (version, start), end in zip(progress.versions, ends, strict=True):
        judged = references[int(version) % len(references)].logprobs(ids)[base + start : base + end]
        worst = max(worst, float(np.abs(judged - progress.output_logprobs[start:end]).max(initial=0)))
    return worst


async def update(engine: EmbeddedEngine, path: Path, version: str) -> None:
    reply = await engine.update_weights(str(path), weight_version=version, flush_cache=False, abort_all_requests=False)
    assert reply.success, reply.message


async def test_lengths_of_a_crowd_and_chunks_of_a_prompt_change_no_logprob(
    versions: list[Path], references: list[ReferenceModel]
) -> None:
    async with running(versions[0], max_running_requests=5) as engine:
        assert engine.info.architectures == (type(references[0].model).__name__,)
        lengths = [1, 3, 2 * WINDOW, 5 * WINDOW + 1, 90, 4, 17, 30]
        requests = [request(f"{i:032x}", prompt(i, n), sampling(2 + (i * 13) % 40)) for i, n in enumerate(lengths)]
        results = await generate(engine, *requests)
        assert max(worst_difference(result, references) for result in results) < TOLERANCE
        ids = prompt(50, 450)
        (scored,) = await generate(engine, request("f" * 32, ids, sampling(0), logprob_start_len=0))
    assert scored.input_logprobs is not None
    found = np.array(scored.input_logprobs[1:], np.float64)
    assert np.abs(found - references[0].logprobs(ids)[1:]).max() < 2 * TOLERANCE


async def test_a_group_shares_its_prompt_and_a_second_turn_continues_the_first(
    family: str, versions: list[Path], references: list[ReferenceModel]
) -> None:
    async with running(versions[0]) as engine:
        shared = prompt(5, 60)
        group = await generate(engine, *(request(f"{i:032x}", shared, sampling(12)) for i in range(4)))
        # A recurrent state is of one length, and the first member's has gone on by the time that others could take it.
        reused = [0, 0, 0, 0] if FAMILIES[family].recurrent else [0, 59, 59, 59]
        assert sorted(result.cached_tokens for result in group) == reused
        history = [*shared, *group[1].output_ids]
        (second,) = await generate(engine, request("b" * 32, [*history, *prompt(2, 9)], sampling(10)))
        assert second.cached_tokens == len(history) - 1
    assert max(worst_difference(result, references) for result in [*group, second]) < TOLERANCE


async def steps(sinks: Sequence[Collector], count: int) -> None:
    """Wait until `count` more tokens have come, or nothing is left to come."""

    def told() -> int:
        return sum(sink.progress_calls for sink in sinks)

    wanted = told() + count
    with anyio.fail_after(300):
        while told() < wanted and not all(sink.finishes for sink in sinks):
            await anyio.lowlevel.checkpoint()


async def test_every_token_equals_a_recompute_under_its_version_through_interruptions(
    versions: list[Path], references: list[ReferenceModel]
) -> None:
    rng = np.random.default_rng(1)
    async with running(versions[0], max_running_requests=4) as engine:
        sinks: list[Collector] = []
        version = 0
        for step in range(6):
            for length in rng.integers(1, 70, 2).tolist():
                sinks.append(Collector())
                ids = [*prompt(99, int(rng.integers(1, 30))), *prompt(len(sinks), length)]
                one = request(f"{len(sinks):032x}", ids, sampling(int(rng.integers(10, 40))), stream=True)
                engine.submit(one, sinks[-1])
            await steps(sinks, int(rng.integers(3, 20)))
            # In place, sequences keep their keys: only under the same weights are they those of a recompute.
            await engine.pause("in_place" if step % 3 == 1 else "retract")
            if step % 3 != 1:
                version += 1
                await update(engine, versions[version % 2], str(version))
            await engine.resume()
        results = [await sink.wait() for sink in sinks]
    assert sum(len(result.versions) > 1 for result in results) > 2
    assert max(worst_difference(result, references) for result in results) < TOLERANCE


async def test_a_discarded_step_leaves_sequences_as_they_were(versions: list[Path]) -> None:
    requests = [request(f"{i:032x}", prompt(i, 5 + 9 * i), sampling(20, seed=i), stream=True) for i in range(4)]
    async with running(versions[0]) as engine:
        calm = await generate(engine, *requests)
    async with running(versions[0], max_running_requests=3) as engine:
        sinks = [Collector() for _ in requests]
        for one, sink in zip(requests, sinks, strict=True):
            engine.submit(one, sink)
        for index in range(6):
            await steps(sinks, 4)
            await engine.pause("in_place" if index % 2 else "retract")
            await engine.resume()
        stormy = [await sink.wait() for sink in sinks]
    for one, other in zip(calm, stormy, strict=True):
        assert one.output_ids == other.output_ids
        assert np.allclose(one.output_logprobs, other.output_logprobs, atol=TOLERANCE)


async def test_digests_are_those_of_the_files_and_of_another_version_after_its_update(versions: list[Path]) -> None:
    async with running(versions[0]) as engine:
        assert engine.checksums() == held_checksums(versions[0] / "model.safetensors", "float32")
        await update(engine, versions[1], "1")
        assert engine.checksums() == held_checksums(versions[1] / "model.safetensors", "float32")


async def test_weights_that_cannot_be_used_change_nothing(versions: list[Path], tmp_path: Path) -> None:
    tensors = load_file(versions[1] / "model.safetensors")
    name = sorted(name for name in tensors if name.endswith("norm.weight"))[0]
    bad = {
        "lacks": ({key: value for key, value in tensors.items() if key != name}, rf"missing_keys \['{name}'\]"),
        "shape": ({**tensors, name: tensors[name][:5].clone()}, rf"mismatched_keys \['{name}'\]"),
        "nan": ({**tensors, name: tensors[name] * float("nan")}, rf"{name} holds values that are not finite"),
    }
    async with running(versions[0]) as engine:
        before = engine.checksums()
        for kind, (changed, message) in bad.items():
            (tmp_path / kind).mkdir()
            save_file(changed, tmp_path / kind / "model.safetensors", metadata={"format": "pt"})
            reply = await engine.update_weights(
                str(tmp_path / kind), weight_version="1", flush_cache=True, abort_all_requests=False
            )
            assert not reply.success
            with pytest.raises(AssertionError, match=message):
                raise AssertionError(reply.message)
        assert (engine.checksums(), engine.info.weight_version) == (before, "0")


async def test_bfloat16_samples_near_the_logprobs_of_float32(versions: list[Path], references: list[ReferenceModel]) -> None:
    async with running(versions[0], dtype="bfloat16") as engine:
        results = await generate(engine, *(request(f"{i:032x}", prompt(i, 9 * i + 3), sampling(20)) for i in range(4)))
        assert engine.checksums() == held_checksums(versions[0] / "model.safetensors", "bfloat16")
    for result in results:
        ids = [*result.request.input_ids, *result.output_ids]
        judged = references[0].logprobs(ids)[len(result.request.input_ids) :]
        assert np.abs(judged - result.output_logprobs).mean() < 0.05


async def test_an_adapter_beside_the_weights_is_refused_with_the_fix(versions: list[Path], tmp_path: Path) -> None:
    async with running(versions[0]) as engine:
        reply = await engine.adapters.load("one", str(tmp_path))
        assert engine.info.max_adapters == 0
    assert not reply.success
    assert "set sync.adapter: merged" in reply.error
