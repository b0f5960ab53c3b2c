"""Two runs against each other in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl_viewer.view.data import RunData
from agentrl_viewer.view.server import serving_view
from tests.support.browsing import CHROMIUM, address_has, browser_page, shown
from tests.support.synthetic_run import HOSTILE, write_run

pytestmark = [
    pytest.mark.external,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing: make browser-install"),
]


@pytest.fixture
def anyio_backend() -> str:
    """Playwright needs asyncio."""
    return "asyncio"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    left = write_run(folder / "low", steps=4, fields={"trainer": {"lr": 1e-6}, "workflow_args": {"said": HOSTILE}})
    return left, write_run(folder / "high", steps=4, seed=1, fields={"trainer": {"lr": 1e-5}})


async def test_the_front_page_of_two_runs_compares_them(runs: tuple[Path, Path]) -> None:
    async with shown(*runs) as page:
        card = page.locator("[data-card='Success']")
        await card.wait_for()
        legend = card.locator(".legend")
        for name in ("low", "high"):  # the runs arrive one after the other
            await legend.filter(has_text=name).wait_for()
        painted = await card.locator("canvas").evaluate(
            """canvas => new Promise((resolve) => {
              const isPainted = (name) => {
                const paint = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
                const wanted = [1, 3, 5].map((at) => Number.parseInt(themeColor(name).slice(at, at + 2), 16));
                for (let at = 0; at < paint.length; at += 4)
                  if (paint[at + 3] > 250 && wanted.every((value, channel) => paint[at + channel] === value)) return true;
                return false;
              };
              const look = () => ["series-0", "series-1"].every(isPainted) ? resolve(true) : requestAnimationFrame(look);
              look();
            })"""
        )
        assert painted
        fields = page.locator(".fields")
        for text in ("trainer.lr", "1.0e-06", "1.0e-05"):
            await fields.filter(has_text=text).wait_for()
        figures = page.locator(".figures")
        for text in ("Last evaluation", "mean return"):
            await figures.filter(has_text=text).wait_for()
        assert await page.evaluate("window.hacked") is None


async def test_a_run_whose_name_arrives_after_its_curves_is_named_there(runs: tuple[Path, Path]) -> None:
    curves_drawn = anyio.Event()

    async def answer_when_drawn(route: Any) -> None:  # noqa: ANN401 - Playwright's own type
        await curves_drawn.wait()
        await route.continue_()

    async with serving_view(*map(RunData, runs)) as url, browser_page() as page:
        await page.route("**/data/run?run=1", answer_when_drawn)
        await page.goto(url)
        legend = page.locator("[data-card='Success'] .legend")
        await legend.locator(".item").nth(2).wait_for()  # two curves of the first run, and one without a name
        curves_drawn.set()
        await legend.filter(has_text="high").wait_for()


async def test_the_same_tasks_stand_side_by_side_and_lead_to_their_episodes(runs: tuple[Path, Path]) -> None:
    async with shown(*runs) as page:
        row = page.locator("tr[data-task='held-out-3']")
        await row.wait_for()
        cells = await row.inner_text()
        assert "What is 3 + 4?" in cells
        assert (cells.count(" of 1"), cells.count("return ")) == (2, 2)
        await row.locator("a").click()
        for name in ("low", "high"):
            head = page.locator(".compare-head", has_text=name)
            await head.filter(has_text="Episode eval.4.3").filter(has_text="return").wait_for()
        assert await page.locator(".compare-head").count() == 2
        facts = await page.locator(".compare-facts").inner_text()
        assert "episode return" in facts
        await page.keyboard.press("Escape")
        await row.wait_for()


async def test_the_reader_chooses_the_run_that_the_other_views_show(runs: tuple[Path, Path]) -> None:
    async with shown(*runs, place="#/episodes") as page:
        await page.locator(".rows .row").first.wait_for()
        of_low = await page.locator(".rows .return").all_inner_texts()
        await page.locator("select[name=run]").select_option("high")
        await address_has(page, "run=1")
        await page.locator(".rows .row").first.wait_for()
        assert await page.locator(".rows .return").all_inner_texts() != of_low
        await page.locator("#bar nav a[data-view=timeline]").click()
        await address_has(page, "timeline?run=1")
        await page.locator("#bar nav a[data-view=runs]").click()
        await page.locator(".fields").wait_for()


async def test_an_address_with_the_other_run_opens_it(runs: tuple[Path, Path]) -> None:
    async with shown(*runs, place="#/episode/8.0.0?run=1") as page:
        await page.locator("h2", has_text="Episode 8.0.0").wait_for()
        assert await page.locator("select[name=run]").input_value() == "1"


async def test_one_run_has_no_comparison(runs: tuple[Path, Path]) -> None:
    async with shown(runs[0], place="#/runs") as page:
        await page.locator("[data-card='Success']").wait_for()
        assert await page.locator("#bar nav a[data-view=runs]").is_hidden()
