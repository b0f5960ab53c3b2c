"""Local pages in a real Chromium: elements with numbers, actions as tools, rewards by the task, and no way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.env import ChatStep, EnvironmentPool, EpisodeEnd, load_environment
from agentrl.env.chat import ChatEpisode
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.types import Task
from agentrl_envs.browser import BrowserEnvironment

pytestmark = [
    pytest.mark.external,
    pytest.mark.skipif(
        shutil.which("chromium") is None and shutil.which("chromium-browser") is None,
        reason="Chromium is missing: make browser-install",
    ),
]
SITE = str(Path(__file__).parents[1] / "support" / "pages")
GOAL = "document.title === 'Thanks, Ann, for blue'"


@pytest.fixture
def anyio_backend() -> str:
    """Playwright needs asyncio."""
    return "asyncio"


def task(**data: Any) -> Task:  # noqa: ANN401 - a task's fields
    return Task(id="t", data={"question": "Order a blue one for Ann.", **data})


def call(name: str, arguments: str | None = None, **given: object) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(given) if arguments is None else arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


def pool(**args: Any) -> EnvironmentPool:  # noqa: ANN401 - as above
    return EnvironmentPool(lambda: BrowserEnvironment(SITE, **args), name="browser")


async def text_after(episode: ChatEpisode, message: dict[str, Any]) -> str:
    step = await episode.step(message)
    [reply] = step.messages
    assert (reply["role"], reply["tool_call_id"]) == ("tool", "c1")
    return reply["content"]


async def test_a_task_is_done_by_clicking_typing_and_choosing() -> None:
    async with pool() as pages, pages.episode(task(goal=GOAL), seed=0) as episode:
        seen = episode.start.messages[0]["content"]
        assert seen.startswith('Order a blue one for Ann.\n\n/ "Shop"\nShop\n')
        assert '[4] text "Name" = ""\n[5] list "Color" = "red" of ["red","blue"]\n[6] button "Order"' in seen
        assert "secret" not in seen
        assert "Invisible" not in seen
        assert [tool["function"]["name"] for tool in episode.start.tools] == ["click", "type", "goto", "back", "read"]  # pyright: ignore
        assert '[4] text "Name" = "Ann"' in await text_after(episode, call("type", number=4, text="Ann"))
        assert '[5] list "Color" = "blue"' in await text_after(episode, call("type", number=5, text="blue"))
        last = await episode.step(call("click", number=6))
        assert last == ChatStep(reward=1.0, end=EpisodeEnd.TERMINATED, metrics={"success": 1.0})


async def test_pages_are_followed_read_and_left() -> None:
    async with pool(max_chars=100) as pages, pages.episode(task(goal="false", answer="4711"), seed=0) as episode:
        text = await text_after(episode, call("click", number=1))
        assert text.startswith('/about.html "About"\nThe code is 4711.')
        assert "more characters; `read` them" in text
        assert (await text_after(episode, call("read", start=21))).startswith("rd word")
        assert (await text_after(episode, call("back"))).startswith('/ "Shop"')
        assert (await text_after(episode, call("goto", path="about.html"))).startswith('/about.html "About"')
        answered = await episode.step({"role": "assistant", "content": "It is 4711."})
        assert (answered.reward, answered.end) == (1.0, EpisodeEnd.TERMINATED)


async def test_a_wrong_answer_pays_nothing_and_each_episode_has_a_new_profile() -> None:
    async with pool() as pages:
        for content, reward in (("I do not know.", 0.0), ("4711", 1.0)):
            async with pages.episode(task(answer="4711", start="/about.html"), seed=0) as episode:
                assert episode.start.messages[0]["content"].startswith('Order a blue one for Ann.\n\n/about.html "About"')
                assert (await episode.step({"role": "assistant", "content": content})).reward == reward
        assert pages.num_started == 1


WRONG = [
    (call("click", number=99), "error: there is no element 99 here"),
    (call("click", number="1"), "error: expected a call of click, type, goto, back, read with their arguments"),
    (call("click", number=True), "error: expected a call"),
    (call("click"), "error: expected a call"),
    (call("click", number=1, x=2), "error: expected a call"),
    (call("dance"), "error: expected a call"),
    (call("goto", "not json"), "error: expected a call"),
    (call("goto", "[" * 100_000), "error: expected a call"),
    (call("goto", path="https://example.org/"), "error: only paths of this site"),
    (call("goto", path="//example.org/"), "error: only paths of this site"),
    (call("goto", path="file:///etc/passwd"), "error: only paths of this site"),
    (call("goto", path="javascript:document.title='x'"), "error: only paths of this site"),
    (call("goto", path="../../../../etc/passwd"), "There is no such page."),
    (call("goto", path="/%2e%2e/test_tools.py"), "There is no such page."),
    (call("goto", path="/..%2fguessing.py"), "There is no such page."),
    (call("goto", path="/%00"), "Shop"),
    (call("type", number=5, text="green"), "error: Locator.select_option"),
    (call("type", number=1, text="x"), "error: Locator.fill"),
]


async def test_calls_that_are_wrong_are_told_and_change_nothing() -> None:
    async with pool() as pages, pages.episode(task(goal="false"), seed=0) as episode:
        for message, told in WRONG:
            assert told in await text_after(episode, message), message
            assert '"Shop"' in await text_after(episode, call("goto", path="/"))


async def test_no_page_reaches_a_server_on_this_machine() -> None:
    reached: list[bytes] = []

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            reached.append(await stream.receive(100))

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        goal = "document.title.startsWith('Done')"
        made = [BrowserEnvironment(SITE)]
        pages = EnvironmentPool(lambda: made[0], name="browser")
        async with pages.episode(task(goal="false", start=f"/leak.html?port={port}"), seed=0) as episode:
            page: Any = vars(made[0])["_page"]
            await page.wait_for_function(goal, timeout=120_000)
            assert await page.title() == "Done: closed closed closed"
            assert (await episode.step(call("back"))).end is None
        tasks.cancel_scope.cancel()
    assert reached == []


async def test_a_link_out_is_blocked_and_one_to_a_window_stays_in_this_one() -> None:
    async with pool() as pages, pages.episode(task(goal="false"), seed=0) as episode:
        assert "ERR_BLOCKED_BY_CLIENT" in await text_after(episode, call("click", number=3))
        await text_after(episode, call("goto", path="/"))
        assert "The code is 4711" in await text_after(episode, call("click", number=2))


async def test_a_goal_with_a_mistake_is_a_fault_and_one_for_another_page_is_not() -> None:
    async with pool() as pages:
        with pytest.raises(EnvironmentFault, match="ReferenceError"):
            async with pages.episode(task(goal="documnet.title"), seed=0) as episode:
                await episode.step(call("back"))
        async with pages.episode(task(goal="document.querySelector('#long').id === 'long'"), seed=0) as episode:
            assert (await episode.step(call("click", number=6))).end is None
            assert (await episode.step(call("click", number=1))).reward == 1.0


async def test_a_task_without_a_goal_or_answer_and_a_missing_folder_are_refused() -> None:
    with pytest.raises(EnvironmentFault, match="needs `goal` or `answer`"):
        async with pool() as pages, pages.episode(task(), seed=0):
            pass
    with pytest.raises(ConfigError, match="must be a folder"):
        load_environment("agentrl_envs.browser:BrowserEnvironment", {"site": "/nowhere"})
    with pytest.raises(ConfigError, match="make browser-install"):
        BrowserEnvironment(SITE, executable="/nowhere/chromium")
