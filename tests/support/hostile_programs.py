"""Programs that try to make their own failure look like the sandbox's: each has to end as a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import anyio

from agentrl.errors import EnvironmentFault
from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.types import Limits, python_program

_AT_A_TIME = 3
_PREPARED = """
import ctypes, mmap, os, resource, signal, socket, subprocess, sys, threading, time
from contextlib import suppress
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
def until_refused(action):
    kept = []
    with suppress(OSError, RuntimeError):
        while True:
            kept.append(action())
    return kept
"""


class Kind(NamedTuple):
    """A program with the ends that it may have."""

    source: str
    ends: Sequence[str]
    limits: Mapping[str, float] = {}


KINDS: Mapping[str, Kind] = {
    "floods its output": Kind("while True: os.write(1, b'x' * 65536)", ["output"], {"output_kb": 64}),
    "floods both outputs from many threads": Kind(
        "def write():\n  while True: os.write(1, b'x' * 4096); os.write(2, b'x' * 4096)\n"
        "for n in range(16): threading.Thread(target=write).start()",
        ["output"],
        {"output_kb": 64},
    ),
    "closes every descriptor": Kind("os.closerange(0, 256); os._exit(7)", ["exited 7"]),
    "says what bubblewrap says when it fails": Kind(
        "os.write(2, b'bwrap: Creating new namespace failed: Operation not permitted\\n'); os._exit(1)", ["exited 1"]
    ),
    "writes reports of its end to every descriptor": Kind(
        "for n in range(256):\n  with suppress(OSError): os.write(n, b'ready\\n{\"exit-code\": 0}\\n')\nos._exit(3)",
        ["exited 3"],
    ),
    "exits as docker's command does when it fails": Kind("os._exit(125)", ["exited 125"]),
    "exits as a shell does when it cannot start a program": Kind("os._exit(127)", ["exited 127"]),
    "exits with the largest status": Kind("os._exit(255)", ["killed 127"]),
    "signals process 1": Kind(
        "for n in range(1, 65):\n  with suppress(OSError): os.kill(1, n)\nos._exit(4)", ["exited 4", "killed 2"]
    ),
    "signals every process": Kind(
        "os.fork()\nwith suppress(OSError): os.kill(-1, 9)\nos._exit(0)", ["exited 0", "killed 9"]
    ),
    "stops itself": Kind("os.kill(os.getpid(), signal.SIGSTOP)", ["timeout"], {"wall_s": 0.5}),
    "stops process 1 and ends": Kind("os.kill(1, signal.SIGSTOP); os._exit(5)", ["exited 5"]),
    "kills itself": Kind("os.kill(os.getpid(), signal.SIGKILL)", ["killed 9"]),
    "dumps core": Kind("os.kill(os.getpid(), signal.SIGQUIT)", ["killed 3"]),
    "crashes": Kind("ctypes.string_at(0)", ["killed 11"]),
    "rewrites process 1": Kind("with suppress(OSError): open('/proc/1/mem', 'r+b').write(b'x')\nos._exit(6)", ["exited 6"]),
    "takes every right from process 1": Kind(
        "for n in range(16):\n  with suppress(OSError, ValueError): resource.prlimit(1, n, (0, 0))\nos._exit(8)",
        ["exited 8", "killed 9", "killed 24"],
    ),
    "takes memory for itself": Kind(
        "kept = [bytearray(1 << 20) for _ in iter(int, 1)]", ["exited 1", "memory"], {"memory_mb": 64}
    ),
    "takes memory with children": Kind(
        "for _ in range(6):\n  if os.fork() == 0: break\nkept = bytearray(b'x') * (20 << 20); time.sleep(60)",
        ["memory"],
        {"memory_mb": 64},
    ),
    "takes memory in socket buffers": Kind(
        """
def fill():
    pair = socket.socketpair()
    for one in pair:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        one.setblocking(False)
        until_refused(lambda: one.send(b"x" * 65536))
    return pair
for _ in range(4):
    os.fork()
kept = until_refused(fill); time.sleep(60)
""",
        ["memory"],
        {"memory_mb": 96, "open_files": 100},
    ),
    "takes memory in files that it deletes": Kind(
        "kept = [open(f'/tmp/{n}', 'wb', buffering=0) for n in range(24)]\n"
        "for f in kept: f.write(b'x' * (4 << 20)); os.unlink(f.name)\ntime.sleep(60)",
        ["memory"],
        {"memory_mb": 64, "temp_mb": 128},
    ),
    "takes memory in page tables": Kind(
        """
