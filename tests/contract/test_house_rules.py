"""Rules that a linter does not know, one test a rule: annotations, docstrings, names, safe bytes, short pages."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import agentrl

ROOT = Path(__file__).parents[2]
SHIPPED = ("agentrl", "workflows", "envs", "companions")
UNSAFE_CALLS = frozenset({"eval", "exec", "torch.load", "torch.save"})
UNSAFE_MODULES = frozenset({"pickle", "cloudpickle", "marshal", "dill", "shelve"})
MAX_PAGE_COLUMNS = 120
MAX_README_LINES = 90
MAX_DOCSTRING_LINES_PER_CODE_LINE = 0.26
"""Of `agentrl`, attribute docstrings included. It may only fall; 0.25 is the aim."""
MAX_SHARED_FILE_NAMES = 44
"""Names that several files have, `config.py` and those that Python demands left out. It may only fall."""
COMMON_FILE_NAMES = frozenset({"__init__.py", "__main__.py", "config.py"})
WITHOUT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
METHODS = (property, classmethod, staticmethod)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def shipped() -> dict[str, ast.Module]:
    """Return the syntax tree of every shipped file, by path."""
    files = [file for root in SHIPPED for file in sorted((ROOT / root).rglob("*.py"))]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


@cache
def nodes_of(file: str) -> list[ast.AST]:
    """Return every node of a shipped file."""
    return list(ast.walk(shipped()[file]))


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Yield every node of every shipped file, with its file."""
    for file in shipped():
        for node in nodes_of(file):
            yield file, node


def definitions(body: list[ast.stmt]) -> list[Definition]:
    return [node for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]


def is_overload(node: Definition) -> bool:
    return any(isinstance(decorator, ast.Name) and decorator.id == "overload" for decorator in node.decorator_list)


def test_every_function_is_fully_annotated() -> None:
    missing: list[str] = []
    for file, node in nodes():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            bare = [a.arg for a in arguments if a is not None and a.annotation is None and a.arg not in ("self", "cls")]
            if bare or node.returns is None:
                missing.append(f"{file}:{node.lineno} {node.name} {bare or 'return'}")
    assert missing == []


def test_every_module_and_everything_that_it_exports_has_a_docstring() -> None:
    bare: list[str] = []
    for file, tree in shipped().items():
        exported = [node for node in definitions(tree.body) if not node.name.startswith("_") and not is_overload(node)]
        silent = [node for node in (tree, *exported) if not (ast.get_docstring(node) or "").strip(" .")]
        bare += [f"{file} {getattr(node, 'name', 'the module')}" for node in silent]
    assert bare == []


def test_every_method_of_what_users_import_has_a_docstring() -> None:
    bare: list[str] = []
    for name in agentrl.__all__:
        found = getattr(agentrl, name)
        if isinstance(found, type):
            public = [(key, value) for key, value in vars(found).items() if not key.startswith("_")]
            methods = [(key, value) for key, value in public if callable(value) or isinstance(value, METHODS)]
            bare += [f"{name}.{key}" for key, value in methods if not value.__doc__]
    assert bare == []


def package_of(file: str) -> str:
    """Return the import package of a shipped file; modules are namespaces, so names are unique in each alone."""
    parts = Path(file).parts
    return parts[0] if parts[0] == "agentrl" else parts[1]


def test_no_class_or_function_name_is_defined_twice_in_a_package() -> None:
    places: defaultdict[str, set[str]] = defaultdict(set)
    for file, tree in shipped().items():
        for node in definitions(tree.body):
            if node.name not in ("main", "__getattr__", "__dir__"):  # of `python -m`, and of names imported at first use
                places[f"{package_of(file)}: {node.name}"].add(file)
    assert shared(places) == {}


def test_what_users_import_from_agentrl_has_no_second_home() -> None:
    homes = {name: vars(agentrl)["_HOME"][name] for name in agentrl.__all__}
    again = [
        f"{file}: {node.name}"
        for file, tree in shipped().items()
        for node in definitions(tree.body)
        if node.name in homes and isinstance(node, ast.ClassDef) and package_of(file) != "agentrl"
    ]
    assert again == []


