"""The server of the viewer: who gets an answer, what is new since an offset, and a search that streams."""

from __future__ import annotations

import gzip
import shutil
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
import anyio
import anyio.to_thread
import orjson
import pytest
from yarl import URL

from agentrl.errors import ConfigError
from agentrl.observe.episode_files import read_lines, step_file, trained_file
from agentrl_viewer.view.data import RunData
from agentrl_viewer.view.episode_search import search_texts
from agentrl_viewer.view.server import serving_view
from agentrl_viewer.view.token_ages import trained_ages
from tests.support.synthetic_run import EPISODES_A_STEP, HOSTILE, write_run

TOKEN = "token-of-a-test"


@pytest.fixture
def anyio_backend() -> str:
    """aiohttp needs asyncio."""
    return "asyncio"


@asynccontextmanager
async def reader(*run_dirs: Path) -> AsyncGenerator[aiohttp.ClientSession]:
    """A session with the cookie that the address gives."""
    async with serving_view(*map(RunData, run_dirs), token=TOKEN) as url:
        parts = urlsplit(url)
        base = f"{parts.scheme}://{parts.netloc}/"
        jar = aiohttp.CookieJar(unsafe=True)  # keeps cookies of IP addresses
        async with aiohttp.ClientSession(base, cookie_jar=jar) as session:
            async with session.get(url) as reply:
                assert (reply.status, reply.url) == (200, URL(base))
            yield session


@asynccontextmanager
async def stranger(run_dir: Path) -> AsyncGenerator[aiohttp.ClientSession]:
    async with serving_view(RunData(run_dir), token=TOKEN) as url:
        parts = urlsplit(url)
        async with aiohttp.ClientSession(f"{parts.scheme}://{parts.netloc}/") as session:
            yield session


async def read(session: aiohttp.ClientSession, path: str) -> dict[str, Any]:
    async with session.get(path) as reply:
        assert reply.status == 200, await reply.text()
        return orjson.loads(await reply.read())


@pytest.mark.parametrize(
    "path", ["/", "/?token=guess", "/data/run", "/data/metrics?token=token-of-a-test", "/data/search?text=a"]
)
async def test_nothing_is_answered_without_the_token(run_dir: Path, path: str) -> None:
    async with stranger(run_dir) as session, session.get(path, allow_redirects=False) as reply:
        assert reply.status == 403
        assert "token is missing or wrong" in await reply.text()
        assert "Set-Cookie" not in reply.headers


async def test_the_address_becomes_a_cookie_that_scripts_and_other_sites_cannot_use(run_dir: Path) -> None:
    async with stranger(run_dir) as session, session.get(f"/?token={TOKEN}", allow_redirects=False) as reply:
        assert (reply.status, reply.headers["Location"]) == (303, "/")
        cookie = reply.headers["Set-Cookie"]
        assert cookie.startswith("agentrl_view_")
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie


async def test_a_host_name_of_another_site_is_refused(run_dir: Path) -> None:
    async with reader(run_dir) as session:
        async with session.get("/data/run", headers={"Host": "rebound.example"}) as reply:
            assert reply.status == 403
            assert "'rebound.example' is not this machine" in await reply.text()
        async with session.get("/data/run", headers={"Host": f"localhost:{session._base_url.port}"}) as reply:  # pyright: ignore
            assert reply.status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_the_viewer_only_reads(run_dir: Path, method: str) -> None:
    async with reader(run_dir) as session, session.request(method, "/data/run") as reply:
        assert reply.status == 405


async def test_every_answer_forbids_what_the_page_does_not_need(run_dir: Path) -> None:
    async with reader(run_dir) as session:
        for path in ("/", "/data/run", "/no/such/page"):
            async with session.get(path) as reply:
                assert reply.headers["X-Content-Type-Options"] == "nosniff"
                assert reply.headers["X-Frame-Options"] == "DENY"
                assert reply.headers["Cache-Control"] == "no-store"
        async with session.get("/") as reply:
            assert "script-src 'sha256-" in await reply.text()


