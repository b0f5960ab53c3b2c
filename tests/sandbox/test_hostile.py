"""Programs that try to break out, one test a wall. Each reports what it reached; nothing must be reached."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import anyio
import pytest

from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.types import Ending, Limits, Result, python_program
from agentrl_sandbox.warm import open_warm_python
from tests.support.leftovers import processes_with

pytestmark = pytest.mark.starts

# How a program tries something: the error's name, or the value.
TRY = """
import ctypes, errno, glob, json, os, signal, socket, stat, sys, time
def attempt(action):
    try:
        return repr(action())
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
def syscall(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
    return "done"
def report(**found):
    print(json.dumps(found))
    sys.stdout.flush()
"""
CANARY = secrets.token_hex(8)
Neighbour = subprocess.Popen[bytes]
REFUSED = {"EPERM", "EACCES", "ENOENT", "EROFS", "ENETUNREACH", "ECONNREFUSED", "ESRCH", "ENOSYS", "EAFNOSUPPORT", "EINVAL"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def open_file() -> Iterator[Path]:
    """A file that every user of this machine may read and write, all folders above it included."""
    with tempfile.NamedTemporaryFile(prefix="hidden-tests-") as file:
        file.write(b"expected: 42")
        file.flush()
        Path(file.name).chmod(0o666)
        yield Path(file.name)


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    """A process of the machine with something to hide."""
    with subprocess.Popen(["sleep", "600"], env={"CANARY": CANARY}, start_new_session=True) as process:
        yield process
        process.kill()


async def reached(sandbox: BoxSandbox, source: str, *arguments: str) -> dict[str, object]:
    result = await sandbox.run(python_program(TRY + source, arguments=arguments))
    assert result.is_success, result.text
    found: dict[str, object] = json.loads(result.stdout)
    return found


def refused(found: Mapping[str, object]) -> bool:
    return set(map(str, found.values())) <= REFUSED


async def test_the_environment_is_four_variables(sandbox: BoxSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    found = await reached(sandbox, "report(names=sorted(set(os.environ) - {'PWD', 'LC_CTYPE'}))")
    assert found == {"names": ["HOME", "LANG", "PATH", "TMPDIR"]}


async def test_no_process_of_the_machine_shows_its_environment(sandbox: BoxSandbox, neighbour: Neighbour) -> None:
    source = "report(seen=[p for p in glob.glob('/proc/[0-9]*/environ') if sys.argv[1] in attempt(lambda: open(p).read())])"
    assert await reached(sandbox, source, CANARY) == {"seen": []}
    assert neighbour.poll() is None


async def test_files_of_the_machine_are_neither_read_nor_written(sandbox: BoxSandbox, open_file: Path) -> None:
    source = """
paths = [sys.argv[1], "/etc/shadow", "/root/.bashrc", "/home", sys.argv[2], "/var/run", "/sys/kernel"]
report(**{f"read {p}": attempt(lambda: os.open(p, os.O_RDONLY)) for p in paths},
       **{f"write {p}": attempt(lambda: os.open(p, os.O_WRONLY)) for p in paths})
"""
    assert refused(await reached(sandbox, source, str(open_file), __file__))
    assert await anyio.Path(open_file).read_bytes() == b"expected: 42"


async def test_the_system_is_read_only(sandbox: BoxSandbox) -> None:
    source = """
places = ["/", "/usr", "/usr/lib", "/etc", "/dev", "/run", "/proc", "/proc/sys/kernel"]
found = {p: attempt(lambda: os.open(p + "/planted", os.O_WRONLY | os.O_CREAT)) for p in places}
for path in ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/etc/passwd", "/usr/bin/env", "/dev/kmsg", "/dev/mem"]:
    found[path] = attempt(lambda: os.open(path, os.O_WRONLY))
found["oom"] = attempt(lambda: os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-1000"))
report(**found)
"""
    found = await reached(sandbox, source)
    assert refused(found), found


async def test_no_network_is_reached(sandbox: BoxSandbox) -> None:
    source = """
def to(family, kind, address):
    with socket.socket(family, kind) as made:
        made.settimeout(2)
        made.connect(address)
port, abstract, path = int(sys.argv[1]), "\\0" + sys.argv[2], sys.argv[3]
report(loopback=attempt(lambda: to(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port))),
       metadata=attempt(lambda: to(socket.AF_INET, socket.SOCK_DGRAM, ("169.254.169.254", 80))),
       internet=attempt(lambda: to(socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 53))),
       six=attempt(lambda: to(socket.AF_INET6, socket.SOCK_DGRAM, ("2001:db8::1", 53))),
       abstract=attempt(lambda: to(socket.AF_UNIX, socket.SOCK_STREAM, abstract)),
       path=attempt(lambda: to(socket.AF_UNIX, socket.SOCK_STREAM, path)),
       raw=attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)),
       packet=attempt(lambda: socket.socket(17, socket.SOCK_RAW)),
       vsock=attempt(lambda: socket.socket(40, socket.SOCK_STREAM)),
       alg=attempt(lambda: socket.socket(38, socket.SOCK_SEQPACKET)))
