"""A griffe extension: shows the examples of docstrings as code.

The docstrings say `Example:`, which the Google style allows; griffe reads only `Examples:` as code.
"""

from __future__ import annotations

import re

import griffe

_HEADING = re.compile(r"^(\s*)Example:$", re.MULTILINE)


class Examples(griffe.Extension):
    """Renames the heading of examples."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rename the heading in the docstring of one class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _HEADING.sub(r"\1Examples:", obj.docstring.value)
