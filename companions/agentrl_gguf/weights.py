"""The weights of a file as safetensors: dequantized, in the order of rows of Hugging Face, in pieces.

Invariant: a float32 weight is what the package `gguf` makes of the stored blocks, bit for bit; a bfloat16 one is that,
rounded once to the nearest, ties to even. No more than one piece is in memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

import numpy as np

from agentrl.support.files import write_json
from agentrl.types import Float32Array
from agentrl.weights.tensors import WEIGHTS_FILE, WEIGHTS_INDEX_FILE, RawTensor, as_held, write_safetensors
from agentrl_gguf.architectures import Model, NamedTensor
from agentrl_gguf.header import GgufHeader, StoredQuantized

WeightType: TypeAlias = Literal["float32", "bfloat16"]
ELEMENT_BYTES: Final[Mapping[WeightType, int]] = {"float32": 4, "bfloat16": 2}
PIECE_BYTES: Final = 1024**3
"""Most bytes of a file of weights, unless one tensor alone has more."""
_PLAIN_TYPES: Final = ("F32", "F16")


def check_types(header: GgufHeader, model: Model) -> None:
    """Raise `ConfigError` for a type that the package `gguf` does not dequantize."""
    from gguf.quants import _type_traits  # pyright: ignore[reportPrivateUsage] - the package has no public list

    known = {*_PLAIN_TYPES, *(kind.name for kind in _type_traits)}
    for tensor in model.tensors:
        stored = header.tensors[tensor.source]
        if stored.type_name not in known:
            raise header.error(
                f"tensor {stored.name} has the type {stored.type_name}, which the package gguf does not dequantize; "
                "quantize the model in another type, such as Q8_0"
            )


def exact_type(header: GgufHeader, model: Model) -> WeightType:
    """Return the smaller type that holds every weight exactly: bfloat16 where the file has no other, else float32."""
    types = {header.tensors[tensor.source].type_name for tensor in model.tensors if len(tensor.shape) > 1}
    if types != {"BF16"}:
        return "float32"
    with header.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for tensor in model.tensors:
            if len(tensor.shape) == 1 and np.any(_values(mapped, header, model, tensor).view("<u4") & 0xFFFF):
                return "float32"
    return "bfloat16"


def write_weights(
    header: GgufHeader,
    model: Model,
    folder: Path,
    dtype: WeightType,
    *,
    on_progress: Callable[[int], None],
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Write the weights into `folder`; `on_progress` gets the number of elements after each tensor.

    Raises:
        ConfigError: a weight is not finite.
        OSError: the disk refuses.
    """
    pieces = list(_pieces(model.tensors, piece_bytes // ELEMENT_BYTES[dtype]))
    places: dict[str, str] = {}
    with header.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for number, piece in enumerate(pieces, 1):
            stem = Path(WEIGHTS_FILE)
            name = stem.name if len(pieces) == 1 else f"{stem.stem}-{number:05d}-of-{len(pieces):05d}{stem.suffix}"
            held: dict[str, RawTensor] = {}
            for tensor in piece:
                held[tensor.name] = as_held(RawTensor.of(_values(mapped, header, model, tensor)), dtype)
                places[tensor.name] = name
                on_progress(header.tensors[tensor.source].num_elements)
            write_safetensors(folder / name, held)
    if len(pieces) > 1:
        total = model.num_parameters * ELEMENT_BYTES[dtype]
        write_json(folder / WEIGHTS_INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})


def _pieces(tensors: Sequence[NamedTensor], most: int) -> Iterator[list[NamedTensor]]:
    piece: list[NamedTensor] = []
    held = 0
    for tensor in tensors:
        if piece and held + tensor.num_elements > most:
            yield piece
            piece, held = [], 0
        piece.append(tensor)
        held += tensor.num_elements
    yield piece


def _values(data: mmap.mmap, header: GgufHeader, model: Model, tensor: NamedTensor) -> Float32Array:
    """Return the values of a tensor as the model of Hugging Face has them, float32."""
    values = _dequantized(data, header.tensors[tensor.source])
    if not np.isfinite(values).all():
        raise header.error(f"tensor {tensor.source} holds values that are not finite; the file is damaged: fetch it again")
    match tensor.change:
        case "none":
            return values
        case "subtract_one":
            return values - np.float32(1)
        case "unpermute_heads":
            return _unpermuted(values, model.config["num_attention_heads"])
        case "unpermute_kv_heads":
            return _unpermuted(values, model.config["num_key_value_heads"])


def _dequantized(data: mmap.mmap, stored: StoredQuantized) -> Float32Array:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    raw = data[stored.start : stored.start + stored.num_bytes]
    kind = GGMLQuantizationType(stored.type_number)
    if stored.type_name in _PLAIN_TYPES:
        form = "<f4" if stored.type_name == "F32" else "<f2"
        return np.frombuffer(raw, form).astype(np.float32).reshape(stored.shape)
    blocks = np.frombuffer(raw, np.uint8).reshape(*stored.shape[:-1], -1)
    with np.errstate(all="ignore"):  # the caller looks for values that are not finite
        return cast("Float32Array", dequantize(blocks, kind)).reshape(stored.shape)


def _unpermuted(values: Float32Array, heads: int) -> Float32Array:
    """Return rows of queries or keys as Hugging Face has them: the first half of a head is rotated with the second.

    llama.cpp rotates neighbours, so its converter puts row i beside row i + head_dim / 2.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
