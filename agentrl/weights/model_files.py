"""The safetensors files of a Hugging Face checkpoint: one, or those that an index names. No torch.

Invariant: a file outside the directory is never read, and every tensor that the index promises is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from agentrl.errors import ConfigError, WeightSyncError
from agentrl.weights.tensors import WEIGHTS_FILE, WEIGHTS_INDEX_FILE, RawTensor, StoredTensor, read_safetensors

_UNREADABLE: Final = "cannot be loaded as a causal language model"


class _WeightMap(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def model_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the unread tensors of the HF directory `path` by name, from one file or those that its index names."""
    files = weight_files(path)
    return {name: StoredTensor.of(raw) for tensors in files.values() for name, raw in tensors.items()}


def weight_files(path: Path) -> dict[str, dict[str, RawTensor]]:
    """Return the unread tensors of the HF directory `path` by file and name.

    Raises:
        ConfigError: they cannot be read, or the index names files or tensors that are not there.
    """
    try:
        if (path / WEIGHTS_FILE).is_file() or not (path / WEIGHTS_INDEX_FILE).is_file():
            return {WEIGHTS_FILE: read_safetensors(path / WEIGHTS_FILE)}
        places = msgspec.json.decode((path / WEIGHTS_INDEX_FILE).read_bytes(), type=_WeightMap).weight_map
        if outside := sorted({file for file in places.values() if Path(file).name != file}):
            raise ConfigError(f"{path}: {WEIGHTS_INDEX_FILE} names files outside the directory: {outside[:5]}")
        files = {file: read_safetensors(path / file) for file in sorted(set(places.values()))}
    except (OSError, msgspec.DecodeError, WeightSyncError) as error:
        raise ConfigError(f"{path}: {_UNREADABLE}: {error}") from error
    if absent := sorted(name for name, file in places.items() if name not in files[file]):
        raise ConfigError(f"{path}: {WEIGHTS_INDEX_FILE} promises tensors that its files do not hold: {absent[:5]}")
    return {file: {name: files[file][name] for name, place in places.items() if place == file} for file in files}
