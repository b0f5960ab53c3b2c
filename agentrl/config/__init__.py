"""The run file: its fields, what they say together, and how they are read, described and corrected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.support.exports import first_use

if TYPE_CHECKING:
    from agentrl.config.run import ModelConfig, RunConfig, inapplicable, load_config, parse_config
    from agentrl.config.yaml import NOT_YAML, load_yaml, overridden, parse_overrides

__all__ = [
    "NOT_YAML",
    "ModelConfig",
    "RunConfig",
    "inapplicable",
    "load_config",
    "load_yaml",
    "overridden",
    "parse_config",
    "parse_overrides",
]

__getattr__ = first_use(
    __name__,
    {
        "ModelConfig": "agentrl.config.run",
        "NOT_YAML": "agentrl.config.yaml",
        "RunConfig": "agentrl.config.run",
        "inapplicable": "agentrl.config.run",
        "load_config": "agentrl.config.run",
        "load_yaml": "agentrl.config.yaml",
        "overridden": "agentrl.config.yaml",
        "parse_config": "agentrl.config.run",
        "parse_overrides": "agentrl.config.yaml",
    },
)
