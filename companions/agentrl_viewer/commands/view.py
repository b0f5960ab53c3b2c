"""`agentrl view`: serve the page of a run until Ctrl-C, or write one episode to a file.

Invariant: the command writes nothing but the file that `--html` names, and for files of other programs a folder of its own,
which it removes.
"""

from __future__ import annotations

import signal
import webbrowser
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import anyio
from anyio import to_thread

from agentrl.errors import ConfigError
from agentrl_viewer.exchange.foreign_run import is_foreign, write_foreign_run
from agentrl_viewer.view.data import RunData
from agentrl_viewer.view.export import write_episode
from agentrl_viewer.view.server import serving_view


def view_command(
    run: Path,
    other: Path | None = None,
    /,
    *,
    port: int = 0,
    open: bool = True,
    html: Path | None = None,
    episode: str | None = None,
) -> None:
    """Show a run in the browser, live or ended: curves, who waits for whom, episodes as conversations and as tokens.

    Args:
        run: Directory of the run, such as runs/NAME; or a file, or folder, of ATIF trajectories of other programs.
        other: Directory of another run, to compare the two: curves over each other, fields that differ, tasks of both.
        port: Port to listen on at 127.0.0.1; 0 picks a free one.
        open: Open the page in the browser of this machine.
        html: Write one episode to this file instead, which opens without a server.
        episode: The episode to show first, or to write with --html; there the default is the best of the newest step.
    """
    if other is not None and html is not None:
        raise ConfigError("--html writes an episode of one run; leave the second run out")
    runs = [run] if other is None else [run, other]
    view_run(runs, port=port, opens_browser=open, html=html, episode_id=episode)


def view_run(paths: Sequence[Path], *, port: int, opens_browser: bool, html: Path | None, episode_id: str | None) -> None:
    """Serve one run, or two to compare, until a signal; or write one episode of the first to `html`.

    Args:
        paths: directory of each run, or a file or folder of trajectories of other programs.
        port: to listen on at loopback; 0 picks a free one.
        opens_browser: open the page in the browser of this machine.
        html: file for one episode; None: serve.
        episode_id: the one to write, or to open first.
    """
    if not 0 <= port <= 65_535:
        raise ConfigError(f"--port: expected 0 to 65535, got {port}; 0 picks a free one")
    with ExitStack() as stack:
        runs = [stack.enter_context(opened(path)) for path in paths]
        if html is not None:
            written = write_episode(runs[0], html, episode_id)
            print(f"wrote episode {written} of {paths[0]} to {html}")
            return
        if episode_id is not None:
            runs[0].episode(episode_id)
        anyio.run(_serve_until_stopped, runs, port, opens_browser, episode_id)


@contextmanager
def opened(path: Path) -> Generator[RunData]:
    """Read a run, or trajectories of other programs, inside the block."""
    if not is_foreign(path):
        yield RunData(path)
        return
    with TemporaryDirectory(prefix="agentrl-view-") as folder:
        closing = write_foreign_run(path, Path(folder))
        yield RunData(Path(folder), source=path, closing=closing)


async def _serve_until_stopped(runs: Sequence[RunData], port: int, opens_browser: bool, episode_id: str | None) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with serving_view(*runs, port=port) as url:
            address = f"{url}{_first_place(runs[0], episode_id)}"
            print(f"{' against '.join(str(data.source.resolve()) for data in runs)} is at {address}")
            print("The address carries the key to the page; Ctrl-C ends the viewer.", flush=True)
            if opens_browser:
                await to_thread.run_sync(webbrowser.open, address)
            await anext(signals)


def _first_place(run: RunData, episode_id: str | None) -> str:
    """Return the part of the page to open; files of other programs have no curves."""
    if episode_id is not None:
        return f"#/episode/{quote(episode_id, safe='')}"
    return "" if run.source.resolve() == run.path else "#/episodes"
