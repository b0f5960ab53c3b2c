"""One import: a GGUF file becomes a Hugging Face directory that agentrl, transformers and SGLang load.

Everything is checked before the first byte is written: keys, tensors, tokenizer, template, free space.

Invariant: the directory appears whole or not at all. `agentrl_import.json` in it says of which file it was made and how; the
same import again finds it and writes nothing.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from agentrl.errors import ConfigError
from agentrl.support.files import write_json
from agentrl.weights.disk import atomic_directory
from agentrl_gguf.architectures import Model, describe
from agentrl_gguf.header import GgufHeader, read_header
from agentrl_gguf.requirement import require_gguf
from agentrl_gguf.tokenizer import TokenizerFiles, read_tokenizer
from agentrl_gguf.weights import ELEMENT_BYTES, WeightType, check_types, exact_type, write_weights

RECORD_FILE: Final = "agentrl_import.json"
FORM: Final = 1
"""Number of what an import writes; another number is another import."""
_CHUNK: Final = 1 << 24
ChosenType: TypeAlias = Literal["auto", "float32", "bfloat16"]


class ImportRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What `agentrl_import.json` says."""

    form: int
    source: str
    """Name of the file."""
    sha256: str
    """Of the file, 64 hex digits."""
    dtype: str
    template_sha256: str | None = None
    """Of the chat template that was given in place of the file's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile:
    """A GGUF file that can be imported."""

    header: GgufHeader
    model: Model
    tokenizer: TokenizerFiles
    dtype: WeightType
    template: str | None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that an import writes."""
        return self.model.num_parameters * ELEMENT_BYTES[self.dtype]


def check_file(path: Path, *, dtype: ChosenType = "auto", template: str | None = None) -> CheckedFile:
    """Return what is needed to import a file; of the weights nothing is read, but for the norms of a bfloat16 file.

    Raises:
        ConfigError: it cannot be imported exactly; the message says why and what helps.
    """
    require_gguf(path)
    header = read_header(path)
    model = describe(header)
    check_types(header, model)
    tokenizer = read_tokenizer(header, model.config["vocab_size"], template=template)
    chosen = exact_type(header, model) if dtype == "auto" else dtype
    return CheckedFile(header=header, model=model, tokenizer=tokenizer, dtype=chosen, template=template)


def config_of(checked: CheckedFile) -> dict[str, Any]:
    """Return config.json."""
    return {
        **checked.model.config,
        **checked.tokenizer.special_ids,
        "dtype": checked.dtype,
        "use_cache": True,
    }


def record_of(checked: CheckedFile) -> ImportRecord:
    """Return the record of an import; the file is read whole for its digest."""
    template = None if checked.template is None else hashlib.sha256(checked.template.encode()).hexdigest()
    path = checked.header.path
    return ImportRecord(form=FORM, source=path.name, sha256=_digest(path), dtype=checked.dtype, template_sha256=template)


def read_record(directory: Path) -> ImportRecord | None:
    """Return the record of the import that made a directory; None where none did."""
    try:
        return msgspec.json.decode((directory / RECORD_FILE).read_bytes(), type=ImportRecord)
    except (OSError, msgspec.DecodeError):
        return None


def write_model_directory(
    checked: CheckedFile, record: ImportRecord, directory: Path, *, on_progress: Callable[[int], None] = lambda _: None
) -> None:
    """Write the model to `directory`; `on_progress` gets the number of weights after each tensor.

    Raises:
        ConfigError: a weight is not finite; nothing is left of the directory.
        TrainError: the disk refuses; nothing is left of it.
    """
    tokenizer = checked.tokenizer
    with atomic_directory(directory) as folder:
        write_json(folder / "config.json", config_of(checked))
        ends = list(tokenizer.end_ids)
        write_json(
            folder / "generation_config.json",
            {**tokenizer.special_ids, **({"eos_token_id": ends} if ends else {})},
        )
        (folder / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer.tokenizer))
        write_json(folder / "tokenizer_config.json", tokenizer.config)
        for name, source in tokenizer.templates.items():
            place = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            (folder / place).parent.mkdir(exist_ok=True)
            (folder / place).write_text(source, encoding="utf-8")
        write_weights(checked.header, checked.model, folder, checked.dtype, on_progress=on_progress)
        write_json(folder / RECORD_FILE, msgspec.to_builtins(record))


def check_space(checked: CheckedFile, directory: Path) -> None:
    """Raise `ConfigError` where the disk of `directory` has less free space than an import takes."""
    place = next(parent for parent in directory.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < checked.weight_bytes:
        half = "; --dtype bfloat16 takes half of it" if checked.dtype == "float32" else ""
        raise ConfigError(
            f"{checked.header.path}: its {checked.model.num_parameters:,} weights take {checked.weight_bytes / 1e9:.1f} GB "
            f"as {checked.dtype}, and {place} has {free / 1e9:.1f} GB free; free space, or write elsewhere{half}"
        )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()
