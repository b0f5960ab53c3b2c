"""The names that graders of public data sets import before a submission, such as `List` and `heappush`.

A submission that copies the starter of its task, `def f(self, nums: List[int])`, needs them. They become builtins, so that
the submission stays as it was written: its own names win, and its lines keep their numbers.

Invariant: this module imports nothing of agentrl, because a copy of it runs in the sandbox. Of a submission that imports all
that it uses, it changes no name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

MODULES: Final = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json",
)  # fmt: skip
"""All names of these and of `typing`, a later one over an earlier one, none over a builtin; then the modules themselves."""
RECURSION_LIMIT: Final = 50_000
"""As those graders set it; a search in depth over a long list passes the 1000 of Python."""


def supply_usual_names(file: str) -> None:
    """Make the usual names builtins, if the program in `file` uses a name that nothing in it defines."""
    sys.setrecursionlimit(RECURSION_LIMIT)
    try:
        source = Path(file).read_bytes().decode()
        needs_names = bool(_undefined(source))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):  # Python itself will tell
        return
    if needs_names:
        _add_to_builtins()


def _undefined(source: str) -> set[str]:
    """Return the global names that a program uses and neither defines nor finds among the builtins."""
    import builtins
    import symtable

    module = symtable.symtable(source, "solution.py", "exec")
    used: set[str] = set()
    defined = {*dir(builtins), "__file__", "__name__", "__builtins__", "__annotations__"}
    tables = [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_global = symbol.is_global() or table is module
            if is_global and symbol.is_referenced():
                used.add(symbol.get_name())
            if is_global and (symbol.is_assigned() or symbol.is_imported()):
                defined.add(symbol.get_name())
    return used - defined


def _add_to_builtins() -> None:
    import builtins
    from importlib import import_module

    found: dict[str, object] = {}
    own = builtins.__dict__
    for name in (*MODULES, "typing"):
        module = import_module(name)
        public = getattr(module, "__all__", None) or [each for each in vars(module) if not each.startswith("_")]
        found.update((each, getattr(module, each)) for each in public)
    modules = {name: import_module(name) for name in MODULES}
    for name in (found | modules).keys() - own.keys():
        setattr(builtins, name, modules.get(name, found.get(name)))


if __name__ == "sitecustomize":  # Python imports a module of this name before the program
    supply_usual_names("solution.py")
