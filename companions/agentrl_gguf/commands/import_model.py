"""`agentrl import`: a GGUF file as a Hugging Face directory.

Invariant: the command never changes an existing directory; it succeeds where that holds the same import.
"""

from __future__ import annotations

from pathlib import Path

from agentrl.config.names import SCHEME, local_file
from agentrl.errors import ConfigError
from agentrl_gguf.importing import ChosenType, check_file, check_space, read_record, record_of, write_model_directory
from agentrl_gguf.progress import import_bar


def import_command(file: str, directory: Path, /, *, dtype: ChosenType = "auto", chat_template: Path | None = None) -> None:
    """Write a GGUF file as a Hugging Face directory: config, weights, tokenizer and chat template.

    Args:
        file: The GGUF file, or hf://org/name/file.gguf in the local cache of the hub.
        directory: Directory of the model; it must not exist, unless it is the same import.
        dtype: Type of the weights. The default is exact: bfloat16 where the file holds bfloat16, and float32 for any other,
            also a quantized one. bfloat16 rounds these once and takes half the space.
        chat_template: Jinja file in place of the chat template of the GGUF file, or where that has none.
    """
    source = Path(local_file(file) if file.startswith(SCHEME) else file)
    checked = check_file(source, dtype=dtype, template=None if chat_template is None else _template(chat_template))
    if directory.exists():
        if read_record(directory) != record_of(checked):
            raise ConfigError(
                f"{directory} exists and is not this import of {source.name} as {checked.dtype}; give another directory, or "
                "remove it"
            )
        print(f"{directory}: there already, from the same {source.name} as {checked.dtype}")
        return
    check_space(checked, directory)
    with import_bar(source.name, checked.model.num_parameters) as on_progress:
        write_model_directory(checked, record_of(checked), directory, on_progress=on_progress)
    kind, millions = checked.model.config["model_type"], checked.model.num_parameters / 1e6
    print(f"{directory}: {kind} of {millions:,.1f} M weights in {checked.dtype}, from {source.name}")
    if "default" not in checked.tokenizer.templates:
        print(f"The file has no chat template; put one into {directory}/chat_template.jinja before you train or serve it.")


def _template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: cannot be read as UTF-8 text: {error}") from error