def shared(places: Mapping[str, set[str]]) -> dict[str, list[str]]:
    return {name: sorted(files) for name, files in sorted(places.items()) if len(files) > 1}


def test_no_constant_has_a_name_that_another_module_of_its_package_uses() -> None:
    places: defaultdict[str, set[str]] = defaultdict(set)
    for file, tree in shipped().items():
        for node in tree.body:
            targets = (
                node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            )
            for target in targets:
                if isinstance(target, ast.Name) and target.id.isupper() and not target.id.startswith("_"):
                    places[f"{package_of(file)}: {target.id}"].add(file)
    assert shared(places) == {}


def test_few_files_have_a_name_that_another_file_has() -> None:
    places: defaultdict[str, set[str]] = defaultdict(set)
    for file in shipped():
        if Path(file).name not in COMMON_FILE_NAMES:
            places[f"{package_of(file)}: {Path(file).name}"].add(file)
    found = shared(places)
    assert len(found) <= MAX_SHARED_FILE_NAMES, f"MAX_SHARED_FILE_NAMES may only fall; there are {len(found)}: {found}"


def lines_of_docstrings_and_code(file: str) -> tuple[int, int]:
    """Return how many lines of a shipped file hold docstrings, of attributes too, and how many hold code."""
    docstrings: set[int] = set()
    for node in nodes_of(file):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            constants = [
                each.value for each in node.body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
            ]
            for text in constants:
                if isinstance(text.value, str):
                    docstrings.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO((ROOT / file).read_text()).readline):
        if token.type not in WITHOUT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(docstrings), len(code - docstrings)


def test_docstrings_are_short_beside_the_code() -> None:
    rooms: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for file in (file for file in shipped() if package_of(file) == "agentrl"):
        counted = lines_of_docstrings_and_code(file)
        for name in ("all", Path(file).parts[1]):
            rooms[name] = [before + more for before, more in zip(rooms[name], counted, strict=True)]
    ratios = {name: round(docstrings / max(code, 1), 2) for name, (docstrings, code) in rooms.items()}
    docstrings, code = rooms["all"]
    limit = MAX_DOCSTRING_LINES_PER_CODE_LINE
    assert docstrings <= limit * code, f"MAX_DOCSTRING_LINES_PER_CODE_LINE is {limit} and may only fall; by room: {ratios}"


def test_no_unsafe_bytes_are_read() -> None:
    found: list[str] = []
    for file, node in nodes():
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, (ast.Name, ast.Attribute))
            and (name := ast.unparse(node.func)) in UNSAFE_CALLS
            and not (node.args and isinstance(node.args[0], ast.Constant))  # which was not read
        ):
            found.append(f"{file}:{node.lineno} calls {name}")
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imported = {alias.name.partition(".")[0] for alias in node.names}
            imported |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
            found += [f"{file}:{node.lineno} imports {name}" for name in imported & UNSAFE_MODULES]
    assert found == []


def test_no_name_says_old() -> None:
    found: list[str] = []
    for file, node in nodes():
        name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", None)
        if isinstance(name, str) and (name.startswith("old_") or "_old_" in name):
            found.append(f"{file} {name}")
    assert found == []


def test_no_test_imports_another_test_module() -> None:
    found: set[str] = set()
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found |= {name for name in modules if name.startswith("tests.") and is_test_module(name)}
    assert found == set()


def is_test_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.name.startswith("test_") and path.with_suffix(".py").exists()


def too_long(page: str) -> list[str]:
    lines = (ROOT / page).read_text().splitlines()
    return [f"{page}:{number} has {len(line)}" for number, line in enumerate(lines, 1) if len(line) > MAX_PAGE_COLUMNS]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES
    assert too_long("README.md") == []


def test_the_changelog_has_short_lines() -> None:
    assert too_long("CHANGELOG.md") == []
