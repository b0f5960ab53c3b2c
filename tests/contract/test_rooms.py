"""The map of the rooms is the one that the code makes, but for sizes, which may be a tenth off."""

from __future__ import annotations

import re

from scripts.rooms import PACKAGES, PAGE, ROOT, page, rooms

SIZE = re.compile(r"(\d[\d,]*)(?= \|$| lines)", re.MULTILINE)


def without_sizes(text: str) -> str:
    return re.sub(r"\d[\d,]*(?= \| [\d,]+ \|$)", "N", SIZE.sub("N", text), flags=re.MULTILINE)


def sizes(text: str) -> list[int]:
    return [int(found.replace(",", "")) for found in SIZE.findall(text)]


def test_the_map_has_the_rooms_of_the_code() -> None:
    assert without_sizes(PAGE.read_text()) == without_sizes(page()), "run `python -m scripts.rooms`"


def test_the_sizes_of_the_map_are_about_those_of_the_code() -> None:
    for said, found in zip(sizes(PAGE.read_text()), sizes(page()), strict=True):
        assert abs(said - found) <= max(20, found // 10), "run `python -m scripts.rooms`"


def test_every_package_of_the_wheel_is_on_the_map() -> None:
    folders = {
        str(path.relative_to(ROOT))
        for root in ("companions", "envs", "workflows")
        for path in (ROOT / root).glob("agentrl_*")
    }
    assert folders | {"agentrl"} == set(PACKAGES.values())


def test_the_comparison_tells_the_size_of_the_core() -> None:
    [told] = re.findall(r"core has\s+about ([\d,]+) lines", (ROOT / "docs" / "comparison.md").read_text())
    lines = sum(room.lines for room in rooms("agentrl"))
    assert abs(int(told.replace(",", "")) - lines) <= lines // 10
