"""A process that calls from another machine run."""

import signal
import sys
import threading
from collections.abc import Generator

import pytest

from agentrl.processes.agent import MAX_UNREAD, HostedProcess, node_environment
from agentrl.processes.machine import interface_of
from tests.support.processes import until_ended

_STARTED: list[HostedProcess] = []


@pytest.fixture(autouse=True)
def all_end() -> Generator[None]:
    """End what a test started."""
    yield
    while _STARTED:
        process = _STARTED.pop()
        process.stop()
        process.wait()


def python(code: str, *, merged: bool = False, **environment: str) -> HostedProcess:
    process = HostedProcess()
    _STARTED.append(process)
    _, _, problem = process.start(["", "-c", code], environment, host="127.0.0.1", folder="/", merged=merged)
    assert problem == ""
    return process


def read_all(process: HostedProcess, name: str = "stdout") -> bytes:
    whole = b""
    while data := process.read(name, len(whole)):  # pyright: ignore[reportArgumentType]
        whole += data
    return whole


@pytest.mark.starts
def test_output_and_exit_code_arrive():
    process = python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert read_all(process) == b"out\n"
    assert read_all(process, "stderr") == b"err\n"
    code, tail = process.wait()
    assert code == 3
    assert "out" in tail
    assert "err" in tail


@pytest.mark.starts
def test_standard_error_joins_standard_output_on_request():
    process = python("import sys; print('err', file=sys.stderr)", merged=True)
    assert read_all(process) == b"err\n"
    assert read_all(process, "stderr") == b""


@pytest.mark.starts
def test_a_read_can_be_repeated_until_its_bytes_are_confirmed():
    process = python("print('abc')")
    process.wait()
    assert process.read("stdout", 0) == process.read("stdout", 0) == b"abc\n"
    assert process.read("stdout", 2) == b"c\n"
    assert process.read("stdout", 4) == b""


@pytest.mark.starts
def test_unread_output_stops_the_process_and_not_the_memory():
    process = python(f"import sys; sys.stdout.write('x' * {4 * MAX_UNREAD}); sys.stdout.flush()")
    first = process.read("stdout", 0)
    assert len(first) < 2 * MAX_UNREAD
    assert len(read_all(process)) == 4 * MAX_UNREAD
    assert process.wait()[0] == 0


@pytest.mark.starts
async def test_stop_ends_the_process_and_what_it_started():
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    process = python(code)
    grandchild = int(process.read("stdout", 0))
    process.stop()
    assert process.wait()[0] == -signal.SIGTERM
    await until_ended(grandchild)


@pytest.mark.starts
def test_a_signal_reaches_a_process_that_another_thread_waits_for():
    process = python("import time; print('up', flush=True); time.sleep(600)")
    process.read("stdout", 0)
    codes: list[int] = []
    waiter = threading.Thread(target=lambda: codes.append(process.wait()[0]))
    waiter.start()
    process.signal(signal.SIGKILL)
    waiter.join(300)
    assert codes == [-9]


@pytest.mark.starts
def test_a_missing_program_is_named():
    problem = HostedProcess().start(["/no/such/program"], {}, host="127.0.0.1", folder="/", merged=False)[2]
    assert "/no/such/program" in problem


@pytest.mark.starts
def test_host_and_port_are_filled_in_on_the_node():
    process = HostedProcess()
    _STARTED.append(process)
    command = ["", "-c", "import sys; print(sys.argv[1])", "{host}:{port}"]
    _, port, _ = process.start(command, {}, host="127.0.0.1", folder="/", merged=False)
    assert 0 < port < 65_536
    assert read_all(process) == f"127.0.0.1:{port}\n".encode()


@pytest.mark.starts
def test_the_environment_is_the_nodes_without_rays_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_JOB_ID", "1")
    monkeypatch.setenv("OF_THE_NODE", "kept")
    code = "import os; print(os.environ.get('RAY_JOB_ID'), os.environ['OF_THE_NODE'], os.environ['OF_THE_SPEC'])"
    assert read_all(python(code, OF_THE_SPEC="added")) == b"None kept added\n"


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are looked up with a call of Linux")
def test_the_interface_of_the_address_is_set_unless_the_node_names_one():
    name = interface_of("127.0.0.1")
    assert name is not None
    assert node_environment({}, "127.0.0.1")["GLOO_SOCKET_IFNAME"] == name
    assert node_environment({"GLOO_SOCKET_IFNAME": "ib0"}, "127.0.0.1")["GLOO_SOCKET_IFNAME"] == "ib0"
    assert "GLOO_SOCKET_IFNAME" not in node_environment({}, "203.0.113.9")
