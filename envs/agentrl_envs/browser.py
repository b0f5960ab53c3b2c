"""A headless Chromium on the pages of a folder: the policy reads numbered elements, and clicks, types and opens by tools.

Invariant: the browser gets the files of the folder and nothing else. They are handed to it without a server, and every other
address, on this machine too, is out of reach. Each episode has a browser profile of its own. Chromium runs without its own
sandbox, so the pages must be trusted. Needs the asyncio event loop, as Playwright does.
"""

from __future__ import annotations

import asyncio
import json
import mimetypes
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import unquote, urljoin, urlsplit

import anyio

from agentrl.env import ChatStart, ChatStep, EpisodeEnd
from agentrl.errors import ConfigError
from agentrl.types import Message, Task
from agentrl_envs.browser_actions import ACTIONS, action_schema, read_call

ORIGIN: Final = "http://site.test/"  # where the pages seem to be
_FLAGS: Final = [
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-dev-shm-usage", "--webrtc-ip-handling-policy=disable_non_proxied_udp"),
    *("--proxy-server=http://127.0.0.1:9", "--proxy-bypass-list=<-loopback>"),  # a port that nothing listens on
]
_IS_DONE: Final = "() => { try { return Boolean(%s) } catch (e) { if (e instanceof TypeError) return false; throw e } }"
"""A goal may ask for an element that other pages do not have."""
_ONE_WINDOW: Final = "window.open = url => { location.assign(url); return window }"


class BrowserEnvironment:
    """A site of local pages in a headless Chromium.

    A task has `question`, may have `start` (a path), and has one or both of `goal`, a JavaScript expression that is true on
    the page when the task is done, and `answer`, a text that the last message contains, which calls no tool. The reward is
    1 or 0, when the task is done or the policy answers without a call.

    Args:
        site: folder of the pages.
        max_chars: of page text in one observation.
        executable: Chromium; None: `chromium` or `chromium-browser` of the system.

    Raises:
        ConfigError: there is no such folder, or Playwright or Chromium is not installed.
    """

    extra = "agentrl[browser]"
    needs_packages = ("playwright",)

    def __init__(self, site: str, *, max_chars: int = 2_000, executable: str | None = None) -> None:
        program = executable or shutil.which("chromium") or shutil.which("chromium-browser")
        if program is None or not Path(program).is_file():
            raise ConfigError("BrowserEnvironment: Chromium is not installed; run `make browser-install`")
        if not Path(site).is_dir():
            raise ConfigError(f"BrowserEnvironment: site must be a folder of pages, got {site!r}")
        self._site, self._max_chars, self._executable = Path(site).resolve(), max_chars, program
        self._observe = Path(__file__).with_name("browser_page.js").read_text(encoding="utf-8")
        self._task = Task(id="", data={})
        self._driver: Any = None
        self._browser: Any = None
        self._page: Any = None

    @classmethod
    def check_arguments(cls, site: str, **options: Any) -> None:  # noqa: ANN401 - those of the class
        """Refuse what the class refuses, before anything else starts."""
        cls(site, **options)

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        """Open the task's first page in a new profile.

        Raises:
            ConfigError: the event loop is not asyncio's, or Playwright is not installed.
        """
        if "goal" not in task.data and "answer" not in task.data:
            raise ConfigError(f"task {task.id}: a browser task needs `goal` or `answer`, it has {sorted(task.data)}")
        self._task = task
        browser = self._browser or await self._launch()
        if self._page is not None:
            await self._page.context.close()
        context = await browser.new_context(service_workers="block", accept_downloads=False)
        context.set_default_timeout(5_000)
        await context.route("**/*", self._serve)
        await context.add_init_script(_ONE_WINDOW)
        self._page = await context.new_page()
        await self._page.goto(urljoin(ORIGIN, str(task.data.get("start", "/"))))
        content = f"{task['question']}\n\n{await self._look()}"
        return ChatStart(messages=[{"role": "user", "content": content}], tools=[action_schema(name) for name in ACTIONS])

    async def step(self, message: Message) -> ChatStep:
        """Do the tool calls of a message in their order; a message without any ends the episode."""
        calls = cast("list[Mapping[str, Any]]", message.get("tool_calls") or [])
        if not calls:
            wanted = self._task.data.get("answer")
            is_right = wanted is not None and str(wanted).lower() in str(message.get("content") or "").lower()
            return self._ended(is_right or await self._is_done())
        replies: list[Message] = []
        for call in calls:
            text = await self._act(call.get("function") or {})
            replies.append({"role": "tool", "tool_call_id": str(call.get("id", "")), "content": text})
            if await self._is_done():
                return self._ended(True)
        return ChatStep(messages=replies)

    async def close(self) -> None:
        """End the browser."""
        browser, self._browser, driver, self._driver = self._browser, None, self._driver, None
        try:
            if browser is not None:
                with anyio.move_on_after(2):
                    await browser.close()
        finally:
            if driver is not None:
                await driver.stop()

    async def _launch(self) -> Any:  # noqa: ANN401 - Playwright is imported only where it is used
        try:
            asyncio.get_running_loop()
            from playwright.async_api import async_playwright  # pyright: ignore[reportMissingImports] - the extra `browser`
        except RuntimeError:
            raise ConfigError("BrowserEnvironment needs the asyncio event loop, as Playwright does") from None
        except ImportError as error:
            raise ConfigError("Playwright is not installed; run `pip install 'agentrl[browser]'`") from error
        self._driver = await async_playwright().start()
        launch = self._driver.chromium.launch
        self._browser = await launch(executable_path=self._executable, chromium_sandbox=False, args=_FLAGS)
        return self._browser

    async def _serve(self, route: Any) -> None:  # noqa: ANN401 - as above
        """Answer a request of the browser with a file of the site, or not at all."""
        url = urlsplit(route.request.url)
        if f"{url.scheme}://{url.netloc}/" != ORIGIN:
            await route.abort("blockedbyclient")
            return
        file = self._site.joinpath(unquote(url.path).replace("\0", "").lstrip("/")).resolve()
        file = file / "index.html" if file.is_dir() else file
        if file.is_relative_to(self._site) and file.is_file():
            kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
            await route.fulfill(status=200, content_type=kind, body=file.read_bytes())
        else:
            await route.fulfill(status=404, content_type="text/plain", body="There is no such page.")

    async def _act(self, function: Mapping[str, Any]) -> str:
        """Do one call and return what the policy sees: the page, or what was wrong with the call."""
        from playwright.async_api import Error  # pyright: ignore[reportMissingImports]

        name = str(function.get("name"))
        call = read_call(name, function.get("arguments"))
        if call is None:
            return f"error: expected a call of {', '.join(ACTIONS)} with their arguments, got {str(function)[:200]}"
        try:
            if name == "read":
                return (await self._page.evaluate(self._observe))["text"][max(call["start"], 0) :][: self._max_chars]
            if name == "goto":
                url = urljoin(ORIGIN, call["path"])
                if not url.startswith(ORIGIN):
                    return "error: only paths of this site can be opened"
                await self._page.goto(url)
            elif name == "back":
                await self._page.go_back()
            else:
                return await self._use(name, call)
            return await self._look()
        except Error as error:
            if self._page.is_closed() or not self._browser.is_connected():
                raise
            return f"error: {str(error).splitlines()[0][:200]}"

    async def _use(self, name: str, given: Mapping[str, Any]) -> str:
        element = self._page.locator(f"[data-agentrl='{given['number']}']")
        if not await element.count():
            return f"error: there is no element {given['number']} here"
        if name == "click":
            await element.click()
        elif await element.evaluate("element => element.tagName") == "SELECT":
            await element.select_option(label=given["text"])
        else:
            await element.fill(given["text"])
        await self._page.wait_for_load_state()
        return await self._look()

    async def _look(self) -> str:
        seen = await self._page.evaluate(self._observe)
        text: str = seen["text"]
        more = f"\n... {len(text) - self._max_chars} more characters; `read` them" if len(text) > self._max_chars else ""
        elements = "\n".join(seen["elements"])[: 4 * self._max_chars]
        page = f"{urlsplit(self._page.url).path} {json.dumps(seen['title'])}"
        return f"{page}\n{text[: self._max_chars]}{more}\n\nElements:\n{elements}"

    async def _is_done(self) -> bool:
        goal = self._task.data.get("goal")
        return goal is not None and bool(await self._page.evaluate(_IS_DONE % goal))

    def _ended(self, is_right: bool) -> ChatStep:
        return ChatStep(reward=float(is_right), end=EpisodeEnd.TERMINATED, metrics={"success": float(is_right)})
