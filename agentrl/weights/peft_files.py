"""LoRA adapters as files that PEFT, SGLang and vLLM load by path: names, settings, the digest of the base. No torch.

Source: Hu et al. 2021 (arXiv 2106.09685): a linear layer computes `W x + (alpha / rank) B A x`, with A [rank, in] and
B [out, rank]. Only A and B are trained, and B begins at 0.

Invariant: a directory of an adapter names the digest of its base, so an adapter is never added to another one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal

import msgspec

from agentrl.errors import ConfigError, WeightSyncError
from agentrl.weights.tensors import RawTensor, StoredTensor, model_checksum, read_safetensors

ADAPTER_WEIGHTS_FILE: Final = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE: Final = "adapter_config.json"
ADAPTER_BASE_FILE: Final = "agentrl_base.json"
"""Name and digest of the base; PEFT has no field for the digest."""
_PEFT_PREFIX: Final = "base_model.model."
_DIGEST_READERS: Final = 8
Matrix = Literal["A", "B"]


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of PEFT's `adapter_config.json` that agentrl writes, and checks when it reads one."""

    peft_type: str = "LORA"
    task_type: str | None = "CAUSAL_LM"
    base_model_name_or_path: str | None = None
    inference_mode: bool = True
    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] | str | None
    bias: str = "none"
    fan_in_fan_out: bool = False
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: tuple[str, ...] | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}

    @property
    def scale(self) -> float:
        """The factor alpha / rank."""
        return self.lora_alpha / self.r


class AdapterBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model that an adapter was trained on."""

    path: str
    digest: str
    """Of all tensors of its files, 32 hex digits, by `base_digest`."""


def peft_name(module: str, matrix: Matrix) -> str:
    """Return the name of a matrix of the linear layer `module` in an adapter's file.

    Example:
        >>> peft_name("model.layers.0.mlp.up_proj", "A")
        'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return f"{_PEFT_PREFIX}{module}.lora_{matrix}.weight"


def adapted_module(name: str) -> tuple[str, Matrix] | None:
    """Return the linear layer and the matrix that `peft_name` gave this name; None: it is another tensor.

    Example:
        >>> adapted_module(peft_name("model.layers.0.mlp.up_proj", "B"))
        ('model.layers.0.mlp.up_proj', 'B')
    """
    for matrix in ("A", "B"):
        ending = f".lora_{matrix}.weight"
        if name.startswith(_PEFT_PREFIX) and name.endswith(ending):
            return name.removeprefix(_PEFT_PREFIX).removesuffix(ending), matrix
    return None


def base_digest(tensors: Mapping[str, StoredTensor]) -> str:
    """Return the digest of the tensors of a checkpoint as they are stored, whichever files hold them; reads all of them."""

    def digest(name: str) -> str:
        return tensors[name].whole().checksum(name)

    with ThreadPoolExecutor(min(_DIGEST_READERS, os.cpu_count() or 1)) as threads:
        digests = threads.map(digest, tensors)
        return model_checksum(dict(zip(tensors, digests, strict=True)))


def adapter_documents(config: PeftConfig, base: AdapterBase) -> dict[str, bytes]:
    """Return the contents of the two JSON files of an adapter, by name."""
    documents = {ADAPTER_CONFIG_FILE: config, ADAPTER_BASE_FILE: base}
    return {name: msgspec.json.format(msgspec.json.encode(content), indent=1) for name, content in documents.items()}


def is_adapter(directory: Path) -> bool:
    """Return whether `directory` holds an adapter and no whole model."""
    return (directory / ADAPTER_CONFIG_FILE).is_file()


def read_adapter_config(directory: Path) -> PeftConfig:
    """Return the settings of the adapter in `directory`.

    Raises:
        ConfigError: they are missing, damaged, or those of another kind of adapter than plain LoRA.
    """
    path = directory / ADAPTER_CONFIG_FILE
    try:
        config = msgspec.json.decode(path.read_bytes(), type=PeftConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: no readable settings of a LoRA adapter ({error})") from error
    plain = PeftConfig(r=1, lora_alpha=1, target_modules=None)
    for field in ("peft_type", "bias", "fan_in_fan_out", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"):
        found, expected = getattr(config, field), getattr(plain, field)
        if found != expected:
            raise ConfigError(f"{path}: {field} is {found!r}, and agentrl takes plain LoRA adapters, with {expected!r}")
    if config.modules_to_save:
        raise ConfigError(
            f"{path}: modules_to_save names whole layers ({', '.join(config.modules_to_save)}), which servers of adapters "
            "cannot take; train without them"
        )
    if config.r < 1:
        raise ConfigError(f"{path}: r is {config.r}; expected a rank of at least 1")
    return config


def read_adapter_base(directory: Path) -> AdapterBase:
    """Return the base of the adapter in `directory`; raises ConfigError where it does not say."""
    path = directory / ADAPTER_BASE_FILE
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file, in which agentrl writes the digest of the base, and PEFT has none; give the directory "
            "of the base to `agentrl merge` with --base"
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=AdapterBase)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path}: no readable digest of the base model ({error}); restore the file that agentrl wrote"
        ) from error


def check_base(directory: Path, expected: AdapterBase) -> None:
    """Raise ConfigError where the adapter in `directory` was trained on another base than `expected`."""
    base = read_adapter_base(directory)
    if base.digest != expected.digest:
        raise ConfigError(
            f"{directory}: the adapter was trained on {base.path}, weights {base.digest}, and {expected.path} has the "
            f"weights {expected.digest}; give the model that it was trained on"
        )


def read_adapter(directory: Path) -> dict[str, RawTensor]:
    """Return the matrices of the adapter in `directory` by PEFT's names; raises ConfigError where it has other tensors."""
    try:
        tensors = read_safetensors(directory / ADAPTER_WEIGHTS_FILE)
    except WeightSyncError as error:
        raise ConfigError(str(error)) from error
    if others := sorted(name for name in tensors if adapted_module(name) is None):
        raise ConfigError(f"{directory}: {ADAPTER_WEIGHTS_FILE} holds tensors that no LoRA layer has: {others[:3]}")
    return tensors


def is_adapter_parameter(name: str) -> bool:
    """Return whether a parameter of a trained module, by its name there, is part of an adapter."""
    return name.endswith((".lora_A", ".lora_B"))
