"""The base of every config model: frozen, unknown keys rejected, each field documented once, below it.

Invariant: a config object is valid and never changes; what a component reads is what the user wrote or the default shown.
"""

from __future__ import annotations

import shlex
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _words(value: object) -> object:
    return tuple(shlex.split(value)) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
"""A list of strings, or one string that is split as a shell would: on the command line one value needs no brackets."""
DEVICE_PATTERN = r"^(auto|cpu|cuda(:\d{1,3})?)$"
Device = Annotated[str, Field(pattern=DEVICE_PATTERN)]
"""`auto`, `cpu`, `cuda` or `cuda:N`."""
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""What every generator takes (numpy's old one: 32 bits), also after a server's number was added."""


class Config(BaseModel):
    """Base of the config models that live beside their components."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )
