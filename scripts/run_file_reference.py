"""Write `docs/reference/run-file.md` from the docstrings of the config models.

    python -m scripts.run_file_reference

Invariant: the page holds every field that a run file may hold, and nothing else; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.config.describe import ConfigField, config_fields

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "run-file.md"
_HEAD = """\
# Run file

A run file is YAML. `workflow`, `tasks` and `model.path` are required; every other field has a default. Unknown fields
are errors. A flag overrides a field: `agentrl train run.yaml --trainer.lr 1e-5`. `agentrl explain trainer.lr` prints one
field, `agentrl config run.yaml` all values of a run.

This page is made from the code by `python -m scripts.run_file_reference`.
"""


def page() -> str:
    """Return the page as Markdown: a heading for each section, and a table of its fields."""
    fields = list(config_fields(RunConfig))
    sections = [field for field in fields if field.is_section]
    top = _table([field for field in fields if not field.section and not field.is_section])
    parts = [_HEAD, "## The top level\n", top]
    for section in sections:
        inside = [field for field in fields if field.section == section.path and not field.is_section]
        parts += [f"## {section.path}\n", f"{section.meaning}\n", _table(inside)]
    return "\n".join(parts)


def _table(fields: Sequence[ConfigField]) -> str:
    rows = [f"| `{field.name}` | {_type(field)} | {_default(field)} | {_cell(field.meaning)} |" for field in fields]
    return "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _type(field: ConfigField) -> str:
    return _cell(field.type if field.unit is None else f"{field.type}; {field.unit}")


def _default(field: ConfigField) -> str:
    return "required" if field.default is None else f"`{field.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
