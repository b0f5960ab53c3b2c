"""`agentrl merge`: a whole model from the adapter of a run.

Invariant: the run and its checkpoints stay as they are.
"""

from __future__ import annotations

from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.trainer.checkpoints.format import STATE_FILE
from agentrl.trainer.checkpoints.read import latest_checkpoint, read_checkpoint
from agentrl.weights.merging import merge_adapter
from agentrl.weights.peft_files import is_adapter


def merge_command(run: Path, output: Path, /, *, base: Path | None = None) -> None:
    """Write a whole Hugging Face model from the adapter of a run, a checkpoint, or a directory of PEFT.

    Args:
        run: Directory of a run, whose newest checkpoint is taken; or of one checkpoint or adapter.
        output: Directory of the model; it must not exist.
        base: The base model; the default is where it was when the adapter was trained.
    """
    adapter = _adapter_of(run)
    if output.exists():
        raise ConfigError(f"{output} exists; give another directory, or remove it")
    merge_adapter(adapter, output, base)
    print(f"{output}: {adapter} merged into its base; serve it with `agentrl serve {output}`")


def _adapter_of(run: Path) -> Path:
    """Return the directory of the adapter, after the digests of a checkpoint were checked."""
    if (run / "checkpoints").is_dir():
        checkpoint = latest_checkpoint(run / "checkpoints")
        run = run if checkpoint is None else checkpoint.path
    elif (run / STATE_FILE).is_file():
        read_checkpoint(run)
    if not is_adapter(run):
        raise ConfigError(
            f"{run}: there is no adapter here; expected a run with trainer.lora, one of its checkpoints, or a directory of "
            "PEFT; a checkpoint of whole weights is a model already"
        )
    return run
