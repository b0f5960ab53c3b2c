"""`agentrl view`: serve the page of a run until Ctrl-C, or write one episode to a file.

Invariant: the command writes nothing but the file that `--html` names.
"""

from __future__ import annotations

import signal
import webbrowser
from pathlib import Path

import anyio
from anyio import to_thread

from agentrl.errors import ConfigError
from agentrl.view.data import RunData
from agentrl.view.export import write_episode
from agentrl.view.server import serving_view


def view_run(path: Path, *, port: int, opens_browser: bool, html: Path | None, episode_id: str | None) -> None:
    """Serve `path` until a signal, or write one episode of it to `html`.

    Args:
        path: directory of a run.
        port: to listen on at loopback; 0 picks a free one.
        opens_browser: open the page in the browser of this machine.
        html: file for one episode; None: serve.
        episode_id: the one to write, or to open first.

    Raises:
        ConfigError: there is no such run or episode, or the port or the file cannot be used.
    """
    if not 0 <= port <= 65_535:
        raise ConfigError(f"--port: expected 0 to 65535, got {port}; 0 picks a free one")
    if html is not None:
        written = write_episode(path, html, episode_id)
        print(f"wrote episode {written} of {path} to {html}")
        return
    data = RunData(path)
    if episode_id is not None:
        data.episode(episode_id)
    anyio.run(_serve_until_stopped, data, port, opens_browser, episode_id)


async def _serve_until_stopped(data: RunData, port: int, opens_browser: bool, episode_id: str | None) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with serving_view(data, port=port) as url:
            address = url if episode_id is None else f"{url}#/episode/{episode_id}"
            print(f"{data.path} is at {address}")
            print("The address carries the key to the page; Ctrl-C ends the viewer.", flush=True)
            if opens_browser:
                await to_thread.run_sync(webbrowser.open, address)
            await anext(signals)
