"""Modules of transformers: made without weights, and the plan by which a checkpoint fills them.

Tensors that transformers renames, or makes of several, are made whole, one at a time.

Invariant: a reading plan covers every tensor of the model, and shapes are checked before the first tensor is read. Buffers
that no file holds, such as rotary frequencies, have their values from the beginning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from agentrl.errors import ConfigError
from agentrl.weights.peft_files import is_adapter_parameter
from agentrl.weights.tensors import Index, StoredTensor


def empty_model(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model of the HF directory `path` without weights, which take `dtype`.

    Raises:
        ConfigError: there is no config.json of a causal language model, or its weights are quantized.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path}: expected a local Hugging Face model directory with a config.json")
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(f"{path}: the weights are quantized, and training needs them in float32, bfloat16 or float16")
        with torch.device("meta"):  # attention is SDPA, but for architectures that it does not compute, such as Gemma 2
            module: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: cannot be loaded as a causal language model: {error}") from error
    _fill_buffers(module)
    # HF keeps the gradient of the padding row at zero; here padding never reaches the loss, and the row may be a real token.
    embedding = module.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        embedding.padding_idx = None
    return module


def _fill_buffers(module: PreTrainedModel) -> None:
    """Compute the buffers that are in no file, in host memory, as transformers does after it has loaded a model."""
    kept = module.state_dict(keep_vars=True)
    for tensor in kept.values():
        _mark(tensor, is_initialized=True)
    for path, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if f"{path}.{name}".removeprefix(".") not in kept:
                setattr(owner, name, torch.empty_like(buffer, device="cpu"))
                _mark(owner, is_initialized=False)
    module.initialize_weights()


def _mark(thing: Tensor | nn.Module, *, is_initialized: bool) -> None:
    object.__setattr__(thing, "_is_hf_initialized", is_initialized)


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give the tensors of `module`, or this rank's parts, memory on `device`; tied ones stay tied, values are undefined."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter not in made:
                made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            owner.register_parameter(name, made[parameter])
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device))


_TRAINABLE = ("F32", "BF16", "F16", "F64")
"""Stored types that become float32 without a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Tensors of a model that are made of other tensors of a checkpoint."""

    target: str
    """Name of the first of them."""
    converter: WeightConverter
    sources: tuple[tuple[str, str], ...]
    """Pattern and name of each tensor of the checkpoint, in the order of the converter."""

    def made(self, module: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converter = deepcopy(self.converter)
        for pattern, source in self.sources:
            converter.add_tensor(self.target, source, pattern, tensors[source])  # pyright: ignore[reportArgumentType] - declared as a future, and a tensor is allowed
        found: dict[str, Any] = converter.convert(self.target, model=module, config=module.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan:
    """The sources of the tensors of a model."""

    same: Mapping[str, str]
    """Name in the checkpoint by name in the model, of tensors that are the same in both."""
    converted: Sequence[Conversion]


def conversions_of(module: PreTrainedModel) -> list[WeightTransform]:
    """Return the renamings of checkpoint names for `module`, which must not be split yet: FSDP replaces its class."""
    return get_model_conversion_mapping(module)


def plan_reading(
    module: PreTrainedModel, conversions: Sequence[WeightTransform], stored: Mapping[str, StoredTensor], where: object
) -> ReadingPlan:
    """Return the plan to read the tensors of `module`, split or not, from `stored`; it keeps the renamings for its export.

    `conversions` are those of the model before it was split; ConfigError names `where`.
    """
    transforms = deepcopy(list(conversions))  # they record what they were used for
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    wanted = {name: tensor for name, tensor in module.state_dict().items() if not is_adapter_parameter(name)}
    same: dict[str, str] = {}
    grouped: dict[str, list[tuple[str, str]]] = {}
    unexpected: list[str] = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target not in wanted:
            unexpected.append(name)
        elif pattern is None:
            same[target] = name
        else:
            grouped.setdefault(target, []).append((pattern, name))
    converted = [
        Conversion(target=target, converter=by_pattern[sources[0][0]], sources=tuple(sources))
        for target, sources in grouped.items()
    ]
    shapes_in_file = {target: stored[name].shape for target, name in same.items()}
    for each in converted:
        shapes = {name: torch.empty(stored[name].shape, device="meta") for _, name in each.sources}
        shapes_in_file |= {name: tuple(tensor.shape) for name, tensor in each.made(module, shapes).items()}
    trained = {name for target, name in same.items() if wanted[target].is_floating_point()}
    trained |= {name for each in converted for _, name in each.sources}
    _check_types({name: stored[name] for name in trained}, where)
    _check_fit(module, {name: tuple(tensor.shape) for name, tensor in wanted.items()}, shapes_in_file, unexpected, where)
    # Where transformers' own export looks for them.
    object.__setattr__(module, "_weight_conversions", [each for each in transforms if each.was_used()])
    return ReadingPlan(same=same, converted=converted)


def _check_types(tensors: Mapping[str, StoredTensor], where: object) -> None:
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype not in _TRAINABLE:
            raise ConfigError(f"{where}: {name} is stored as {tensor.dtype}; training needs one of {', '.join(_TRAINABLE)}")


def _check_fit(
    module: PreTrainedModel, wanted: Mapping[str, Index], found: Mapping[str, Index], unexpected: list[str], where: object
) -> None:
    held = set[str]()
    for names in tied_names(module):
        if not found.keys().isdisjoint(names):
            held |= names
    problems = {
        "missing_keys": wanted.keys() - found.keys() - held,
        "unexpected_keys": {name for name in [*unexpected, *(found.keys() - wanted.keys())] if not _ignored(module, name)},
        "mismatched_keys": {name for name in found.keys() & wanted.keys() if found[name] != wanted[name]},
    }
    config = Path(module.config.name_or_path or "") / "config.json"
    for what, names in problems.items():
        if names:
            raise ConfigError(f"{where}: the weights do not fit {config}: {what} {sorted(names)[:5]}")


def _ignored(module: PreTrainedModel, name: str) -> bool:
    """Return whether transformers ignores a tensor of this name; older checkpoints hold frequencies of rotary embeddings."""
    patterns: set[str] = set(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
    return any(re.search(pattern, name) for pattern in patterns | {r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"})


def tied_names(module: nn.Module) -> list[frozenset[str]]:
    """Return the groups of names that one parameter has."""
    names: dict[nn.Parameter, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).add(name)
    return [frozenset(group) for group in names.values() if len(group) > 1]


def untie_different(module: PreTrainedModel, stored: Collection[str], differ: Callable[[str, str], bool]) -> None:
    """Untie tensors of `module` that a checkpoint holds as different ones: some config.json tie them wrongly.

    `stored` are the names in the checkpoint, and `differ` compares the tensors of two of them.
    """
    for names in tied_names(module):
        first, *others = sorted(names.intersection(stored)) or [""]
        for other in others:
            if differ(first, other):
                path, _, name = other.rpartition(".")
                parameter = module.get_parameter(other)
                module.get_submodule(path).register_parameter(name, nn.Parameter(torch.empty_like(parameter)))