"""
    name = f"agentrl-{secrets.token_hex(6)}"
    path = Path(tempfile.gettempdir()) / name
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as file,
    ):
        abstract.bind("\0" + name)
        abstract.listen()
        file.bind(str(path))
        file.listen()
        path.chmod(0o777)
        found = await reached(sandbox, source, str(tcp.getsockname()[1]), name, str(path))
        path.unlink()
    assert refused(found), found


async def test_processes_of_the_machine_are_not_signalled(sandbox: BoxSandbox, neighbour: Neighbour) -> None:
    source = """
ended = 0
for pid in [*range(3, 40_000), int(sys.argv[1])]:
    if pid != os.getpid():
        ended += attempt(lambda: os.kill(pid, signal.SIGKILL)) == "None"
attempt(lambda: os.kill(1, signal.SIGKILL))
report(ended=ended, group=attempt(lambda: os.killpg(int(sys.argv[1]), signal.SIGKILL)))
"""
    assert await reached(sandbox, source, str(neighbour.pid)) == {"ended": 0, "group": "ESRCH"}
    assert neighbour.poll() is None


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
async def test_risky_system_calls_are_refused(sandbox: BoxSandbox) -> None:
    source = """
calls = dict(ptrace=(101, 16, 1, 0, 0), mount=(165, b"none", b"/work", b"tmpfs", 0, 0), unshare=(272, 0x10000000),
    setns=(308, 0, 0), pivot_root=(155, b"/", b"/"), chroot=(161, b"/work"), bpf=(321, 0, 0, 0), perf=(298, 0, 0, -1, -1, 0),
    userfaultfd=(323, 0), io_uring=(425, 8, 0), keyctl=(250, 0, 0), add_key=(248, b"user", b"a", b"b", 1, -2),
    process_vm_readv=(310, 1, 0, 0, 0, 0, 0), open_by_handle=(304, 0, 0, 0), memfd=(319, b"a", 0),
    shmget=(29, 0, 4096, 0o1600), msgget=(68, 0, 0o1600), personality=(135, 0xffffffff),
    clone_user=(56, 0x10000000 | 17, 0, 0, 0, 0), clone3=(435, 0, 0),
    fsopen=(430, b"tmpfs", 0), kexec=(246, 0, 0, 0, 0), pidfd_getfd=(438, 0, 0, 0), swapon=(167, b"/work/a", 0))
import fcntl, termios
report(**{name: attempt(lambda: syscall(*words)) for name, words in calls.items()},
       typing=attempt(lambda: fcntl.ioctl(0, termios.TIOCSTI, b"x")))
"""
    found = await reached(sandbox, source)
    assert set(map(str, found.values())) <= {"EPERM", "ENOSYS"}, found


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the x32 numbers of x86_64")
async def test_calls_by_another_architecture_s_numbers_end_the_program(sandbox: BoxSandbox) -> None:
    result = await sandbox.run(python_program(TRY + "syscall(0x40000000 + 39)"))
    assert (result.ended, result.signal) == (Ending.KILLED, 31)  # SIGSYS


async def test_facts_of_the_machine_are_hidden(sandbox: BoxSandbox) -> None:
    source = """
