"""`agentrl explain` and `agentrl config`: what fields and metrics mean, and which values a run has.

Invariant: what is printed of fields comes from the config models (`agentrl.config.describe`), and of metrics from the list
that runs are checked against (`agentrl.observe.metric_keys`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.commands.running import Overrides, load_run
from agentrl.config import RunConfig
from agentrl.config.describe import ConfigField, config_fields, field_values
from agentrl.config.hints import guess_field
from agentrl.config.short_fields import short_fields
from agentrl.errors import ConfigError
from agentrl.observe.metric_keys import OTHER_METRIC, MetricKey, find_metric


def explain_command(name: str, /) -> None:
    """Print what a field of the run file or a metric means, its type, its unit and its default; for a section, its fields.

    Args:
        name: A field such as trainer.lr, its last part, a section such as trainer, or a key of metrics.jsonl.
    """
    print(explain_name(name))


def config_command(config: Path | None = None, /, *overrides: Overrides, all: bool = False) -> None:
    """List every field of a run file with its default; with a run file, the values that it gives.

    Args:
        config: YAML file that describes a run; without it the command lists the defaults.
        overrides: Fields of the file to override.
        all: With a run file, list also the fields that it leaves at their defaults.
    """
    print(describe_fields(None if config is None else load_run(config, overrides), every=all))


def explain_name(name: str) -> str:
    """Return the meaning, type, unit and default of a field, the fields of a section, or the meaning of a metric.

    Raises:
        ConfigError: there is no such field or metric; the message guesses what was meant.
    """
    fields = [*config_fields(RunConfig), *short_fields()]
    wanted = name.removeprefix("--").replace("-", "_")
    matching = [field for field in fields if wanted == field.path] or [field for field in fields if wanted == field.name]
    metrics = [metric for metric in find_metric(name) if not matching or metric.key == name]
    hint = guess_field(wanted, [field.path for field in fields])
    is_typo = hint.startswith("did you mean") and all(metric.key == OTHER_METRIC for metric in metrics)
    if not matching and (is_typo or not metrics):
        raise ConfigError(f"{name}: there is no such field or metric; {hint}")
    described = [_section(field, fields) if field.is_section else _field(field) for field in matching]
    return "\n\n".join([*described, *map(_metric, metrics)])


def describe_fields(run: RunConfig | None = None, *, every: bool = False) -> str:
    """Return one line for each field: without a run its default and meaning, with one its value there."""
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


def _metric(metric: MetricKey) -> str:
    where = "every line" if metric.event == "every" else f"lines with event {metric.event}"
    unit = [f"    unit     {metric.unit}"] if metric.unit else []
    subject = f"{metric.unit} " if metric.meaning.startswith(("of ", "whose ", "that ", "in ")) else ""
    return "\n".join([f"{metric.key}: a key of metrics.jsonl, in {where}", f"    {subject}{metric.meaning}", *unit])


def _example(field: ConfigField) -> str:
    return "VALUE" if field.default in (None, "null", "{}", "[]") else field.default


def _section(field: ConfigField, fields: Sequence[ConfigField]) -> str:
    inside = [other for other in fields if other.section == field.path]
    rows = [_row(other.path, "(required)" if other.default is None else other.default, other) for other in inside]
    return "\n".join([f"{field.path}: a section of the run file", f"    {field.meaning}", *rows])
