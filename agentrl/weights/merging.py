"""A whole model from an adapter and its base: `W + (alpha / rank) B A`, as files that any HF library loads. No torch.

Invariant: a merged tensor is computed in float32 and rounded once to the type of the base; every other tensor is the base's,
bit for bit. The files have the names and the layout of those of the base. An adapter of another base is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from agentrl.config.names import local_model
from agentrl.errors import ConfigError
from agentrl.types import Float32Array
from agentrl.weights.disk import atomic_directory, copy_model_files
from agentrl.weights.model_files import model_tensors, weight_files
from agentrl.weights.peft_files import (
    ADAPTER_BASE_FILE,
    AdapterBase,
    adapted_module,
    base_digest,
    check_base,
    is_adapter,
    read_adapter,
    read_adapter_base,
    read_adapter_config,
)
from agentrl.weights.tensors import WEIGHTS_INDEX_FILE, RawTensor, write_safetensors

MERGED_FOLDER: Final = "merged"
"""Within a checkpoint of an adapter: the whole model, made when it is first asked for."""


def whole_model(path: Path) -> Path:
    """Return the HF directory of the model at `path`: itself, the merged model of an adapter, or the import of a file.

    Raises:
        ConfigError: the base of the adapter is not where it was, or was altered; or the file cannot be imported.
        TrainError: the merged weights cannot be written.
    """
    path = Path(local_model(str(path)))
    if not is_adapter(path):
        return path
    merged = path / MERGED_FOLDER
    if not merged.is_dir():
        merge_adapter(path, merged)
    return merged


def merge_adapter(adapter: Path, output: Path, base: Path | None = None) -> None:
    """Write the model that the directory `adapter` makes of its base to `output`, which is replaced.

    Args:
        adapter: as agentrl or PEFT writes it.
        output: an HF directory with the config and the tokenizer of the base.
        base: where the base is now; None: where it was when the adapter was trained.

    Raises:
        ConfigError: the adapter cannot be read, or does not fit the base.
        TrainError: the output cannot be written.
    """
    config, matrices = read_adapter_config(adapter), read_adapter(adapter)
    source = base or Path(_known_base(adapter, config.base_model_name_or_path))
    if base is None or (adapter / ADAPTER_BASE_FILE).is_file():
        check_base(adapter, AdapterBase(str(source), base_digest(model_tensors(source))))
    files = weight_files(source)
    updates = _scaled_pairs(matrices, config.scale, adapter)
    held = {name: tensor.shape for tensors in files.values() for name, tensor in tensors.items()}
    for name, (first, second) in updates.items():
        if held.get(name) != (second.shape[0], first.shape[1]):
            raise ConfigError(
                f"{adapter}: the adapter changes {name} [{second.shape[0]}, {first.shape[1]}], and {source} holds "
                f"{list(held[name]) if name in held else 'no such tensor'}; give the model that it was trained on"
            )
    with atomic_directory(output) as folder:
        for file, tensors in files.items():
            changed = {name: _merged(tensors[name], *updates[name]) for name in tensors.keys() & updates.keys()}
            write_safetensors(folder / file, {**tensors, **changed})
        copy_model_files(source, folder)
        if (source / WEIGHTS_INDEX_FILE).is_file():
            (folder / WEIGHTS_INDEX_FILE).write_bytes((source / WEIGHTS_INDEX_FILE).read_bytes())


def _known_base(adapter: Path, named: str | None) -> str:
    path = read_adapter_base(adapter).path if (adapter / ADAPTER_BASE_FILE).is_file() else named
    if path is None or not Path(path).is_dir():
        raise ConfigError(f"{adapter}: its base {path or 'is not named and'} is not here; give its directory with --base")
    return path


def _scaled_pairs(
    matrices: Mapping[str, RawTensor], scale: float, where: Path
) -> dict[str, tuple[Float32Array, Float32Array]]:
    """Return A, and B times the scale, [rank, in] and [out, rank] float32, by the name of the weight that they change."""
    found: dict[str, dict[str, Float32Array]] = {}
    for name, raw in matrices.items():
        known = adapted_module(name)
        assert known is not None, "`read_adapter` refuses other names"
        found.setdefault(known[0], {})[known[1]] = _as_float32(raw)
    if single := sorted(module for module, pair in found.items() if len(pair) < 2):
        raise ConfigError(f"{where}: the adapter holds only one matrix of {single[0]}; the files are not whole")
    return {f"{module}.weight": (pair["A"], np.float32(scale) * pair["B"]) for module, pair in found.items()}


def _merged(base: RawTensor, first: Float32Array, second: Float32Array) -> RawTensor:
    values: Float32Array = np.add(_as_float32(base), second @ first, dtype=np.float32)
    return _as_type(values, base.dtype)


def _as_float32(raw: RawTensor) -> Float32Array:
    if raw.dtype == "BF16":
        bits = np.frombuffer(raw.data, "<u2").astype("<u4") << 16
        return bits.view("<f4").reshape(raw.shape)
    kinds = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}
    if raw.dtype not in kinds:
        raise ConfigError(f"a tensor of type {raw.dtype} takes no adapter; merge into a base of BF16, F16, F32 or F64")
    return np.frombuffer(raw.data, kinds[raw.dtype]).astype(np.float32).reshape(raw.shape)


def _as_type(values: Float32Array, dtype: str) -> RawTensor:
    if dtype != "BF16":
        return RawTensor.of(values.astype({"F32": np.float32, "F16": np.float16, "F64": np.float64}[dtype]))
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return RawTensor(dtype="BF16", shape=values.shape, data=rounded.reshape(-1).view(np.uint8).data)