report(host=socket.gethostname(), command_line=attempt(lambda: open("/proc/cmdline").read()),
       pids=len(glob.glob("/proc/[0-9]*")), log=attempt(lambda: open("/dev/kmsg").read()))
"""
    found = await reached(sandbox, source)
    assert found["host"] == "sandbox"
    assert found["command_line"] in REFUSED
    assert found["log"] in REFUSED
    assert int(str(found["pids"])) <= 4


async def test_no_program_takes_a_terminal_of_which_the_machine_has_few(sandbox: BoxSandbox) -> None:
    source = (
        TRY
        + """
report(ptmx=attempt(lambda: os.open("/dev/ptmx", os.O_RDWR)), pts=attempt(lambda: os.open("/dev/pts/ptmx", os.O_RDWR)),
    pair=attempt(os.openpty), written=attempt(lambda: os.mkdir("/dev/pts/a")))
"""
    )
    program = python_program(source)
    async with sandbox.session() as session, open_warm_python(sandbox, sessions=1) as warm:
        for run in (sandbox.run, session.run, warm.run):
            result = await run(program)
            assert refused(json.loads(result.stdout)), (run, result.text)


async def test_descriptors_of_the_caller_are_closed(sandbox: BoxSandbox, open_file: Path) -> None:
    descriptor = os.open(open_file, os.O_RDWR)
    os.set_inheritable(descriptor, True)
    try:
        source = "report(open=[n for n in range(3, 256) if attempt(lambda: os.fstat(n)) != 'EBADF'])"
        assert await reached(sandbox, source) == {"open": []}
    finally:
        os.close(descriptor)


async def test_forks_stop_at_the_limit_of_each_sandbox(sandbox: BoxSandbox) -> None:
    source = """
held = 0
while held < 600:
    try:
        if os.fork() == 0:
            time.sleep(60)
    except OSError:
        break
    held += 1
report(held=held)
"""
    found = [await reached(sandbox, source) for _ in range(2)]
    assert [48 <= int(str(one["held"])) < 64 for one in found] == [True, True], found


async def hostile(sandbox: BoxSandbox, source: str, **bounds: float) -> tuple[Result, list[str]]:
    """Run a program that does not end by itself; return the result and the processes that it left."""
    token = secrets.token_hex(8)
    limits = Limits.model_validate({"wall_s": 120.0, **bounds})
    result = await sandbox.run(python_program(TRY + source, arguments=(token,)), limits)
    return result, processes_with(token)


async def test_a_fork_bomb_ends_at_the_deadline(sandbox: BoxSandbox) -> None:
    result, left = await hostile(sandbox, "while True:\n  attempt(os.fork)", wall_s=1.0)
    assert (result.ended in (Ending.TIMEOUT, Ending.MEMORY), left) == (True, [])


async def test_one_process_cannot_take_three_gigabytes(sandbox: BoxSandbox) -> None:
    result, left = await hostile(sandbox, "kept = b'x' * (3 << 30)")
    assert (result.ended, result.exit_status, left) == (Ending.EXITED, 1, [])
    assert b"MemoryError" in result.stderr


async def test_eight_processes_share_one_memory_limit(sandbox: BoxSandbox) -> None:
    # They would take three gigabytes. They pass the limit in a second and twice the limit seconds later, so that a machine
    # that stands still for a moment does not decide how much they get.
    source = """
for _ in range(8):
    if os.fork() == 0:
        kept = [b"x" * (48 << 20)]
        while len(kept) < 336:
            kept.append(b"x" * (1 << 20))
            time.sleep(0.05)
        time.sleep(600)
time.sleep(600)
"""
    result, left = await hostile(sandbox, source)
    assert (result.ended, left) == (Ending.MEMORY, [])
    assert result.peak_memory_bytes is not None
    assert 512 * 2**20 < result.peak_memory_bytes < 2**30


async def test_memory_that_processes_share_counts_once(sandbox: BoxSandbox) -> None:
    source = """
kept = b"x" * (90 << 20)
for _ in range(5):
    if os.fork() == 0:
        time.sleep(0.3)
        os._exit(0)
