"""One program of a warm start changes nothing for the next: right ones stay right, wrong ones wrong, in both directions."""

from __future__ import annotations

import re
import secrets
import subprocess
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl_rewards.code import CodeGrader, call_tests
from agentrl_sandbox import Ending, Limits, Result, WarmPython, open_bubblewrap, open_warm_python, python_program
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.bubblewrap.host import Host
from agentrl_sandbox.unsafe import open_unsafe_process
from tests.support.submissions import Submission, read_submissions
from tests.support.warm import warm_parents

HELP = """
import ctypes, fcntl, glob, json, mmap, os, platform, resource, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(action):
    try:
        return repr(action())
    except Exception as error:
        return type(error).__name__
def syscall(number, *words):
    if libc.syscall(number, *words) < 0:
        raise OSError(ctypes.get_errno(), "")
program = os.getpid()
def processes():
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()} - {os.getpid(), program}
everyone = sorted({*range(1, 60), *processes()} - {program})
def spoil():
    while True:
        for folder in ("/work", "/tmp", "/dev/shm", *glob.glob("/proc/[0-9]*/root/work"), *glob.glob("/proc/[0-9]*/cwd")):
            for path in glob.glob(folder + "/*.py"):
                attempt(lambda: open(path, "w").write("print('mine')"))
        for pid in processes():
            attempt(lambda: resource.prlimit(pid, resource.RLIMIT_DATA, (1, 1)))
            attempt(lambda: os.kill(pid, signal.SIGSTOP))
def leave(work):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            attempt(work)
        os._exit(0)
def end_main_thread():
    libc.syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""
"""The names of the attacks."""
HEAVY = """
import json, os, socket, sys, threading
sys.setrecursionlimit(30_000)
kept = bytearray(150 << 20)
depth = len(json.dumps(json.loads("[" * 9_000 + "]" * 9_000)))
found = [os.getcwd(), sorted(os.listdir(".")), os.listdir("/tmp"), os.listdir("/dev/shm"), oct(os.umask(0o22))]
found += [sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()) == [1, os.getpid()], os.nice(0)]
found += [os.get_blocking(number) for number in (0, 1, 2)]
held = [socket.socket(socket.AF_UNIX), socket.socket()]
held[0].bind("\\0name")
held[1].bind(("127.0.0.1", 8123))
for path in ("/work/data", "/tmp/data", "/dev/shm/out"):
    with open(path, "wb") as file:
        file.write(bytes(5 << 20))
threads = [threading.Thread(target=sum, args=([1],)) for _ in range(20)]
for each in threads:
    each.start()
if os.fork() == 0:
    os._exit(7)
print("x" * 400_000)
print(depth, found, os.waitstatus_to_exitcode(os.wait()[1]), sum(map(sum, [[1, 2], [3]])))
"""
"""A right program that needs much of what an attack may take: memory, stack, files, threads, a port, a long output."""
ATTACKS = read_submissions(Path(__file__).with_name("attacks.txt"))
QUICK = {
    "leaves a thread behind a dead main thread",
    "leaves many",
    "sets every limit of every process",
    "gives its init no time",
    "stops everyone",
    "plants modules in every directory",
    "makes its streams not wait and short",
    "writes to every descriptor that it can open",
    "holds a name and a port",
    "ends with the number of a fault",
}
LIMITS = Limits(wall_s=120, cpu_s=20, memory_mb=512, work_mb=16, temp_mb=16, shared_mb=16, processes=64)
"""An attack that does not end by itself has failed to harm others, but costs the test two minutes."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def outcomes_after(warm: WarmPython, attack: Submission) -> tuple[Result, Result]:
    """Run an attack, which must have a result of its own, and return those of a right and a wrong program after it."""
    await warm.run(python_program(HELP + attack.source))
    return await warm.run(python_program(HEAVY)), await warm.run(python_program("print('wrong')"))


