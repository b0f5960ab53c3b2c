"""The package `gguf`, which dequantizes: an extra of agentrl."""

from __future__ import annotations

import importlib.util

from agentrl.errors import ConfigError


def require_gguf(path: object) -> None:
    """Raise `ConfigError`, with the command that helps, where the package `gguf` is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{path}: a GGUF file needs the package gguf: pip install 'agentrl[gguf]'")
