"""The viewer on narrow and wide pages, in light and dark, and by keys alone; in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.browsing import CHROMIUM, NARROW, WIDE, address_has, go, shown
from tests.support.synthetic_run import write_run

pytestmark = [
    pytest.mark.external,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing: make browser-install"),
]
PLACES = [
    *("#/runs", "#/curves", "#/curves?find=a", "#/timeline", "#/episodes", "#/staleness", "#/episode/8.0.0"),
    *("#/episode/8.0.0?layer=logprob", "#/compare/8.0.0/8.1.0", "#/compare/8.0.0/8.0.0?runs=0%2C1"),
]
OUTSIDE = """() => {
  const isFree = (node) => node.getClientRects().length && !node.closest(".scroller, .tree-box, .task-box, .skip, pre");
  return [...document.querySelectorAll("body *")]
    .filter((node) => isFree(node) && node.getBoundingClientRect().right > innerWidth + 0.5)
    .map((node) => `${node.tagName}.${node.className}`);
}"""
CONTRAST = """() => {
  const channel = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const luminance = (name) => {
    const hex = themeColor(name);
    const [red, green, blue] = [1, 3, 5].map((at) => channel(Number.parseInt(hex.slice(at, at + 2), 16) / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const colors = ["text", "muted", "accent", "good", "bad", "warn"];
  const pairs = colors.flatMap((one) => ["page", "panel", "raised"].map((other) => [one, other]));
  return Object.fromEntries(pairs.map(([one, other]) => {
    const [light, dark] = [luminance(one), luminance(other)].sort((a, b) => b - a);
    return [`${one} on ${other}`, (light + 0.05) / (dark + 0.05)];
  }));
}"""
PAINTED = """() => {
  const [left, right] = timelineView.lanesAt();
  const ratio = devicePixelRatio;
  const canvas = timelineView.canvas;
  const lane = timelineView.lanes[0];
  const place = [left, lane.top, right - left, ROW].map((pixels) => pixels * ratio);
  const paint = canvas.getContext("2d").getImageData(...place).data;
  const wanted = [1, 3, 5].map((at) => Number.parseInt(themeColor("series-0").slice(at, at + 2), 16));
  let found = 0;
  for (let at = 0; at < paint.length; at += 4) {
    // A row of pixels that a span covers in part is blended with the ground.
    const isColor = wanted.every((value, channel) => Math.abs(paint[at + channel] - value) < 6);
    if (isColor) found += paint[at + 3] / 255;
  }
  const total = activityTotals(store.spans, timelineView.whole).find((one) => one.activity === "train").seconds;
  return { painted: found / ((right - left) * (ROW - 4) * ratio * ratio), share: total / timelineView.whole[1] };
}"""


@pytest.fixture
def anyio_backend() -> str:
    """Playwright needs asyncio."""
    return "asyncio"


@pytest.fixture(scope="module")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "other", steps=4, seed=1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [NARROW, WIDE], ids=["narrow", "wide"])
async def test_nothing_stands_outside_the_page(run_dir: Path, other_run: Path, size: dict[str, int], scheme: str) -> None:
    async with shown(run_dir, other_run, viewport=size, color_scheme=scheme) as page:
        for place in PLACES:
            await go(page, place)
            assert await page.evaluate("document.documentElement.scrollWidth") == size["width"], place
            assert await page.evaluate(OUTSIDE) == [], place
        contrast = await page.evaluate(CONTRAST)
        assert {pair: round(value, 2) for pair, value in contrast.items() if value < 4.5} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_first_press_of_the_theme_key_changes_the_theme(run_dir: Path, scheme: str) -> None:
    async with shown(run_dir, place="#/episodes?q=train", color_scheme=scheme) as page:
        ground = "getComputedStyle(document.body).backgroundColor"
        before = await page.evaluate(ground)
        await page.keyboard.press("t")
        after = await page.evaluate(ground)
        assert after != before
        assert await page.evaluate("document.documentElement.dataset.theme") == ("dark" if scheme == "light" else "light")
        await page.keyboard.press("t")
        assert await page.evaluate(ground) == before
        await page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
        assert await page.evaluate(ground) == before  # the reader has chosen


async def test_the_theme_follows_the_system_until_the_reader_chooses(run_dir: Path) -> None:
    async with shown(run_dir, color_scheme="light") as page:
        await page.emulate_media(color_scheme="dark")
        await page.locator('html[data-theme="dark"]').wait_for(state="attached")


@pytest.mark.parametrize("size", [NARROW, WIDE], ids=["narrow", "wide"])
async def test_an_activity_has_the_area_of_its_share_of_the_time(tmp_path: Path, size: dict[str, int]) -> None:
    run = write_run(tmp_path / "long", steps=100, with_records=False)
    async with shown(run, place="#/timeline", viewport=size) as page:
        await page.locator("canvas.timeline").wait_for()
        found = await page.evaluate(PAINTED)
        assert found["share"] > 0.3
        assert found["painted"] == pytest.approx(found["share"], abs=0.08)


async def test_an_episode_opens_during_a_search(tmp_path: Path) -> None:
    run = write_run(tmp_path / "many", steps=40)
    async with shown(run, place="#/episodes") as page:
        await page.locator(".rows .row").first.wait_for()
        await page.keyboard.press("s")
        await page.keyboard.type("no episode says this")
        await page.keyboard.press("Enter")
        await page.locator("#search-state", has_text="files read").wait_for()
        await go(page, "#/episode/8.0.0")
        await page.locator(".role-assistant").first.wait_for()


async def test_a_metric_without_a_card_of_its_own_stands_under_a_heading(run_dir: Path, tmp_path: Path) -> None:
    more = '"event":"step","pass_at_4":0.5,"trainer.entropy_turn_2":1.5,"trainer.own_number":3.0,"forks.a":1,"forks.b":2'
    (tmp_path / "metrics.jsonl").write_text((run_dir / "metrics.jsonl").read_text().replace('"event":"step"', more))
    async with shown(tmp_path) as page:
        await page.locator("section.curves", has_text="Results").locator("[data-card='Pass at k']").wait_for()
        policy = page.locator("section.curves", has_text="Policy and loss").last
        await policy.locator("summary").click()
        await policy.locator("[data-card='trainer.entropy_turn_2'] h3", has_text="Entropy turn 2").wait_for()
        rest = page.locator("section.curves", has_text="Counts and the rest").last
        await rest.locator("summary").click()
        await rest.locator("[data-card='trainer.own_number']").wait_for()
        forks = await rest.locator("[data-card='forks.REASON'] .legend").inner_text()
        assert ("forks a" in forks, "forks b" in forks) == (True, True)


async def test_every_metric_of_the_front_page_is_explained(run_dir: Path) -> None:
    async with shown(run_dir) as page:
        for summary in await page.locator("section.curves summary").all():
            await summary.click()
        cards = await page.locator(".card").all_inner_texts()
        assert len(cards) > 15
        hints = await page.locator(".legend .item").evaluate_all("nodes => nodes.map((node) => node.title)")
        assert all(len(hint.split(": ", 1)[1]) > 3 for hint in hints if not hint.startswith("workflow."))
        assert "kl_behavior" not in "".join(cards)
        assert "KL, estimate k3" in "".join(cards)


async def tab_to(page: Any, name: str) -> None:  # noqa: ANN401 - Playwright's own type
    """Press Tab until the control that `name` selects has the focus, and check that the focus is seen."""
    for _ in range(60):
        if await page.evaluate("name => document.activeElement.matches(name)", name):
            style = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert style != "none", name
            return
        await page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not lead to {name}")


async def test_keys_alone_lead_from_the_front_page_to_a_token_and_back(run_dir: Path) -> None:
    async with shown(run_dir) as page:
        await page.locator("[data-card='Success']").wait_for()
        await tab_to(page, "#bar nav a[data-view=episodes]")
        await page.keyboard.press("Enter")
        await page.locator(".rows .row").first.wait_for()
        await tab_to(page, ".scroller")
        await page.keyboard.press("ArrowDown")
        chosen = await page.locator(".rows .row.selected .cell").first.inner_text()
        await page.keyboard.press("Enter")
        await page.locator("h2", has_text=f"Episode {chosen}").wait_for()
        await tab_to(page, "[data-layer=logprob]")
        await page.keyboard.press(" ")
        await tab_to(page, ".tokens.output")
        first = await page.locator("#tip").inner_text()
        await page.keyboard.press("ArrowRight")
        assert await page.locator(".tokens .cursor").get_attribute("data-at") == "1"
        second = await page.locator("#tip").inner_text()
        assert "log-prob" in second
        assert first != second
        await page.keyboard.press("Escape")
        await page.locator(".rows .row.selected", has_text=chosen).wait_for()
        assert await page.locator("#tip").is_hidden()
        await page.keyboard.press("Escape")
        await tab_to(page, "#bar nav a[data-view=curves]")
        await page.keyboard.press("Enter")
        await page.locator("[data-card='Success']").wait_for()


async def test_every_control_is_reached_by_tab(run_dir: Path) -> None:
    async with shown(run_dir) as page:
        await page.locator("[data-card='Success']").wait_for()
        for name in (
            ".skip",
            "#bar nav a[data-view=timeline]",
            "button.theme",
            "select[name=x]",
            "input[name=find]",
            "summary",
        ):
            await tab_to(page, name)
        await go(page, "#/episodes")
        for name in (
            "input[name=q]",
            "select[name=outcome]",
            "input[name=step_max]",
            ".scroller",
            ".header button[data-column=seconds]",
        ):
            await tab_to(page, name)
        await page.keyboard.press("Enter")
        await address_has(page, "sort=-seconds")
        await go(page, "#/timeline")
        await tab_to(page, "main button")
        await page.keyboard.press(" ")
        await address_has(page, "from=")
        await go(page, "#/staleness")
        await tab_to(page, "input[type=range]")
        await page.keyboard.press("ArrowLeft")
        await page.locator("h3", has_text="step 3").wait_for()


async def test_the_arrow_keys_walk_over_the_steps_of_the_curves(run_dir: Path) -> None:
    async with shown(run_dir) as page:
        await page.locator("[data-card='Success']").wait_for()
        for step in (1, 2):
            await page.keyboard.press("ArrowRight")
            await page.locator("[data-card='Loss'] .at", has_text=f"step {step}").wait_for()
        await page.keyboard.press("Escape")
        await page.locator("[data-card='Loss'] .at").wait_for(state="detached")


async def test_the_skip_button_leads_to_the_content(run_dir: Path) -> None:
    async with shown(run_dir) as page:
        await page.evaluate("document.activeElement.blur()")
        await tab_to(page, ".skip")
        box = await page.locator(".skip").bounding_box()
        assert box is not None
        assert box["y"] >= 0
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "view"


async def test_a_question_mark_lists_the_keys(run_dir: Path) -> None:
    async with shown(run_dir) as page:
        await page.locator("[data-card='Success']").wait_for()
        await page.keyboard.press("?")
        text = await page.locator("#help").inner_text()
        for key in ("light or dark", "search in messages", "find a metric", "zoom", "layers"):
            assert key in text
        await page.keyboard.press("t")  # the page below rests
        await page.keyboard.press("Escape")
        await page.locator("#help").wait_for(state="hidden")
        assert await page.evaluate("document.documentElement.dataset.theme") == "light"
