"""The page on models has the table that the tests of families hold."""

from __future__ import annotations

from pathlib import Path

from tests.support.families import families_table


def test_the_table_of_families_is_that_of_their_tests() -> None:
    assert families_table() in Path("docs/howto/models.md").read_text(), "put families_table() in its place"
