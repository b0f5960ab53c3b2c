"""Random LoRA adapters on a tiny checkpoint, and the log-probs of base and adapter together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from agentrl.trainer.config import LoraConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.parallel.snapshot import raw_tensor
from agentrl.types import Float32Array, Int32Array
from agentrl.weights.merging import merge_adapter
from agentrl.weights.peft_files import ADAPTER_WEIGHTS_FILE, adapter_documents, read_adapter
from agentrl.weights.tensors import model_checksum, write_safetensors
from agentrl.weights.types import Publication


def make_adapter(base: Path, folder: Path, *, seed: int = 0, rank: int = 4, targets: Sequence[str] | None = None) -> Path:
    """Write an adapter of random A and B for the checkpoint `base` to `folder`, as a trainer publishes one."""
    config = LoraConfig.model_validate({"rank": rank, "alpha": 6, "targets": targets or "all-linear"})
    model = PolicyModel(base, device=torch.device("cpu"), lora=config, seed=seed)
    assert model.adapter is not None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.adapter.layers.values():
            layer.lora_B.normal_(std=0.2, generator=generator)
    tensors = {name: raw_tensor(parameter) for name, parameter in model.adapter.matrices().values()}
    folder.mkdir(parents=True)
    write_safetensors(folder / ADAPTER_WEIGHTS_FILE, tensors)
    for name, content in adapter_documents(model.adapter.peft_config(str(base)), model.base).items():
        (folder / name).write_bytes(content)
    return folder


def published_adapter(folder: Path, version: int) -> Publication:
    """Return the adapter in `folder` as a trainer publishes it."""
    digests = {name: raw.checksum(name) for name, raw in read_adapter(folder).items()}
    return Publication(
        version=version, path=str(folder), checksum=model_checksum(digests), tensor_checksums=digests, adapter=True
    )


def merged_logprobs(base: Path, adapter: Path | None, ids: Int32Array) -> Float32Array:
    """Return [L-1] log-probs of `ids[1:]` by transformers, from the merged model; None: from the base."""
    with TemporaryDirectory() as folder:
        model = base
        if adapter is not None:
            model = Path(folder) / "merged"
            merge_adapter(adapter, model, base)
        loaded = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    given = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        logits = loaded(input_ids=given[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, given[1:, None])[:, 0].numpy()