base = libc.mmap(None, 64 << 30, 1, 0x4022, -1, 0)
libc.madvise(ctypes.c_void_p(base), ctypes.c_size_t(64 << 30), 15)
for offset in range(0, 64 << 30, 2 << 20): ctypes.string_at(base + offset, 1)
time.sleep(60)
""",
        ["memory"],
        {"memory_mb": 64, "address_space_mb": 80_000},
    ),
    "takes memory in mappings": Kind(
        """
base = libc.mmap(None, 80 << 20, 3, 0x22, -1, 0)
for number in range(0, 20_000, 2): libc.mprotect(ctypes.c_void_p(base + 4096 * number), ctypes.c_size_t(4096), 1)
for _ in range(16):
    if os.fork() == 0: break
time.sleep(60)
""",
        ["memory"],
        {"memory_mb": 96, "address_space_mb": 512},
    ),
    "forks for ever": Kind("while True:\n  with suppress(OSError): os.fork()", ["timeout", "memory"], {"wall_s": 1.0}),
    "starts threads until refused": Kind(
        "until_refused(lambda: threading.Thread(target=signal.pause, daemon=True).start()); os._exit(0)", ["exited 0"]
    ),
    "opens files until refused": Kind("kept = until_refused(lambda: open('/work/main.py')); os._exit(0)", ["exited 0"]),
    "fills the disk": Kind(
        "f = open('/work/a', 'wb', buffering=0)\nuntil_refused(lambda: f.write(b'x' * 65536)); os._exit(0)",
        ["exited 0"],
        {"work_mb": 4},
    ),
    "makes files without end": Kind(
        "for n in iter(int, 1): open(f'/tmp/{time.monotonic_ns()}', 'w').close()", ["files"], {"num_files": 200}
    ),
    "makes folders without end": Kind(
        "for n in iter(int, 1):\n  with suppress(OSError): os.mkdir('d' * 200); os.chdir('d' * 200)",
        ["files"],
        {"num_files": 200},
    ),
    "deletes its directory and closes the others": Kind(
        "os.unlink('main.py')\nfor p in ('/work', '/tmp', '/dev/shm'):\n  with suppress(OSError): os.chmod(p, 0)\n"
        "os._exit(0)",
        ["exited 0"],
    ),
    "leaves a daemon that holds the pipes": Kind(
        "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(600)\n  os._exit(0)\nos._exit(9)", ["exited 9"]
    ),
    "sends its pipes to itself": Kind(
        "a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0, 1, 2, a.fileno(), b.fileno()]); os._exit(10)",
        ["exited 10"],
    ),
    "becomes itself for ever": Kind("os.execv(sys.executable, ['python3', 'main.py'])", ["timeout"], {"wall_s": 0.5}),
    "spins and ignores every signal": Kind(
        "for n in range(1, 32):\n  with suppress(OSError): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        ["timeout"],
        {"wall_s": 0.5},
    ),
    "spends its time of the processor": Kind("while True: pass", ["killed 24", "killed 9"], {"cpu_s": 1}),
    "asks for a score that spares it": Kind(
        "with suppress(OSError): open('/proc/self/oom_score_adj', 'w').write('-1000')\nos._exit(11)", ["exited 11"]
    ),
    "writes past the largest file": Kind(
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL); os.pwrite(os.open('/work/a', 65), b'x', 1 << 40)", ["killed 25"]
    ),
}
"""By what the program does."""


async def odd_ends(sandbox: BoxSandbox) -> dict[str, str]:
    """Run every kind, some at a time, and return how those ended that did not end as they may."""
    odd: dict[str, str] = {}
    free = anyio.Semaphore(_AT_A_TIME)

    async def run(name: str, kind: Kind) -> None:
        async with free:
            limits = Limits.model_validate({"wall_s": 120.0, **kind.limits})
            try:
                result = await sandbox.run(python_program(_PREPARED + kind.source), limits)
            except EnvironmentFault as fault:
                odd[name] = f"fault: {fault}"
                return
        number = result.exit_status if result.exit_status is not None else result.signal
        end = str(result.ended) + ("" if number is None else f" {number}")
        if end not in kind.ends:
            odd[name] = f"{end}: {result.text[-300:]}"

    async with anyio.create_task_group() as tasks:
        for name, kind in KINDS.items():
            tasks.start_soon(run, name, kind)
    return odd
