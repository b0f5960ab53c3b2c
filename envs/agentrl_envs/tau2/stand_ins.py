"""Stand-ins for what the tools of tau2 use of inspect-ai and toml, so that a worker needs neither.

`inspect-ai` weighs 300 MB with its dependencies; the tools use a decorator, an error, a base class and a place for objects.

Invariant: they are put in place in a worker process alone, before anything of the package is imported, and the packages of
tau2 are entered without their `__init__`, which would import the whole of inspect-ai.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import Distribution
from io import TextIOBase
from types import ModuleType
from typing import Any, ClassVar, TypeVar, cast

from pydantic import BaseModel, ConfigDict

from agentrl.errors import EnvironmentFault

_Kept = TypeVar("_Kept", bound="KeptModel")
_PACKAGES = ("", ".tau2", ".tau2.airline", ".tau2.banking", ".tau2.common", ".tau2.retail", ".tau2.telecom")


class ToolFailure(Exception):
    """What a tool tells the model of a call that it cannot make."""


class KeptModel(BaseModel):
    """An object of a kind that is kept by name, such as the database of an episode."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    kept: ClassVar[dict[tuple[type, str], Any]] = {}

    instance: str | None = None


def kept_object(kind: type[_Kept], name: str = "") -> _Kept:
    """Return the object of a kind and name of the current episode; it is made where there is none."""
    if (kind, name) not in KeptModel.kept:
        KeptModel.kept[kind, name] = kind(instance=name)
    return cast("_Kept", KeptModel.kept[kind, name])


def forget_objects() -> None:
    """Begin an episode without objects."""
    KeptModel.kept.clear()


def put_in_place(distribution: Distribution) -> None:
    """Make the stand-ins and the packages importable.

    Raises:
        EnvironmentFault: inspect-ai is imported already, so that this is no worker process of its own.
    """
    if "inspect_ai" in sys.modules:
        raise EnvironmentFault("the tools of tau2 run in a worker process of their own; inspect-ai is imported in this one")
    _module("inspect_ai", __path__=[])
    _module("inspect_ai.tool", ToolError=ToolFailure, Tool=Callable[..., Any], tool=lambda function: function)  # pyright: ignore[reportUnknownLambdaType]
    _module("inspect_ai.util", StoreModel=KeptModel, store_as=kept_object)
    _module("inspect_ai.model", Content=str, ContentText=str)
    _module("toml", load=_load_toml)
    for package in _PACKAGES:
        path = "inspect_evals" + package.replace(".", "/")
        _module(f"inspect_evals{package}", __path__=[str(distribution.locate_file(path))])


def _module(name: str, **attributes: object) -> None:
    module = ModuleType(name)
    for attribute, value in attributes.items():
        setattr(module, attribute, value)
    sys.modules[name] = module


def _load_toml(file: TextIOBase) -> dict[str, Any]:
    return tomllib.loads(file.read())
