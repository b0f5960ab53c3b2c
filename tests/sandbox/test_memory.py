"""The limits of process 1, and memory that no process shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.bubblewrap.usage import ControlGroups, find_control_groups, most_descriptors
from agentrl_sandbox.types import Limits, python_program


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.starts
async def test_process_1_has_the_limits_of_the_program_and_keeps_its_memory_to_itself(sandbox: BoxSandbox) -> None:
    source = """
import os
print(open("/proc/1/limits").read() == open("/proc/self/limits").read())
for path in ("/proc/1/mem", "/proc/1/environ", "/run/agentrl/sh"):
    try:
        open(path, "rb")
    except PermissionError as error:
        print(error.filename)
"""
    result = await sandbox.run(python_program(source))
    assert result.text == "True\n/proc/1/mem\n/proc/1/environ\n/run/agentrl/sh"


@pytest.mark.starts
async def test_a_program_that_lowers_its_out_of_memory_score_gets_it_back(sandbox: BoxSandbox) -> None:
    source = """
import time
path = "/proc/self/oom_score_adj"
print(open(path).read().strip())
try:
    open(path, "w").write("0")
except PermissionError:
    pass  # root has forbidden it
while open(path).read() != "1000\\n":
    time.sleep(0.01)
"""
    result = await sandbox.run(python_program(source))
    assert (result.text, result.is_success) == ("1000", True)


@pytest.mark.starts
async def test_shared_memory_has_a_file_that_is_counted(sandbox: BoxSandbox) -> None:
    source = """
import mmap, multiprocessing, os
from multiprocessing import shared_memory
for descriptor in (-1, os.open("/dev/zero", os.O_RDWR)):
    try:
        mmap.mmap(descriptor, 4096)
    except OSError as error:
        print(error.strerror)
print(open("/dev/zero", "rb").read(3))
value = multiprocessing.Value("i", 0)
if os.fork() == 0:
    value.value = 7
    os._exit(0)
os.wait()
block = shared_memory.SharedMemory(create=True, size=1 << 20)
print(value.value, block.size)
block.unlink()
"""
    result = await sandbox.run(python_program(source))
    assert result.text == "Operation not permitted\nNo such device\nb'\\x00\\x00\\x00'\n7 1048576"


@pytest.mark.starts
async def test_a_larger_socket_buffer_is_answered_and_not_given(sandbox: BoxSandbox) -> None:
    source = """
import socket
from socket import SO_REUSEADDR, SO_SNDBUF, SOL_SOCKET
made = socket.socket()
before = made.getsockopt(SOL_SOCKET, SO_SNDBUF)
made.setsockopt(SOL_SOCKET, SO_SNDBUF, 1 << 20)
made.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
print(made.getsockopt(SOL_SOCKET, SO_SNDBUF) == before, made.getsockopt(SOL_SOCKET, SO_REUSEADDR))
"""
    assert (await sandbox.run(python_program(source))).text == "True 1"


@pytest.mark.starts
async def test_files_in_memory_count(sandbox: BoxSandbox) -> None:
    source = "import time; open('a', 'wb', buffering=0).write(bytes(24 << 20)); time.sleep(0.5)"
    result = await sandbox.run(python_program(source))
    assert result.peak_memory_bytes is not None
    assert result.peak_memory_bytes > 24 << 20


def test_a_kernel_that_counts_no_descriptors_still_bounds_them() -> None:
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(600)]
    try:
        assert 600 <= most_descriptors(Path("/proc/self/status").read_bytes().splitlines()) <= 1 << 20
    finally:
        for descriptor in kept:
            os.close(descriptor)


def test_a_group_of_its_own_is_found_made_and_removed(tmp_path: Path) -> None:
    # Files as cgroup v2 lays them out; the kernel would make those of a new group.
    own = tmp_path / "own"
    own.write_text("1:cpu:/other\n0::/user/run.scope\n")
    scope = tmp_path / "user" / "run.scope"
    scope.mkdir(parents=True)
    (scope / "cgroup.controllers").write_text("cpu memory pids\n")
    (scope / "cgroup.procs").write_text(f"{os.getpid()}\n")
    groups = find_control_groups(tmp_path, own)
    assert groups is not None
    assert (scope / "agentrl-driver" / "cgroup.procs").read_text() == str(os.getpid())
    assert (scope / "cgroup.subtree_control").read_text() == "+memory +pids"
    group = groups.make(Limits(memory_mb=64, processes=8))
    kept = {path.name: path.read_text() for path in group.path.iterdir()}
    assert kept == {"memory.max": str(64 << 20), "memory.swap.max": "0", "memory.oom.group": "1", "pids.max": "13"}
    (group.path / "memory.current").write_text("4096\n")
    (group.path / "memory.events").write_text("low 0\noom 1\noom_kill 0\n")
    assert (group.memory(), group.ran_out()) == (4096, False)
    (group.path / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    assert (group.memory(), group.ran_out()) == ((64 << 20) + 1, True)
    assert ControlGroups(scope).make(Limits()).path != group.path  # of a second sandbox of this process
    group.kill()
    assert (group.path / "cgroup.kill").read_text() == "1"


def test_a_group_that_is_shared_or_not_delegated_is_left_alone(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/\n")
    assert find_control_groups(tmp_path, own) is None
    own.write_text("0::/\n")
    (tmp_path / "cgroup.controllers").write_text("memory pids\n")
    (tmp_path / "cgroup.procs").write_text(f"1\n{os.getpid()}\n")
    assert find_control_groups(tmp_path, own) is None
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n")
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    assert find_control_groups(tmp_path, own) is None
