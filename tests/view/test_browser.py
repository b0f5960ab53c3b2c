"""The viewer in a real browser: each view on a run of some hundred episodes, live changes, and 50,000 episodes."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from agentrl_viewer.view.data import RunData
from agentrl_viewer.view.export import write_episode
from agentrl_viewer.view.server import serving_view
from tests.support.browsing import CHROMIUM, address_has, browser_page, indexed, shown
from tests.support.synthetic_run import HOSTILE, write_run

pytestmark = [
    pytest.mark.external,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing: make browser-install"),
]


@pytest.fixture
def anyio_backend() -> str:
    """Playwright needs asyncio."""
    return "asyncio"


async def test_the_curves_show_a_card_for_each_idea_and_the_value_under_the_pointer(run_dir: Path) -> None:
    async with shown(run_dir) as page:
        card = page.locator("[data-card='Success']")
        await card.wait_for()
        assert await page.locator(".card").count() >= 12
        assert "success rate, evaluation" in await card.inner_text()
        await page.locator("[data-card='Loss'] canvas").hover(position={"x": 60, "y": 60})
        await page.locator("[data-card='Success'] .at", has_text="step 1").wait_for()  # in every card, not only there
        await page.locator("input[name=find]").fill("gradient")
        await page.locator("[data-card='trainer.grad_norm']").wait_for()
        assert await page.locator("[data-card='trainer.kl_behavior_proximal_k3']").count() == 0
        await address_has(page, "find=gradient")


async def test_the_timeline_names_spans_and_adds_them_up(run_dir: Path) -> None:
    async with shown(run_dir, place="#/timeline") as page:
        canvas = page.locator("canvas.timeline")
        await canvas.wait_for()
        totals = await page.locator(".totals").inner_text()
        for activity in ("train", "wait for batch", "wait for bound", "update", "evaluate"):
            assert activity in totals
        await canvas.hover(position={"x": 94, "y": 18})
        await page.locator("#tip", has_text="trainer: wait for batch").wait_for()
        await canvas.hover(position={"x": 600, "y": 260})
        await page.locator("#tip", has_text="Episodes in flight").wait_for()
        await page.keyboard.press("+")
        await address_has(page, "from=")


async def test_the_table_is_filtered_sorted_and_walked_by_keys(run_dir: Path) -> None:
    async with shown(run_dir, place="#/episodes") as page:
        await page.locator(".rows .row").first.wait_for()
        await page.locator("#episode-count", has_text="272 of 272").wait_for()
        await page.locator("select[name=purpose]").select_option("evaluation")
        await page.locator("#episode-count", has_text="16 of 272").wait_for()
        await page.locator("select[name=purpose]").select_option("")
        await page.locator("input[name=return_min]").fill("0.5")
        await page.locator("input[name=step_min]").fill("3")
        await address_has(page, "return_min=0.5")
        assert set(await page.locator(".rows .cell.return").all_inner_texts()) == {"1"}
        await page.locator(".header button", has_text="turns").click()
        await page.locator(".header button.sorted", has_text="turns ▾").wait_for()
        turns = [int(text) for text in await page.locator(".rows .row > :nth-child(9)").all_inner_texts()]
        assert turns == sorted(turns, reverse=True)
        second = await page.locator(".rows .row").nth(1).locator("span").first.inner_text()
        await page.keyboard.press("j")
        await page.keyboard.press("Enter")
        await page.locator("h2", has_text=f"Episode {second}").wait_for()
        await page.go_back()
        await page.locator(".rows .row.selected").wait_for()
        await address_has(page, "return_min=0.5")


async def test_failed_and_forked_episodes_are_found(run_dir: Path) -> None:
    async with shown(run_dir, place="#/episodes?outcome=failed") as page:
        await page.locator(".rows .row").first.wait_for()
        assert set(await page.locator(".rows .row > :nth-child(8)").all_inner_texts()) == {"failed"}
        await page.locator("select[name=outcome]").select_option("")
        await page.locator("select[name=fork]").select_option("history_edited")
        forks = await page.locator(".rows .row > :nth-child(13)").all_inner_texts()
        assert forks
        assert all("history edited" in text for text in forks)


async def test_the_texts_are_searched(run_dir: Path) -> None:
    async with shown(run_dir, place="#/episodes") as page:
        await page.locator(".rows .row").first.wait_for()
        await page.keyboard.press("s")
        await page.keyboard.type("What is 5 + 3? </script>")
        await page.keyboard.press("Enter")
        await page.locator("#search-state", has_text="1 found, 4 of 4 files read").wait_for()
        assert await page.locator(".rows .row").count() == 1
        await address_has(page, "text=What")


async def test_an_episode_is_a_conversation_and_a_layer_of_tokens(run_dir: Path) -> None:
    async with shown(run_dir, place="#/episode/0.0.0") as page:
        await page.locator(".role-assistant").first.wait_for()
        assert HOSTILE in await page.locator(".role-assistant .text").first.inner_text()
        assert "You add numbers." in await page.locator(".role-system").inner_text()
        assert "solver" in await page.locator(".role-assistant header").first.inner_text()
        assert "advantage −0.5" in await page.locator(".role-assistant header").first.inner_text()
        await page.keyboard.press("2")
        token = page.locator(".tokens.output .token").first
        assert "heat-" in (await token.get_attribute("class") or "")
        await token.hover()
        tip = await page.locator("#tip").inner_text()
        for fact in ("log-prob", "probability", "version", "difference", "advantage"):
            assert fact in tip
        for name, kind in (("difference", "heat-"), ("version", "version-1"), ("mask", "trained"), ("advantage", "heat-10")):
            await page.locator(f"[data-layer={name}]").click()
            assert kind in (await page.locator(".tokens.output .token").first.get_attribute("class") or "")
        await address_has(page, "layer=advantage")


async def test_a_branch_is_picked_in_the_tree(run_dir: Path) -> None:
    forked = next(s for s in indexed(run_dir) if s["branches"] > 1 and s["forks"])
    async with shown(run_dir, place=f"#/episode/{forked['episode_id']}") as page:
        dots = page.locator(".tree .turn")
        await dots.first.wait_for()
        assert await dots.count() == forked["turns"]
        assert await page.locator(".tree .turn.forked").count() == sum(forked["forks"].values())
        reason = next(iter(forked["forks"])).replace("_", " ")
        assert reason in await page.locator(".fork-list").inner_text()
        off = page.locator(".tree .turn:not(.on)").first
        turn = await off.get_attribute("data-turn")
        await off.click()
        await page.locator(f".tree .turn.on[data-turn='{turn}']").wait_for()
        await address_has(page, "leaf=")


async def test_two_episodes_of_a_group_stand_side_by_side(run_dir: Path) -> None:
    async with shown(run_dir, place="#/episode/1.0.0") as page:
        await page.locator(".siblings .compare").first.click()
        await page.locator(".compared h2", has_text="Episode 1.1.0").wait_for()
        assert await page.locator(".compared mark").count() > 0
        assert await page.locator(".compare-facts tr").count() > 0


async def test_the_ages_of_trained_tokens_are_counted_for_a_step(run_dir: Path) -> None:
    async with shown(run_dir, place="#/staleness?step=2") as page:
        await page.locator("p.note", has_text="of age 1").wait_for()
        await page.locator("input[type=range]").fill("3")
        await page.locator("h3", has_text="step 3").wait_for()


async def test_the_page_follows_a_run_that_grows_and_one_that_goes_back(run_dir: Path, tmp_path: Path) -> None:
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(lines[:2]))
    async with shown(tmp_path) as page:
        await page.locator("#state", has_text="step 2").wait_for()
        with path.open("ab") as file:  # as a run does; a file that is replaced in place is empty for a moment
            file.write(lines[2])
        await page.locator("#state", has_text="step 3").wait_for()
        mark = {"event": "resumed", "step": 1, "groups_admitted": 0, "groups_open": [], "evaluations_due": [], "wall_s": 1}
        with path.open("ab") as file:
            file.write(orjson.dumps(mark) + b"\n")
        await page.locator("#state", has_text="step 1").wait_for()


async def test_a_run_without_episodes_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("engine: {save_trajectories: false}\n")
    async with shown(tmp_path, place="#/episodes") as page:
        assert "engine.save_trajectories" in await page.locator(".empty").inner_text()


async def test_hostile_text_stays_text_in_every_view(run_dir: Path) -> None:
    failed = next(s["episode_id"] for s in indexed(run_dir) if s["failure"])
    places = [
        "#/episodes",
        "#/episode/0.0.0",
        "#/episode/0.0.0?layer=logprob",
        f"#/episode/{failed}",
        "#/compare/0.0.0/0.1.0",
    ]
    async with shown(run_dir) as page:
        for place in places:
            await page.evaluate("place => location.hash = place", place)
            await page.locator("main > *").first.wait_for()
            await page.locator("main > p.note", has_text="Reading").wait_for(state="detached")
            assert await page.evaluate("window.hacked") is None
            assert await page.locator("main img, main script").count() == 0


async def test_a_file_with_one_episode_opens_from_the_disk(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "episode.html"
    write_episode(RunData(run_dir), file, "0.0.0")
    async with browser_page(offline=True) as page:
        await page.goto(f"file://{file}")
        assert HOSTILE in await page.locator(".role-assistant .text").first.inner_text()
        await page.keyboard.press("2")
        await page.locator(".tokens.output .token").first.wait_for()
        assert await page.evaluate("window.hacked") is None


async def test_fifty_thousand_episodes_open_and_scroll(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "large", steps=736, with_records=False)
    async with serving_view(RunData(run_dir)) as url, browser_page() as page:
        await page.goto(url + "#/episodes")
        await page.locator(".rows .row").first.wait_for()
        assert "50 048 of 50 048" in (await page.locator("#episode-count").inner_text()).replace("\u202f", " ")
        assert await page.locator(".rows .row").count() < 100
        await page.locator(".scroller").evaluate("node => node.scrollTop = node.scrollHeight")
        await page.locator(".rows .row", has_text="train-0").first.wait_for()