async def test_metrics_come_once_and_then_only_what_is_new(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:10])
    async with reader(tmp_path) as session:
        first = await read(session, "/data/metrics")
        assert [event["step"] for event in first["events"]] == [1, 2]  # half a line waits for its end
        path.write_bytes(b"".join(lines[:3]))
        second = await read(session, f"/data/metrics?from={first['next']}")
        assert [event["step"] for event in second["events"]] == [3]
        assert not second["reset"]
        assert (await read(session, f"/data/metrics?from={second['next']}"))["events"] == []


async def test_a_resumed_run_takes_back_what_was_shown(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    shutil.copy(run_dir / "metrics.jsonl", path)
    async with reader(tmp_path) as session:
        first = await read(session, "/data/metrics")
        mark = {"event": "resumed", "step": 2, "groups_admitted": 0, "groups_open": [], "evaluations_due": [], "wall_s": 1}
        with path.open("ab") as file:
            file.write(orjson.dumps(mark) + b"\n")
        second = await read(session, f"/data/metrics?from={first['next']}")
        assert second["reset"]
        assert [event["step"] for event in second["events"] if event["event"] == "step"] == [1, 2]
        assert second["next"].endswith(f"-{path.stat().st_size}")


async def test_a_run_that_began_again_replaces_what_was_shown(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    shutil.copy(run_dir / "metrics.jsonl", path)
    async with reader(tmp_path) as session:
        first = await read(session, "/data/metrics")
        other = tmp_path / "other"
        other.write_bytes((run_dir / "metrics.jsonl").read_bytes() * 2)  # longer than what was shown
        other.replace(path)
        second = await read(session, f"/data/metrics?from={first['next']}")
        assert (second["reset"], len(second["events"])) == (True, 2 * len(first["events"]))


async def test_episodes_come_as_columns(run_dir: Path) -> None:
    async with reader(run_dir) as session:
        found = await read(session, "/data/episodes")
        assert found["count"] == 4 * EPISODES_A_STEP + 16
        assert {len(values) for values in found["columns"].values()} == {found["count"]}
        assert found["columns"]["episode_id"][:2] == ["0.0.0", "0.1.0"]
        assert (await read(session, f"/data/episodes?from={found['next']}"))["count"] == 0


async def test_an_episode_has_the_text_of_each_token_and_what_was_trained(run_dir: Path) -> None:
    async with reader(run_dir) as session:
        episode = await read(session, "/data/episode/0.0.0")
        turn = episode["turns"][0]
        assert "".join(turn["output_texts"]) == turn["message"]["content"]
        assert len(turn["output_texts"]) == len(turn["output_ids"]) == len(turn["proximal_logprobs"])
        assert (turn["is_trained"], turn["advantage"], episode["trained"]["step"]) == (True, -0.5, 1)
        assert episode["task"]["answer"] == 1


async def test_an_episode_that_is_not_there_is_named(run_dir: Path) -> None:
    async with reader(run_dir) as session, session.get("/data/episode/99.9.9") as reply:
        assert reply.status == 404
        assert "99.9.9" in await reply.text()


async def test_the_ages_of_the_tokens_of_a_step_are_counted(run_dir: Path) -> None:
    async with reader(run_dir) as session:
        ages = (await read(session, "/data/staleness?step=2"))["tokens"]
        trained = await read(session, "/data/episodes")
        columns = trained["columns"]
        rows = [row for row in range(trained["count"]) if columns["step"][row] == 2 and columns["failure"][row] is None]
        assert set(ages) == {"1", "2"}
        assert sum(ages.values()) == sum(columns["output_tokens"][row] for row in rows)


async def test_only_trained_tokens_are_counted(run_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    folder = copy / "episodes"
    header, *records = read_lines(step_file(folder, 2))
    trained_header, *trained = read_lines(trained_file(folder, 2).with_suffix(""))
    greedy, masked = orjson.loads(trained[0]), orjson.loads(trained[1])
    masked["turns"][0]["proximal_logprobs"][0] = None
    trained[1] = orjson.dumps(masked) + b"\n"
    for at, record in enumerate(map(orjson.loads, records)):
        if record["episode_id"] == greedy["episode_id"]:
            record["turns"][0]["temperature"] = 0.0
            records[at] = orjson.dumps(record) + b"\n"
    packed = gzip.compress(b"".join([header, *records]))
    (folder / "step-000002.jsonl.gz").write_bytes(packed)
    trained_file(folder, 2).write_bytes(gzip.compress(b"".join([trained_header, *trained])))
    not_trained = len(greedy["turns"][0]["proximal_logprobs"]) + 1
    assert trained_ages(copy, 2).total() == trained_ages(run_dir, 2).total() - not_trained


async def search(session: aiohttp.ClientSession, text: str) -> list[dict[str, Any]]:
    async with session.get("/data/search", params={"text": text}) as reply:
        assert reply.status == 200, await reply.text()
        return [orjson.loads(line) for line in (await reply.read()).splitlines()]


async def test_a_search_reads_the_newest_files_first_and_tells_how_far_it_is(run_dir: Path) -> None:
    async with reader(run_dir) as session:
        answers = await search(session, "what IS 5 + 3?")
        assert [answer["files_read"] for answer in answers] == [1, 2, 3, 4]
        assert [len(answer["matches"]) for answer in answers] == [0, 1, 0, 0]
        assert answers[-1]["is_complete"]


class HeldRun(RunData):
    """Reads the frame of the page when it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_read, self.may_go_on = threading.Event(), threading.Event()

    def run(self, others: Sequence[Path] = ()) -> bytes:
        self.is_read.set()
        assert self.may_go_on.wait(300)
        return super().run(others)


async def test_searches_that_wait_leave_threads_to_readers(run_dir: Path) -> None:
    held = HeldRun(run_dir)
    async with (
        serving_view(held, token=TOKEN) as url,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as http,
    ):
        async with http.get(url):
            pass
        base = url.partition("/?")[0]

        async def read_frame() -> None:
            async with http.get(f"{base}/data/run") as reply:
                assert reply.status == 200

        async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            stack.callback(held.may_go_on.set)
            tasks.start_soon(read_frame)
            assert await anyio.to_thread.run_sync(held.is_read.wait, 300)
            for _ in range(60):  # more than there are threads; each has begun when its headers come
                await stack.enter_async_context(http.get(f"{base}/data/search", params={"text": "a"}))
            with anyio.fail_after(300):
                async with http.get(f"{base}/data/metrics") as reply:
                    assert reply.status == 200


async def test_a_search_finds_quoted_text_and_no_names_of_fields(run_dir: Path) -> None:
    async with reader(run_dir) as session:
        assert sum(len(answer["matches"]) for answer in await search(session, '{"a": 3, "b": 7}')) > 0
        assert sum(len(answer["matches"]) for answer in await search(session, HOSTILE)) > 0
        assert sum(len(answer["matches"]) for answer in await search(session, "output_logprobs")) == 0


def test_a_search_is_cut_only_where_more_is_found(run_dir: Path) -> None:
    everything = [name for answer in search_texts(run_dir, "what is") for name in cast("list[str]", answer["matches"])]
    for limit in (1, len(everything) - 1, len(everything)):
        answers = list(search_texts(run_dir, "what is", limit))
        found = [name for answer in answers for name in cast("list[str]", answer["matches"])]
        assert found == everything[:limit]
        assert (answers[-1]["is_cut"], answers[-1]["is_complete"]) == (limit < len(everything), limit == len(everything))


@pytest.mark.parametrize("query", ["from=-1", "from=x", "from=7"])
async def test_a_place_that_no_answer_gave_is_refused(run_dir: Path, query: str) -> None:
    async with reader(run_dir) as session, session.get(f"/data/metrics?{query}") as reply:
        assert reply.status == 400
        assert "expected what the answer before gave" in await reply.text()


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("config.yaml", "/data/run"),
        ("metrics.jsonl", "/data/metrics"),
        ("episodes/index.jsonl", "/data/episodes"),
        ("episodes/trained-000002.jsonl.gz", "/data/staleness?step=2"),
    ],
)
async def test_a_file_that_cannot_be_read_is_named(run_dir: Path, tmp_path: Path, name: str, path: str) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    (copy / "episodes" / "index.jsonl").unlink()
    (copy / name).write_bytes(b"{broken: [\n")
    async with reader(copy) as session, session.get(path) as reply:
        text = await reply.text()
        assert (reply.status, reply.headers["X-Frame-Options"]) == (500, "DENY"), text
        assert f"cannot read {copy.resolve() / name.partition('trained')[0]}".rstrip("/") in text


async def test_a_search_in_a_file_that_cannot_be_read_names_it(run_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    (copy / "episodes" / "step-000002.jsonl.gz").write_bytes(b"broken")
    async with reader(copy) as session:
        answers = await search(session, "what is")
    assert len(answers) == 3
    assert "BadGzipFile" in answers[-1]["problem"]


async def test_a_cookie_that_is_not_text_is_refused(run_dir: Path) -> None:
    async with serving_view(RunData(run_dir), token=TOKEN) as url:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        async with await anyio.connect_tcp(parts.hostname, parts.port) as stream:
            cookie = f"agentrl_view_{parts.port}=".encode() + b"\xff\xfe"
            await stream.send(b"GET / HTTP/1.1\r\nHost: " + parts.netloc.encode() + b"\r\nCookie: " + cookie + b"\r\n\r\n")
            assert (await stream.receive()).startswith(b"HTTP/1.1 403 ")


async def test_a_port_that_is_taken_is_refused(run_dir: Path) -> None:
    async with serving_view(RunData(run_dir)) as url:
        port = urlsplit(url).port
        assert port is not None
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with serving_view(RunData(run_dir), port=port):
                pass


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected the directory of a run"):
        RunData(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"with config\.yaml or metrics\.jsonl in it"):
        RunData(tmp_path)


async def test_two_runs_are_asked_by_number_and_compared(run_dir: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", steps=2, seed=1, fields={"seed": 7})
    async with reader(run_dir, other) as session:
        names = [(await read(session, f"/data/run?run={number}"))["name"] for number in (0, 1)]
        assert names == [run_dir.name, "other"]
        assert (await read(session, "/data/episodes?run=1"))["count"] == 2 * EPISODES_A_STEP
        found = await read(session, "/data/comparison")
        assert {"path": "seed", "left": "0", "right": "7"} in found["fields"]
        loss = next(figure for figure in found["figures"] if figure["key"] == "trainer.loss")
        assert (loss["name"], loss["event"]) == ("loss", "step")
        assert {task["purpose"] for task in found["tasks"]} == {"training"}  # the other run has not evaluated
        assert all(len(task["left"]["episode_ids"]) == 8 for task in found["tasks"])


@pytest.mark.parametrize(("path", "status"), [("/data/run?run=1", 400), ("/data/run?run=x", 400), ("/data/comparison", 404)])
async def test_a_run_that_is_not_shown_is_refused(run_dir: Path, path: str, status: int) -> None:
    async with reader(run_dir) as session, session.get(path) as reply:
        assert reply.status == status


async def test_metrics_come_with_words_for_their_keys(run_dir: Path) -> None:
    async with reader(run_dir) as session:
        names = (await read(session, "/data/metrics"))["names"]
        assert names["trainer.kl_behavior_proximal_k3"]["name"] == "KL, estimate k3"
        assert names["success_rate"]["unit"] == "share"
