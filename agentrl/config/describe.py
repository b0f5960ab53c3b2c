"""The fields of a config model as people read about them: path, meaning, type, unit, default.

Invariant: everything comes from the models themselves, so a list of fields cannot disagree with what a run file may hold.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from textwrap import dedent
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_WORDS: Mapping[object, str] = {
    str: "text",
    bool: "true or false",
    int: "integer",
    float: "number",
    Any: "any value",
    NoneType: "none",
}
_BOUNDS = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}
_UNITS = (("_s", "seconds"), ("_mb", "megabytes"), ("_gb", "gigabytes"), ("_tokens", "tokens"), ("_steps", "steps"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigField:
    """A field of a run file, or a section of fields.

    Example:
        >>> from agentrl.config import RunConfig
        >>> lr = {field.path: field for field in config_fields(RunConfig)}["trainer.lr"]
        >>> lr.meaning, lr.type, lr.default
        ('Peak learning rate of AdamW.', 'number above 0', '1.0e-06')
    """

    path: str
    """Dotted, such as `trainer.lr`."""
    meaning: str
    """The docstring of the field; for a section, that of its model."""
    type: str
    """What a value must be, in words; `section` for one."""
    unit: str | None
    """What the number counts, such as seconds; None where the meaning tells it, or where there is none."""
    default: str | None
    """As YAML; None: a run file must give the field."""

    @property
    def is_section(self) -> bool:
        """Whether it holds other fields."""
        return self.type == "section"

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def section(self) -> str:
        """The path of the section that holds it; empty at the top."""
        return self.path.rpartition(".")[0]


def config_fields(model: type[BaseModel], prefix: str = "") -> Iterator[ConfigField]:
    """Yield every section and field of a config model, in the order of the code; a section comes before its fields."""
    docstrings = field_docstrings(model)
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        below = _model_of(info.annotation)
        if below is None:
            meaning = _one_line(docstrings.get(name))
            kind = _type_words(info.annotation, info.metadata)
            yield ConfigField(path=path, meaning=meaning, type=kind, unit=_unit(path, kind, meaning), default=_default(info))
        else:
            meaning = _one_line(docstrings.get(name) or below.__doc__)
            default = _default(info) if info.is_required() or info.default is None else "{}"
            yield ConfigField(path=path, meaning=meaning, type="section", unit=None, default=default)
            yield from config_fields(below, f"{path}.")


@cache
def field_docstrings(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the docstring below each field of a model that has one, those of its bases included."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            (definition,) = ast.parse(dedent(inspect.getsource(kind))).body
            assert isinstance(definition, ast.ClassDef)
            for field, below in pairwise(definition.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = inspect.cleandoc(text)
                    case _:
                        pass
    return found


def field_values(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, str, bool]]:
    """Yield `(path, value as YAML, whether it was given)` of each field of a config, in the order of the code."""
    for name, info in type(config).model_fields.items():
        value: object = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from field_values(value, f"{prefix}{name}.")
        elif _model_of(info.annotation) is None:
            yield f"{prefix}{name}", as_yaml(value), name in config.model_fields_set


def as_yaml(value: object) -> str:
    """Return a value as one line of YAML.

    Example:
        >>> as_yaml(1e-6), as_yaml(None), as_yaml(("a", "b")), as_yaml({})
        ('1.0e-06', 'null', '[a, b]', '{}')
    """
    plain = [_plain_section(item) for item in value] if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownVariableType]
    text = yaml.safe_dump(plain, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _plain_section(value: object) -> object:
    return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value


def _model_of(annotation: object) -> type[BaseModel] | None:
    if get_origin(annotation) is tuple:
        return None  # a list of sections is one value
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _one_line(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip()


def _default(info: FieldInfo) -> str | None:
    return None if info.is_required() else as_yaml(info.get_default(call_default_factory=True))


def _type_words(annotation: object, metadata: list[Any]) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_words(parts[0], list(parts[1:]))
    if origin is Literal:
        return "one of " + ", ".join(map(str, parts))
    if origin in (Union, UnionType):
        *others, last = (_type_words(part, metadata if part is not NoneType else []) for part in parts)
        return f"{', '.join(others)} or {last}"
    if origin is tuple:
        inner = [part for part in parts if part is not Ellipsis]
        words = dict.fromkeys(_type_words(part, []) for part in inner)
        return f"{'list of' if Ellipsis in parts else f'{len(inner)} values, each'} {', '.join(words)}"
    if origin is list:
        return f"list of {_type_words(parts[0], [])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"sections with {', '.join(annotation.model_fields)}"
    return f"{_WORDS.get(annotation, getattr(annotation, '__name__', str(annotation)))}{_bounds(metadata)}"


def _bounds(metadata: list[Any]) -> str:
    """Return the limits among the metadata of a field, such as ` above 0, at most 1`."""
    found: list[str] = []
    for item in metadata:
        for limit in getattr(item, "metadata", None) or [item]:
            attribute, word = _BOUNDS.get(type(limit), (None, ""))
            if attribute is not None:
                found.append(f"{word} {getattr(limit, attribute)}")
    return f" {', '.join(found)}" if found else ""


def _unit(path: str, kind: str, meaning: str) -> str | None:
    if not kind.startswith(("number", "integer")):
        return None
    suffix = next((unit for end, unit in _UNITS if path.endswith(end)), None)
    return suffix or ("nats" if "nats" in meaning or "logprob" in path else None)
