"""The base of every config model: frozen, unknown keys rejected, each field documented once, below it.

Invariant: a config object is valid and never changes; what a component reads is what the user wrote or the default shown.
"""

from __future__ import annotations

import shlex
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _words(value: object) -> object:
    return tuple(shlex.split(value)) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
"""A list of strings, or one string that is split as a shell would: on the command line one value needs no brackets."""


class Config(BaseModel):
    """Base of the config models that live beside their components."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, coerce_numbers_to_str=True
    )