time.sleep(0.3)
"""
    # Processes that end while the shares are added up leave larger shares to the rest: up to 2.45 times the memory.
    result, left = await hostile(sandbox, source, memory_mb=320)
    assert (result.ended, left) == (Ending.EXITED, [])


async def test_directories_hold_what_they_are_given(sandbox: BoxSandbox) -> None:
    source = """
total = 0
for place in ["/work", "/tmp", "/dev/shm", "/dev", "/", "/run"]:
    for number in range(40):
        try:
            with open(f"{place}/{number}", "wb") as file:
                for _ in range(64):
                    total += file.write(b"x" * (1 << 20))
        except OSError:
            break
report(mebibytes=total >> 20, sparse=attempt(lambda: os.truncate("/work/0", 1 << 40)))
"""
    result, _ = await hostile(sandbox, source, work_mb=8, temp_mb=8, shared_mb=4)
    assert result.is_success, result.text
    found = json.loads(result.stdout)
    assert found["mebibytes"] <= 20
    assert found["sparse"] in ("'EFBIG'", "EFBIG")


async def test_many_empty_files_end_the_program(sandbox: BoxSandbox) -> None:
    source = "n = 0\nwhile True:\n  n += 1\n  attempt(lambda: open(f'/tmp/{n}', 'w').close())"
    result, left = await hostile(sandbox, source)
    assert (result.ended, left) == (Ending.FILES, [])


async def test_a_flood_of_output_is_cut_and_ended(sandbox: BoxSandbox) -> None:
    result, left = await hostile(sandbox, "while True: os.write(2, b'x' * 65536)", output_kb=256)
    assert (result.ended, len(result.stderr), left) == (Ending.OUTPUT, 256 * 1024, [])


@pytest.mark.parametrize(
    "source",
    [
        "for n in range(1, 32):\n  attempt(lambda: signal.signal(n, signal.SIG_IGN))\nwhile True: pass",
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64)); time.sleep(1e6)",
        "signal.pause()",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ],
    ids=["spins and ignores signals", "blocks signals", "sleeps for ever", "stops itself"],
)
async def test_a_program_that_does_not_end_is_ended(sandbox: BoxSandbox, source: str) -> None:
    result, left = await hostile(sandbox, source, wall_s=0.4)
    assert (result.ended, left) == (Ending.TIMEOUT, [])


async def test_a_daemon_ends_with_its_program(sandbox: BoxSandbox) -> None:
    source = """
print("done", flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        time.sleep(1e6)  # and holds the pipes
    os._exit(0)
"""
    result, left = await hostile(sandbox, source)
    assert (result.ended, result.stdout, left) == (Ending.EXITED, b"done\n", [])


async def test_cpu_time_is_limited(sandbox: BoxSandbox) -> None:
    result, left = await hostile(sandbox, "while True: pass", cpu_s=1)
    assert (result.ended, result.signal, left) == (Ending.KILLED, 24, [])  # SIGXCPU


async def test_a_crash_is_the_program_s_end(sandbox: BoxSandbox) -> None:
    result, left = await hostile(sandbox, "ctypes.string_at(0)")
    assert (result.ended, result.signal, result.stderr, left) == (Ending.KILLED, 11, b"", [])


async def test_nothing_of_a_run_is_seen_by_the_next(sandbox: BoxSandbox) -> None:
    plant = "for p in ('/work', '/tmp', '/dev/shm'): open(p + '/planted', 'w').close()\nreport()"
    await reached(sandbox, plant)
    source = "report(found=[p for p in ('/work', '/tmp', '/dev/shm') if os.path.exists(p + '/planted')])"
    assert await reached(sandbox, source) == {"found": []}


async def test_input_that_is_never_read_holds_nothing_up(sandbox: BoxSandbox) -> None:
    program = python_program("print('done')", stdin=b"x" * (8 << 20))
    assert (await sandbox.run(program)).stdout == b"done\n"


async def test_a_program_that_closes_its_outputs_ends_by_itself(sandbox: BoxSandbox) -> None:
    result, _ = await hostile(sandbox, "os.close(1); os.close(2); os._exit(7)")
    assert (result.ended, result.exit_status) == (Ending.EXITED, 7)
