"""A real browser on the viewer's page."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import orjson

from agentrl_viewer.view.data import RunData
from agentrl_viewer.view.server import serving_view

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    *("--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
PATIENCE_MS = 120_000
LATE_S = 0.3
"""Seconds by which each answer is late, so that a test that does not wait for what it reads fails on any machine."""
WIDE = {"width": 1440, "height": 900}
NARROW = {"width": 390, "height": 844}


@asynccontextmanager
async def browser_page(**context: Any) -> AsyncGenerator[Any]:  # noqa: ANN401 - Playwright's own type
    """A page of Chromium; an error in its script, or a refused one, fails the test."""
    from playwright.async_api import async_playwright  # pyright: ignore[reportMissingImports] - the extra `browser`

    problems: list[str] = []

    def on_error(error: Exception) -> None:
        problems.append(str(error))

    def on_message(message: Any) -> None:  # noqa: ANN401 - Playwright's own type
        if message.type == "error":
            problems.append(message.text)

    async with async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=CHROMIUM, chromium_sandbox=False, args=FLAGS, timeout=PATIENCE_MS
        )
        new_context: Any = browser.new_context
        page = await (await new_context(**{"viewport": WIDE, **context})).new_page()
        page.set_default_timeout(PATIENCE_MS)
        await page.route("**/*", _answer_late)
        page.on("pageerror", on_error)
        page.on("console", on_message)
        yield page
        await page.unroute_all(behavior="ignoreErrors")
        await browser.close()
    assert problems == []


async def _answer_late(route: Any) -> None:  # noqa: ANN401 - Playwright's own type
    await anyio.sleep(LATE_S)
    await route.continue_()


@asynccontextmanager
async def shown(*run_dirs: Path, place: str = "", **context: Any) -> AsyncGenerator[Any]:  # noqa: ANN401 - Playwright's own type
    """The viewer's page of a run, or of two, at a place such as `#/episodes`, once it has read all parts of the runs."""
    async with serving_view(*map(RunData, run_dirs)) as url, browser_page(**context) as page:
        await page.goto(url + place)
        await page.wait_for_load_state("networkidle")  # it asks again a second after the last answer
        yield page


async def go(page: Any, place: str) -> None:  # noqa: ANN401 - Playwright's own type
    """Open a place of the page that is open, and wait until it shows what it reads."""
    await page.evaluate("place => location.hash = place", place)
    await page.locator("main > *").first.wait_for()
    await page.locator("main p.note", has_text="Reading").wait_for(state="detached")


async def address_has(page: Any, part: str) -> None:  # noqa: ANN401 - Playwright's own type
    """Wait until the page's address has `part`: Playwright learns of it after the page has changed it."""

    def has_part(url: str) -> bool:
        return part in url

    await page.wait_for_url(has_part)


def indexed(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's index, without its header."""
    return [orjson.loads(line) for line in (run_dir / "episodes" / "index.jsonl").read_bytes().splitlines()[1:]]
