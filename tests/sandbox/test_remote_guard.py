"""What a sandbox server refuses: calls that a web page could send, late and compressed requests, more than it gives."""

from __future__ import annotations

import base64
import gzip
import io
import json
from contextlib import suppress

import aiohttp
import anyio
import pytest

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox import SandboxConfig, open_sandbox
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.hosts.command import sandbox_host_command
from agentrl_sandbox.hosts.server import MAX_LIMITS
from agentrl_sandbox.remote import open_remote
from agentrl_sandbox.types import Limits, Program, python_program
from tests.support.hosts import serving_sandbox

PROGRAM = {"argv": ["true"]}
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # aiohttp knows no other


async def _post(url: str, path: str, body: bytes | object, **headers: str) -> tuple[int, str]:
    data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
    async with (
        aiohttp.ClientSession(headers={**JSON, **headers}) as http,
        http.post(url + path, data=data) as response,
    ):
        return response.status, str((await response.json()).get("error", ""))


@pytest.mark.starts
@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"Host": "evil.example"}, "Host 'evil.example' is not this machine"),
        ({"Origin": "https://evil.example"}, "Origin 'https://evil.example' is another site"),
        ({"Content-Type": "text/plain"}, "Content-Type 'text/plain' is not application/json"),
        ({"Sec-Fetch-Site": "cross-site"}, "Sec-Fetch-Site 'cross-site' is another site"),
    ],
)
async def test_without_a_key_a_web_page_starts_no_program(sandbox: BoxSandbox, headers: dict[str, str], why: str) -> None:
    async with serving_sandbox(sandbox) as url:
        for path, body in (("/run", PROGRAM), ("/sessions", {}), ("/sessions/x", {})):
            status, said = await _post(url, path, body, **headers)
            assert (status, why in said) == (403, True), said
        assert (await _post(url, "/run", PROGRAM))[0] == 200
        async with open_remote(url, limits=Limits(wall_s=60)) as remote:
            assert (await remote.run(python_program("print(1)"))).text == "1"


@pytest.mark.starts
@pytest.mark.parametrize(
    ("site", "expected"), [(None, 200), ("none", 200), ("same-origin", 200), ("same-site", 403), ("cross-site", 403)]
)
async def test_without_a_key_no_other_site_reads_what_the_server_is(
    sandbox: BoxSandbox, site: str | None, expected: int
) -> None:
    headers = {} if site is None else {"Sec-Fetch-Site": site}  # as of an image of a page, which names no origin
    async with (
        serving_sandbox(sandbox) as url,
        aiohttp.ClientSession() as http,
        http.get(url + "/state", headers=headers) as response,
    ):
        assert response.status == expected


@pytest.mark.starts
async def test_a_compressed_body_is_refused_before_it_grows(sandbox: BoxSandbox) -> None:
    async with serving_sandbox(sandbox, api_key="key") as url:
        body = gzip.compress(b" " * (64 << 20))
        status, said = await _post(url, "/run", body, **{"Content-Encoding": "gzip", "Authorization": "Bearer key"})
    assert (status, said) == (415, "Content-Encoding 'gzip' is not read here: send the body as it is")


@pytest.mark.starts
@pytest.mark.parametrize("sent", [b"POST /run HTTP/1.1\r\nHost: local", b"POST /run HTTP/1.1\r\nHost: localhost\r\n%s{"])
async def test_a_request_that_is_never_finished_ends(sandbox: BoxSandbox, sent: bytes) -> None:
    rest = b"Content-Type: application/json\r\nContent-Length: 400\r\n\r\n"
    async with (
        serving_sandbox(sandbox, headers_s=0.1, body_s=0.1) as url,
        await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2])) as stream,
    ):
        await stream.send(sent.replace(b"%s", rest))
        with anyio.fail_after(300), suppress(anyio.EndOfStream):
            while True:
                await stream.receive()


@pytest.mark.starts
@pytest.mark.parametrize("name", list(dict(MAX_LIMITS)))
async def test_a_limit_over_the_servers_maximum_is_refused_by_name(sandbox: BoxSandbox, name: str) -> None:
    most = dict(MAX_LIMITS)[name]
    over = dict.fromkeys([name], 86_400 if name == "wall_s" else 4096 if name == "processes" else 10**9)
    async with serving_sandbox(sandbox) as url:
        for path, body in (("/run", {**PROGRAM, "limits": over}), ("/sessions", {"limits": over})):
            status, said = await _post(url, path, body)
            assert (status, f"limits.{name}: expected at most {most:g}, the most of this host" in said) == (400, True), said
        assert (await _post(url, "/run", {**PROGRAM, "limits": {name: most}}))[0] in (200, 503)


@pytest.mark.starts
async def test_a_caller_without_limits_gets_no_more_than_the_servers_maxima(sandbox: BoxSandbox) -> None:
    maxima = MAX_LIMITS.model_copy(update={"processes": 16, "open_files": 32})
    command = "ulimit -n; ulimit -u; ulimit -v"
    async with serving_sandbox(sandbox, maxima=maxima) as url, aiohttp.ClientSession() as http:
        async with http.post(url + "/run", json={"argv": ["bash", "-c", command]}) as response:
            ran = base64.b64decode((await response.json())["stdout"])
        async with http.post(url + "/sessions", json={}) as response:
            name = (await response.json())["name"]
        call = {"request": {"do": "shell", "text": command, "timeout_s": 60}, "timeout_s": 68}
        async with http.post(f"{url}/sessions/{name}", json=call) as response:
            called = base64.b64decode((await response.json())["stdout"])
    own = sandbox.limits.memory_mb * 1024
    assert (ran.split(), called.split()) == ([b"32", b"16", b"%d" % own],) * 2


