"""The documentation site: every page has its place, generated pages are current, and the commands that pages name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import agentrl
from agentrl.commands.main import make_app
from docs.figures import data_path, overlap
from scripts import docs_hooks, run_directory_reference, run_file_reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "adr" not in page.parts)


def named_in(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list):
        for entry in nav:
            yield from named_in(entry)
    elif isinstance(nav, dict):
        for entry in nav.values():
            yield from named_in(entry)


def test_the_navigation_names_every_page_once() -> None:
    nav = [*named_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])]
    assert sorted(nav) == [str(page.relative_to(DOCS)) for page in PAGES], "add the page to `nav` in mkdocs.yml"


def test_the_page_on_decisions_lists_each_with_its_title() -> None:
    listed = (DOCS / "decisions.md").read_text()
    for page in sorted(DOCS.glob("adr/*.md")):
        number, _, title = page.read_text().splitlines()[0].removeprefix("# ").partition(". ")
        assert f"- {number}: [{title}](adr/{page.name})\n" in listed, page.name


def test_the_reference_of_the_run_file_is_current() -> None:
    assert run_file_reference.PAGE.read_text() == run_file_reference.page(), "run `python -m scripts.run_file_reference`"


def test_the_reference_of_the_run_directory_is_current_and_explains_every_field() -> None:
    page = run_directory_reference.page()
    assert run_directory_reference.PAGE.read_text() == page, "run `python -m scripts.run_directory_reference`"
    assert "|  |" not in page, "a field has no docstring"


def test_the_python_reference_holds_what_agentrl_exports() -> None:
    assert "::: agentrl\n" in (DOCS / "reference" / "api.md").read_text()
    assert [name for name in agentrl.__all__ if not getattr(agentrl, name).__doc__] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_that_a_page_names_exist(page: Path) -> None:
    commands = set(make_app(()))
    named = re.findall(r"(?:`|^ {4}(?:\.venv/bin/)?)agentrl ([a-z][a-z-]*)", page.read_text(), re.M)
    assert [name for name in named if name not in commands] == []


def test_figures_are_drawn_by_their_programs(tmp_path: Path) -> None:
    data_path.main(tmp_path)
    overlap.main(tmp_path)
    for name in ("data-path.svg", "overlap.svg"):
        assert (tmp_path / name).stat().st_size > 10_000
        assert (DOCS / "assets" / name).exists()


def test_the_bound_of_the_figure_holds_and_saves_time() -> None:
    waiting, overlapping = (overlap.simulate(bound) for bound in overlap.BOUNDS)
    assert [max(waiting.staleness), max(overlapping.staleness)] == [*overlap.BOUNDS]
    assert overlapping.steps[-1] < waiting.steps[-1]


def test_a_link_out_of_the_documentation_becomes_the_path_of_the_file() -> None:
    text = "[a file](../../examples/01_hello.py), [`env.py`](../../agentrl/env.py#L1), [tools](tools.md), [web](https://a.b)"
    expected = "a file (`examples/01_hello.py`), `env.py`, [tools](tools.md), [web](https://a.b)"
    assert docs_hooks.without_outer_links(text, "howto/page.md") == expected
