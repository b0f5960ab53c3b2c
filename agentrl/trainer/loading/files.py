"""The tensors in the files of a Hugging Face model. No torch, and nothing is read before it is asked for.

Invariant: a tensor that is returned is in its file whole, and the file lies in the directory of the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from agentrl.errors import ConfigError, WeightSyncError
from agentrl.weights.parts import StoredTensor
from agentrl.weights.tensors import WEIGHTS_FILE, WEIGHTS_INDEX_FILE, read_safetensors

_UNREADABLE: Final = "cannot be loaded as a causal language model"


class _WeightMap(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def model_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the HF directory `path` by name, from one file or from those that its index names.

    Raises:
        ConfigError: there are no safetensors weights, or they are damaged or incomplete.
    """
    try:
        if (path / WEIGHTS_FILE).is_file() or not (path / WEIGHTS_INDEX_FILE).is_file():
            return {name: StoredTensor.of(raw) for name, raw in read_safetensors(path / WEIGHTS_FILE).items()}
        places = msgspec.json.decode((path / WEIGHTS_INDEX_FILE).read_bytes(), type=_WeightMap).weight_map
        if outside := sorted({file for file in places.values() if Path(file).name != file}):
            raise ConfigError(f"{path}: {WEIGHTS_INDEX_FILE} names files outside the directory: {outside[:5]}")
        files = {file: read_safetensors(path / file) for file in sorted(set(places.values()))}
    except (OSError, msgspec.DecodeError, WeightSyncError) as error:
        raise ConfigError(f"{path}: {_UNREADABLE}: {error}") from error
    if absent := sorted(name for name, file in places.items() if name not in files[file]):
        raise ConfigError(f"{path}: {WEIGHTS_INDEX_FILE} promises tensors that its files do not hold: {absent[:5]}")
    return {name: StoredTensor.of(files[file][name]) for name, file in places.items()}