@pytest.mark.starts
async def test_a_client_learns_at_once_that_its_limits_are_over_the_servers(sandbox: BoxSandbox) -> None:
    async with serving_sandbox(sandbox, maxima=MAX_LIMITS.model_copy(update={"memory_mb": 256})) as url:
        with pytest.raises(
            ConfigError, match=r"limits.memory_mb: expected at most 256, .* \(--max memory_mb=512\), got 512"
        ):
            async with open_remote(url):
                pass


@pytest.mark.starts
async def test_no_more_sessions_open_than_the_server_allows(sandbox: BoxSandbox) -> None:
    limits = Limits(wall_s=60)
    async with serving_sandbox(sandbox, max_sessions=1) as url, open_remote(url, limits=limits) as remote:
        async with remote.session() as first:
            status, said = await _post(url, "/sessions", {})
            assert (status, said.partition(",")[0]) == (429, "1 sessions are open")
            assert (await first.python("1 + 1")).text == "2"
        async with remote.session() as second:
            assert (await second.python("2 + 2")).text == "4"


@pytest.mark.starts
async def test_a_session_waits_for_one_that_ends(sandbox: BoxSandbox) -> None:
    limits = Limits(wall_s=60)
    async with (
        serving_sandbox(sandbox, max_sessions=1) as url,
        open_remote(url, limits=limits) as remote,
        anyio.create_task_group() as tasks,
    ):
        opened = anyio.Event()

        async def another() -> None:
            async with remote.session() as session:
                assert (await session.python("3 + 3")).text == "6"

        async with remote.session() as first:
            tasks.start_soon(another)
            opened.set()
            assert (await first.python("1 + 1")).text == "2"


@pytest.mark.starts
@pytest.mark.parametrize("timeout_s", ["-1", "1e9"])
async def test_a_call_takes_no_longer_than_the_server_allows(sandbox: BoxSandbox, timeout_s: str) -> None:
    async with serving_sandbox(sandbox) as url:
        status, said = await _post(url, "/sessions/x", b'{"request": {}, "timeout_s": %s}' % timeout_s.encode())
        assert (status, said.startswith("timeout_s: expected 0 to 3608")) == (400, True), said


DEEP = b'{"request": %s, "timeout_s": 1}' % (b"[" * 200_000 + b"]" * 200_000)


@pytest.mark.starts
async def test_json_that_is_nested_too_deeply_is_the_callers_error(sandbox: BoxSandbox) -> None:
    async with serving_sandbox(sandbox) as url:
        for path in ("/run", "/sessions", "/sessions/x"):
            assert (await _post(url, path, DEEP))[0] == 400
        assert (await _post(url, "/run", PROGRAM))[0] == 200


@pytest.mark.starts
@pytest.mark.parametrize(
    "program",
    [
        {"argv": ["true", *["x"] * 400_000]},
        {"argv": ["true", "x" * 200_000]},
        {"argv": ["true"], "environment": {"A": "x" * 5_000_000}},
        {"argv": ["true"], "environment": {f"A{number}": "x" * 100_000 for number in range(20)}},
    ],
)
async def test_a_command_that_no_kernel_starts_is_the_callers_error(sandbox: BoxSandbox, program: object) -> None:
    async with serving_sandbox(sandbox) as url:
        status, said = await _post(url, "/run", program)
        assert (status, "pass the data as a file or standard input" in said) == (400, True), said


@pytest.mark.starts
async def test_the_longest_command_that_is_taken_runs(sandbox: BoxSandbox) -> None:
    words = ["x" * 130_000] * 7 + ["y" * 1000] * 100
    async with serving_sandbox(sandbox) as url, open_remote(url, limits=Limits(wall_s=60)) as remote:
        result = await remote.run(Program(argv=("sh", "-c", "echo $#", "sh", *words)))
        assert (result.stdout, result.stderr) == (b"107\n", b"")


def test_the_maxima_are_options_of_the_command() -> None:
    with pytest.raises(
        ConfigError, match="--max memory=5: expected LIMIT=NUMBER, where LIMIT is one of wall_s, cpu_s, memory_mb"
    ):
        sandbox_host_command(max=("memory=5",))
    with pytest.raises(ConfigError, match="memory_mb"):
        sandbox_host_command(max=("memory_mb=many",), containers=False)


@pytest.mark.starts
async def test_a_pool_of_a_run_meets_a_server_that_is_full(sandbox: BoxSandbox) -> None:
    async with (
        serving_sandbox(sandbox, max_sessions=1) as url,
        open_sandbox(SandboxConfig(backend="remote", url=url)) as pool,
        pool.session(),
    ):
        with anyio.move_on_after(0.2) as scope:
            async with pool.session():
                raise EnvironmentFault("unreachable: the server has one place")
        assert scope.cancelled_caught
