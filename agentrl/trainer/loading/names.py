"""Which tensors of a checkpoint make which tensors of a model.

Most have the same name in both. transformers renames some of older checkpoints, and makes one tensor of several, such as the
stacked experts of a layer.

Invariant: a plan covers every tensor of the model, and the shapes were checked before the first is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from agentrl.errors import ConfigError
from agentrl.weights.parts import Index, StoredTensor

_TRAINABLE = ("F32", "BF16", "F16", "F64")
"""Types of stored weights that become float32 without a scale of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Tensors of a model that are made of other tensors of a checkpoint."""

    target: str
    """Name of the first of them."""
    converter: WeightConverter
    sources: tuple[tuple[str, str], ...]
    """The pattern that each name of a checkpoint matched, and the name; in the order of the converter."""

    def made(self, module: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's tensors by name, whole, from those of the checkpoint."""
        converter = deepcopy(self.converter)
        for pattern, source in self.sources:
            converter.add_tensor(self.target, source, pattern, tensors[source])  # pyright: ignore[reportArgumentType] - declared as a future, and a tensor is allowed
        found: dict[str, Any] = converter.convert(self.target, model=module, config=module.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan:
    """How the tensors of a model are read."""

    same: Mapping[str, str]
    """Name in the checkpoint by name in the model, of tensors that are the same in both."""
    converted: Sequence[Conversion]


def conversions_of(module: PreTrainedModel) -> list[WeightTransform]:
    """Return how the names in a checkpoint become those of `module`, which must not be split yet.

    transformers finds some of them by the class of the model, which FSDP replaces.
    """
    return get_model_conversion_mapping(module)


def plan_reading(
    module: PreTrainedModel, conversions: Sequence[WeightTransform], stored: Mapping[str, StoredTensor], where: object
) -> ReadingPlan:
    """Return how the tensors of `module`, split or not, are read from `stored`.

    Args:
        module: the model; it keeps the renamings for its export.
        conversions: of the model before it was split.
        stored: the tensors of a checkpoint.
        where: the checkpoint, for messages.

    Raises:
        ConfigError: names or shapes differ.
    """
    transforms = deepcopy(list(conversions))  # they record what they were used for
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    wanted = module.state_dict()
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
    found = {target: stored[name].shape for target, name in same.items()}
    for each in converted:
        shapes = {name: torch.empty(stored[name].shape, device="meta") for _, name in each.sources}
        found |= {name: tuple(tensor.shape) for name, tensor in each.made(module, shapes).items()}
    trained = {name for target, name in same.items() if wanted[target].is_floating_point()}
    trained |= {name for each in converted for _, name in each.sources}
    _check_types({name: stored[name] for name in trained}, where)
    _check_fit(module, {name: tuple(tensor.shape) for name, tensor in wanted.items()}, found, unexpected, where)
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


def untie_different(module: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> None:
    """Give tied tensors of `module` parameters of their own where a checkpoint holds several, and they differ.

    transformers does the same: some checkpoints of untied models have a config.json that ties them.
    """
    for names in tied_names(module):
        first, *others = sorted(names & stored.keys()) or [""]
        for other in others:
            if stored[first].whole() != stored[other].whole():
                path, _, name = other.rpartition(".")
                parameter = module.get_parameter(other)
                module.get_submodule(path).register_parameter(name, nn.Parameter(torch.empty_like(parameter)))