def attacks(names: set[str] | None) -> list[Submission]:
    found = [each for each in ATTACKS if names is None or each.name in names]
    assert len(found) >= len(names or {"one"})
    return found


async def check_attacks(sandbox: BoxSandbox, chosen: list[Submission]) -> None:
    alone = await sandbox.run(python_program(HEAVY), LIMITS)
    assert alone.is_success, alone.text
    changed: dict[str, str] = {}
    async with open_warm_python(sandbox, limits=LIMITS, sessions=1) as warm:
        for attack in chosen:
            right, wrong = await outcomes_after(warm, attack)
            if (right.stdout, right.stderr, right.exit_status) != (alone.stdout, b"", 0) or wrong.stdout != b"wrong\n":
                changed[attack.name] = f"{right.text[-300:]} / {wrong.text}"
    assert changed == {}


@pytest.mark.starts
async def test_attacks_change_no_other_program(sandbox: BoxSandbox) -> None:
    await check_attacks(sandbox, attacks(QUICK))


@pytest.mark.starts
@pytest.mark.long
async def test_no_attack_of_the_table_changes_another_program(sandbox: BoxSandbox) -> None:
    await check_attacks(sandbox, attacks(None))


async def check_grades(sandbox: BoxSandbox, chosen: list[Submission]) -> None:
    tests = call_tests([("mix([2, 3, 4])", "3020")])
    right = "def mix(values):\n    return sum(10 ** n * v for n, v in zip((0, 1, 3), (0, 2, 3)))"
    wrong = "def mix(values):\n    return 3021"
    rewards: dict[str, list[float]] = {}
    async with open_warm_python(sandbox, sessions=1) as warm:
        grader = CodeGrader(warm, limits=LIMITS)
        for attack in chosen:
            sources = (HELP + attack.source, right, wrong, right)
            rewards[attack.name] = [await grader(f"```python\n{source}\n```", tests) for source in sources]
    assert {name: found for name, found in rewards.items() if found != [0.0, 1.0, 0.0, 1.0]} == {}


@pytest.mark.starts
async def test_submissions_that_attack_change_no_grade(sandbox: BoxSandbox) -> None:
    await check_grades(sandbox, attacks(QUICK))


@pytest.mark.starts
@pytest.mark.long
async def test_no_submission_of_the_table_changes_a_grade(sandbox: BoxSandbox) -> None:
    await check_grades(sandbox, attacks(None))


@pytest.mark.starts
async def test_a_main_thread_that_ends_before_its_program_leaves_nothing(sandbox: BoxSandbox) -> None:
    source = "threading.Thread(target=spoil).start()\nend_main_thread()"
    async with open_warm_python(sandbox, limits=Limits(wall_s=2.0), sessions=1) as warm:
        assert (await warm.run(python_program(HELP + source))).ended is Ending.TIMEOUT
        assert (await warm.run(python_program("print('wrong')"), Limits(wall_s=60))).stdout == b"wrong\n"


@pytest.mark.starts
async def test_a_program_finds_no_other_one_in_its_memory(sandbox: BoxSandbox) -> None:
    token = secrets.token_hex(16)
    search = """
found = []
half = sys.argv[1].encode()
for line in open("/proc/self/maps"):
    ends = line.split()[0].split("-")
    if "r" in line.split()[1] and "[v" not in line:
        data = ctypes.string_at(int(ends[0], 16), int(ends[1], 16) - int(ends[0], 16))
        place = data.find(half)
        while place >= 0:
            found.append(bytes(data[place + len(half):place + 2 * len(half)]).decode(errors="replace"))
            place = data.find(half, place + 1)
del data
print(sys.argv[2] in found)
"""
    other = "".join(reversed(token[16:]))
    search = search.replace("sys.argv[2]", "''.join(reversed(sys.argv[2]))")
    async with open_warm_python(sandbox, limits=LIMITS, sessions=1) as warm:
        for _ in range(3):
            await warm.run(python_program(f"x = '{token}'", stdin=token.encode(), files={"data": token.encode() * 999}))
        found = await warm.run(python_program(HELP + search, arguments=(token[:16], other)))
        assert found.stdout == b"False\n", found.text
        held = await warm.run(python_program(f"{HELP}\nheld = '{token}'\n{search}", arguments=(token[:16], other)))
        assert held.stdout == b"True\n", held.text  # the search itself works


