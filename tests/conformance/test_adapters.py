"""LoRA adapters by name: loaded from a directory, named by calls, unloaded.

A real SGLang keeps no digest of the base, so it takes an adapter of another one; agentrl's probe refuses that. It also reads
an adapter that it has unloaded from its path again, as soon as a call names it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import pytest

from tests.support.adapters import make_adapter, merged_logprobs
from tests.support.api import Api
from tests.support.servers import RunningServer

ADAPTERS = True
PROMPT = list(range(3, 20))


@pytest.fixture(scope="session")
def adapter_folders(checkpoints: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(checkpoints[0], folder / name, seed=seed) for seed, name in enumerate(("one", "two"))}


@pytest.fixture
async def loaded(api: Api, adapter_folders: dict[str, Path]) -> AsyncGenerator[dict[str, Path]]:
    """Both adapters under their names, for the length of a test."""
    assert (await api.get("/server_info")).body["enable_lora"]
    for name, path in adapter_folders.items():
        status, body = await api.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        assert (status, body["success"], body["loaded_adapters"][name]) == (200, True, str(path))
    yield adapter_folders
    for name in adapter_folders:
        await api.post("/unload_lora_adapter", {"lora_name": name})


@pytest.mark.starts
async def test_each_call_is_computed_by_the_adapter_that_it_names(
    api: Api, server: RunningServer, loaded: dict[str, Path]
) -> None:
    for name, path in {"one": loaded["one"], "two": loaded["two"], None: None}.items():
        named = {} if name is None else {"lora_path": name}
        reply = await api.generate(PROMPT, 8, sampling={"temperature": 1.0, "ignore_eos": True}, **named)
        triples = reply["meta_info"]["output_token_logprobs"]
        ids = np.array([*PROMPT, *(triple[1] for triple in triples)], np.int32)
        expected = merged_logprobs(server.checkpoints[0], path, ids)[-len(triples) :]
        np.testing.assert_allclose([triple[0] for triple in triples], expected, rtol=0, atol=2e-5)


@pytest.mark.starts
async def test_a_name_is_refused_when_it_is_taken_and_by_the_embedded_server_once_it_is_unloaded(
    api: Api, server: RunningServer, loaded: dict[str, Path]
) -> None:
    status, body = await api.post("/load_lora_adapter", {"lora_name": "one", "lora_path": str(loaded["two"])})
    assert (status, body["success"]) == (400, False)
    assert "already loaded" in body["error_message"]
    status, body = await api.post("/unload_lora_adapter", {"lora_name": "one"})
    assert (status, set(body["loaded_adapters"])) == (200, {"two"})
    status, body = await api.post("/unload_lora_adapter", {"lora_name": "one"})
    assert (status, body["success"]) == (400, False)
    if server.kind == "sglang":  # it reads the adapter from its path again
        await api.generate(PROMPT, 1, lora_path="one")
        return
    message = await api.refused({"input_ids": PROMPT, "lora_path": "one", "sampling_params": {"max_new_tokens": 1}})
    assert "one" in message
