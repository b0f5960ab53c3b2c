"""`agentrl explain` and `agentrl config`: what the fields of a run file mean, and which values a run has.

Invariant: everything that is printed comes from the config models (`agentrl.fields`), and so from what a run file may hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.fields import ConfigField, config_fields, field_values
from agentrl.misspelled import guess_field


def explain_name(name: str) -> str:
    """Return the meaning, type, unit and default of a field, or the fields of a section.

    Args:
        name: a path such as `trainer.lr`, a section, or the last part of a path, such as `lr`.

    Raises:
        ConfigError: there is no such field; the message guesses what was meant.
    """
    fields = list(config_fields(RunConfig))
    wanted = name.removeprefix("--").replace("-", "_")
    found = [field for field in fields if wanted == field.path] or [field for field in fields if wanted == field.name]
    if not found:
        hint = guess_field(wanted, [field.path for field in fields])
        raise ConfigError(f"{name}: there is no such field; {hint}")
    return "\n\n".join(_section(field, fields) if field.is_section else _field(field) for field in found)


def describe_fields(run: RunConfig | None = None, *, every: bool = False) -> str:
    """Return one line for each field: without a run its default and meaning, with one its value there.

    Args:
        run: whose values to show.
        every: with a run, also the fields that its file leaves at their defaults.
    """
    fields = {field.path: field for field in config_fields(RunConfig) if not field.is_section}
    if run is None:
        rows = [
            _row(field.path, "(required)" if field.default is None else field.default, field) for field in fields.values()
        ]
    else:
        rows = [_row(path, text, fields[path]) for path, text, given in field_values(run) if every or given]
    return "\n".join([*rows, "", "agentrl explain FIELD prints the meaning, the type and the unit of one."])


def _row(path: str, value: str, field: ConfigField) -> str:
    first_sentence = field.meaning.split(". ")[0].rstrip(".")
    return f"{path:<34} {value:<22} {first_sentence}"


def _field(field: ConfigField) -> str:
    default = "none, a run file must give it" if field.default is None else field.default
    rows = [("type", field.type), ("unit", field.unit), ("default", default), ("flag", f"--{field.path} {_example(field)}")]
    return "\n".join(
        [field.path, f"    {field.meaning}", *(f"    {name:<8} {text}" for name, text in rows if text is not None)]
    )


def _example(field: ConfigField) -> str:
    return "VALUE" if field.default in (None, "null", "{}", "[]") else field.default


def _section(field: ConfigField, fields: Sequence[ConfigField]) -> str:
    inside = [other for other in fields if other.section == field.path]
    rows = [_row(other.path, "(required)" if other.default is None else other.default, other) for other in inside]
    return "\n".join([f"{field.path}: a section of the run file", f"    {field.meaning}", *rows])
