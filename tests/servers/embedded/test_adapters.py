"""The embedded engine computes LoRA adapters as PEFT's formula says: several in one batch, each on its own requests."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest

from agentrl.errors import RequestRejected
from agentrl.servers.embedded.engine import EmbeddedEngine
from agentrl.servers.engine import EngineRequest, EngineSampling, RequestProgress
from agentrl.types import Float32Array, Int32Array
from agentrl.weights.peft_files import ADAPTER_CONFIG_FILE, read_adapter
from tests.support.adapters import make_adapter, merged_logprobs
from tests.support.embedded import Collector, running
from tests.support.tiny import Architecture, tiny_checkpoint

pytestmark = pytest.mark.anyio
PROMPT = list(range(3, 40))


def start(engine: EmbeddedEngine, adapter: str | None, rid: str, *, tokens: int = 12, score: bool = False) -> Collector:
    sink = Collector()
    sampling = EngineSampling(max_new_tokens=tokens, ignore_eos=True, seed=len(rid))
    start_len = 0 if score else -1
    request = EngineRequest(rid=rid, input_ids=PROMPT, sampling=sampling, logprob_start_len=start_len, adapter=adapter)
    engine.submit(request, sink)
    return sink


def whole(progress: RequestProgress) -> tuple[Int32Array, Float32Array]:
    ids = np.array([*PROMPT, *progress.output_ids], np.int32)
    return ids, np.array(progress.output_logprobs, np.float32)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
async def test_requests_of_several_adapters_share_a_batch(tmp_path: Path, arch: Architecture) -> None:
    base = tiny_checkpoint(tmp_path / "model", arch=arch)
    folders: dict[str | None, Path | None] = {None: None}
    for seed, targets in enumerate([["q_proj", "v_proj", "down_proj"], ["k_proj", "o_proj", "up_proj"], None]):
        folders[f"a{seed}"] = make_adapter(base, tmp_path / f"a{seed}", seed=seed, targets=targets)
    async with running(base) as engine:
        for name, folder in folders.items():
            if name is not None:
                assert (await engine.adapters.load(name, str(folder))).success
        sinks = {name: [start(engine, name, f"{name}-{n}", tokens=8 + n) for n in range(3)] for name in folders}
        found = {name: [whole(await sink.wait()) for sink in some] for name, some in sinks.items()}

    for name, outputs in found.items():
        for ids, logprobs in outputs:
            expected = merged_logprobs(base, folders[name], ids)[-len(logprobs) :]
            np.testing.assert_allclose(logprobs, expected, rtol=0, atol=2e-5, err_msg=str(name))


async def test_the_digests_of_a_loaded_adapter_are_those_of_its_file(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    folder = make_adapter(base, tmp_path / "a")
    async with running(base) as engine:
        await engine.adapters.load("a", str(folder))
        assert engine.adapters.checksums("a") == {name: raw.checksum(name) for name, raw in read_adapter(folder).items()}


async def test_a_prefix_of_one_adapter_is_not_used_for_another_of_the_same_name(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    folders = [make_adapter(base, tmp_path / f"a{seed}", seed=seed) for seed in (0, 1)]
    async with running(base) as engine:
        for number, folder in enumerate([*folders, folders[0]]):  # the first is loaded again: it computes what it did
            assert (await engine.adapters.load("a", str(folder))).success
            ids, logprobs = whole(await start(engine, "a", f"r{number}").wait())
            np.testing.assert_allclose(logprobs, merged_logprobs(base, folder, ids)[-len(logprobs) :], rtol=0, atol=2e-5)
            assert (await engine.adapters.unload("a")).success


async def test_an_unload_waits_for_running_requests_and_refuses_new_ones(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "model")
    folder = make_adapter(base, tmp_path / "a")
    ended = anyio.Event()
    async with running(base) as engine:
        await engine.adapters.load("a", str(folder))
        await engine.pause("retract")
        sink = start(engine, "a", "r")

        async def unload() -> None:
            assert (await engine.adapters.unload("a")).success
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(unload)
            await anyio.wait_all_tasks_blocked()
            assert not ended.is_set()
            with pytest.raises(RequestRejected, match="'a' is not loaded; loaded: none"):
                start(engine, "a", "late")
            await engine.resume()
        assert ended.is_set()
        ids, logprobs = whole(await sink.wait())
    np.testing.assert_allclose(logprobs, merged_logprobs(base, folder, ids)[-len(logprobs) :], rtol=0, atol=2e-5)


async def test_what_cannot_be_loaded_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    base, other = tiny_checkpoint(tmp_path / "model"), tiny_checkpoint(tmp_path / "other", seed=1)
    good, foreign = make_adapter(base, tmp_path / "good"), make_adapter(other, tmp_path / "foreign")
    dora = shutil.copytree(good, tmp_path / "dora")
    settings = msgspec.json.decode((dora / ADAPTER_CONFIG_FILE).read_bytes())
    (dora / ADAPTER_CONFIG_FILE).write_bytes(msgspec.json.encode({**settings, "use_dora": True}))
    async with running(base) as engine:
        for name, path, said in [
            ("a", foreign, "was trained on"),
            ("a", tmp_path / "nowhere", "no readable settings"),
            ("a", dora, "use_dora"),
        ]:
            reply = await engine.adapters.load(name, str(path))
            assert not reply.success
            assert said in reply.error
            assert reply.loaded == {}
        assert (await engine.adapters.load("a", str(good))).success
        again = await engine.adapters.load("a", str(good))
        assert (again.success, again.loaded) == (False, {"a": str(good)})
        assert not (await engine.adapters.unload("b")).success
