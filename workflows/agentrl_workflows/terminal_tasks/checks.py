"""What the tests of the bundled terminal tasks share; it stands at the beginning of each task's `tests/check.py`.

An agent's program that a test runs has the rights of the test. So `begin` closes this process's memory and removes the
tests from the disk before anything of the agent runs or is read, and `pay` ends every other process before it writes the
reward. It needs nothing but Python's standard library, in any container.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import stat
import subprocess
import time

LOGS = "/logs/verifier"
APP = "/app"


def above() -> "set[int]":
    """Return the container's first process, this one, and those between them."""
    found, pid = {1}, os.getpid()
    while pid > 1:
        found.add(pid)
        with open("/proc/" + str(pid) + "/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return found


ABOVE = above()
"""Found before anything of the agent runs."""


def begin() -> None:
    """Hide this process and its tests from what it is about to run."""
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    os.chdir("/")
    for folder in ("/tests", "/solution"):
        shutil.rmtree(folder, ignore_errors=True)


def data(path: str, limit: int = 2**20) -> "bytes | None":
    """Return a regular file below the agent's directory, reached without a link; None: there is none."""
    place = os.open("/", os.O_RDONLY)
    *folders, name = [part for part in os.path.join(APP, path).split("/") if part]
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
            os.close(place)
            place = inner
        with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place), "rb") as file:
            found = os.fstat(file.fileno())
            return file.read(limit) if stat.S_ISREG(found.st_mode) and found.st_size <= limit else None
    except OSError:
        return None
    finally:
        os.close(place)


def text(path: str) -> str:
    """Return a file's text without blank ends; empty where there is none."""
    return (data(path) or b"").decode(errors="replace").strip()


def lines(path: str) -> "list[str]":
    """Return the lines of a file, without blank ends."""
    return [line.rstrip() for line in text(path).splitlines()]


def mode(path: str) -> int:
    """Return the permissions of a file of its own; -1: there is none."""
    try:
        found = os.lstat(os.path.join(APP, path))
    except OSError:
        return -1
    return stat.S_IMODE(found.st_mode) if not stat.S_ISLNK(found.st_mode) else -1


def tree(path: str = "") -> "list[str]":
    """Return the files and links below a directory, by their paths in it."""
    root = os.path.join(APP, path)
    found = [os.path.relpath(os.path.join(place, name), root) for place, _, names in os.walk(root) for name in names]
    return sorted(name for name in found if not name.startswith(".git/"))


def start(*argv: str, cwd: str = APP) -> "subprocess.Popen[str]":
    """Start a program of the agent."""
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        argv, cwd=cwd, env=variables, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )


def run(*argv: str, stdin: str = "", cwd: str = APP, timeout: float = 20) -> "tuple[int, str]":
    """Run a program of the agent; return its exit status and output, -1 for one that does not start or does not end."""
    try:
        process = start(*argv, cwd=cwd)
    except OSError:
        return -1, ""
    try:
        said, _ = process.communicate(stdin, timeout=timeout)
    except (subprocess.TimeoutExpired, UnicodeDecodeError, OSError):
        process.kill()
        return -1, ""
    return process.returncode, said.strip()


def git(*words: str, cwd: str = APP) -> str:
    """Return what git says of a repository of the agent, whose settings and hooks do not count; empty if it fails."""
    safe = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "safe.directory=*", "-c", "core.pager=cat")
    status, said = run("git", *safe, *words, cwd=cwd)
    return said if status == 0 else ""


def others() -> "list[int]":
    """Return the processes that are not above this one; a dead one may have living threads."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) not in ABOVE:
            try:
                with open("/proc/" + name + "/stat") as file:
                    is_dead = file.read().rpartition(")")[2].split()[0] in "ZX"
                if not is_dead or len(os.listdir("/proc/" + name + "/task")) > 1:
                    found.append(int(name))
            except OSError:
                pass
    return found


def kill_others() -> None:
    """Kill them; at one moment where the container's first process started this one, so that nothing else is spared."""
    at_once = len(ABOVE) == 2
    for pid in [-1] if at_once else others():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pay(reward: float) -> None:
    """End every other process, write the reward, and end."""
    for _ in range(1000):
        kill_others()
        if not others():
            break
        time.sleep(0.01)
    else:
        os._exit(1)
    shutil.rmtree(LOGS, ignore_errors=True)
    os.makedirs(LOGS, exist_ok=True)
    with os.fdopen(os.open(LOGS + "/reward.txt", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w") as file:
        file.write(str(float(reward)) + "\n")
    os._exit(0)
