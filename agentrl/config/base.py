"""The base of every config model, and the field types that several of them share; `agentrl.config` composes the models.

Invariant: a config object is valid and never changes. Unknown keys are rejected; each field is documented once, below it,
where `agentrl.config.describe` reads it. Pydantic would read it at import, which takes longer than all else of an import.
"""

from __future__ import annotations

import shlex
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _words(value: object) -> object:
    return tuple(shlex.split(value)) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
"""A list of strings, or one string that is split as a shell splits it, so that a flag needs no brackets."""
DEVICE_PATTERN = r"^(auto|cpu|cuda(:\d{1,3})?)$"
Device = Annotated[str, Field(pattern=DEVICE_PATTERN)]
"""`auto`, `cpu`, `cuda` or `cuda:N`."""
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""A seed that every generator takes (numpy's legacy one has 32 bits), even with the number of a server added."""


class Config(BaseModel):
    """Base of the config models that live beside their components."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )
