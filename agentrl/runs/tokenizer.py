"""The text of the token ids of a run.

Invariant: only a tokenizer with the vocabulary of the run's model is used: that of its newest checkpoint, else of
`model.path`. Without either there is no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from agentrl.errors import ConfigError

_FILE = "tokenizer.json"


class TokenTexts:
    """The tokenizer of a run: looked for at each use until one is found, as a run writes its first checkpoint late."""

    def __init__(self, run_dir: Path, model_path: Callable[[], str | None]) -> None:
        """Look in `run_dir`, and where it has no checkpoint in the directory that `model_path` returns."""
        self._run_dir = run_dir
        self._model_path = model_path
        self._loaded: Tokenizer | None = None

    def __call__(self, ids: Sequence[int]) -> list[str] | None:
        """Return one text for each id; None where there is no tokenizer. Part of a character beyond ASCII is U+FFFD.

        Raises:
            ConfigError: the tokenizer cannot be read.
        """
        self._loaded = self._loaded or self._load()
        if self._loaded is None:
            return None
        return self._loaded.decode_batch([[int(number)] for number in ids], skip_special_tokens=False)

    def _load(self) -> Tokenizer | None:
        file = self._file()
        if file is None:
            return None
        try:
            return Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the tokenizer {file}: {error.strerror}") from error
        except Exception as error:
            raise ConfigError(f"{file} is not a tokenizer: {error}") from error

    def _file(self) -> Path | None:
        checkpoints = sorted(self._run_dir.glob(f"checkpoints/step-*/{_FILE}"))
        if checkpoints:
            return checkpoints[-1]
        model = self._model_path()
        file = None if model is None else Path(model) / _FILE
        return file if file is not None and file.is_file() else None