def lower_limits(host: Host, pid: int, *limits: str) -> None:
    """Do from outside, as the same user, what a program would have to be able to do."""
    [uid] = re.findall(r"^Uid:\t(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    subprocess.run([*host.entry(int(uid)), host.prlimit, f"--pid={pid}", *limits], check=True)


@pytest.mark.starts
async def test_limits_of_the_warm_interpreter_that_were_lowered_reach_no_program(host: Host, sandbox: BoxSandbox) -> None:
    limits = Limits(wall_s=60, num_files=3_771)
    async with open_warm_python(sandbox, limits=limits, sessions=1) as warm:
        assert (await warm.run(python_program("print(1)"))).text == "1"
        [parent] = warm_parents(limits)
        lower_limits(host, parent, "--nofile=90:", "--stack=65536:")
        assert (await warm.run(python_program(HEAVY))).exit_status == 0
        assert warm_parents(limits) == [parent]  # it has set them again
        lower_limits(host, parent, "--nofile=90:90", "--stack=65536:65536")
        assert (await warm.run(python_program(HEAVY))).exit_status == 0
        assert warm_parents(limits) != [parent]  # it could not


@pytest.mark.starts
async def test_a_program_that_ends_its_own_init_is_killed_and_no_fault(sandbox: BoxSandbox) -> None:
    source = "resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))\nwhile True: os.kill(1, 0) or os.wait3(os.WNOHANG)"
    starve = "resource.prlimit(1, resource.RLIMIT_AS, (1, 1))\nos._exit(3)"
    async with open_warm_python(sandbox, limits=Limits(wall_s=60, cpu_s=2), sessions=1) as warm:
        for attack in (source, starve):
            result = await warm.run(python_program(HELP + attack))
            assert result.ended in (Ending.KILLED, Ending.EXITED), result


async def test_a_backend_that_cannot_part_programs_refuses_a_warm_start() -> None:
    with pytest.raises(ConfigError, match=r"unsafe_process cannot keep the programs .* apart; use the backend bubblewrap"):
        async with open_warm_python(open_unsafe_process()):
            pass


@pytest.mark.starts
async def test_a_machine_that_refuses_inner_namespaces_refuses_a_warm_start(sandbox: BoxSandbox, tmp_path: Path) -> None:
    del sandbox
    path = tmp_path / "bwrap"
    lines = [
        "#!/usr/bin/python3",
        "import os, sys",
        "words = sys.argv[1:]",
        "if words[0] == '--args':",
        "    given = os.fdopen(os.dup(int(words[1])), 'rb').read().split(b'\\0')[:-1]",
        "    kept = [w for i, w in enumerate(given) if b'--cap-add' not in (w, given[i - 1])]",
        "    reading, writing = os.pipe()",
        "    os.write(writing, b'\\0'.join(kept) + b'\\0')",
        "    os.close(writing)",
        "    os.dup2(reading, int(words[1]))",
        "os.execv('/usr/bin/bwrap', ['bwrap', *words])",
    ]
    path.write_text("\n".join(lines))
    for folder in (path, *path.parents):
        if str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    weak = await open_bubblewrap(bwrap=str(path))
    said = r"not apart on this machine: .*PermissionError: .*unshare.*start: cold"
    with pytest.raises(ConfigError, match=said):
        async with open_warm_python(weak):
            pass


def test_the_table_has_many_kinds() -> None:
    assert len(ATTACKS) >= 40
    assert {each.name for each in ATTACKS} >= QUICK
    assert all(re.fullmatch(r"[a-z ]+", each.name) for each in ATTACKS)
