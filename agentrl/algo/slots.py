"""The slots of an algorithm: what fills them, by name or as `module:function`. No torch: the driver reads them too.

Invariant: a slot names its function and never holds it, so the driver reads the tables of losses without loading torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from agentrl.config.base import Config

Need: TypeAlias = Literal["entropy", "reference", "values", "batch"]
"""A thing that is computed only where a slot needs it; `batch`: all groups of a step at once."""


class NoOptions(Config):
    """Options of a function that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundled:
    """A function that comes with agentrl, as the table of its slot lists it."""

    function: str
    """`module:function`; loaded where it runs."""
    options: type[Config] = NoOptions
    """Model of its options, in a module without torch."""
    formula: str = ""
    """Formula of one token, for `--dry-run`; `{name}` is an option."""
    needs: frozenset[Need] = frozenset()
    dense: bool = False
    """Whether tokens of advantage 0 have a gradient."""
    corrects: bool = False
    """Whether a policy loss weighs tokens by current / behavior itself, so that a correction beside it counts twice."""
