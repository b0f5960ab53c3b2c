"""A filter for the kernel that refuses system calls of a sandboxed program.

Invariant: a program can neither reach what namespaces do not separate nor hold memory that the sandbox does not count. The
filter is a second wall: every call in it is one that namespaces or capabilities should refuse as well, or whose code in the
kernel has a record of holes.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from agentrl.errors import ConfigError


class Architecture(NamedTuple):
    """The kernel's numbers of the system calls of a processor."""

    audit: int
    column: int
    clone: int
    clone3: int
    socket: int
    ioctl: int
    mmap: int
    setsockopt: int
    fcntl: int


_ARCHITECTURES: Final = {
    "x86_64": Architecture(0xC000003E, 0, clone=56, clone3=435, socket=41, ioctl=16, mmap=9, setsockopt=54, fcntl=72),
    "aarch64": Architecture(0xC00000B7, 1, clone=220, clone3=435, socket=198, ioctl=29, mmap=222, setsockopt=208, fcntl=25),
}

# fmt: off
DENIED: Final[dict[str, tuple[int | None, int | None]]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    # mounts and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "statmount": (457, 457), "listmount": (458, 458), "open_tree_attr": (467, 467),
    "unshare": (272, 97), "setns": (308, 268),
    # the kernel itself
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "create_module": (174, None), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_setup": (206, 0), "vmsplice": (278, 75),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "personality": (135, 92),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "vhangup": (153, 58), "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42), "uselib": (134, None), "ustat": (136, None), "sysfs": (139, None), "_sysctl": (156, None),
    "sethostname": (170, 161), "setdomainname": (171, 162), "move_pages": (279, 239), "migrate_pages": (256, 238),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "set_mempolicy_home_node": (450, 450),
    # keys and handles that outlive namespaces
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    # memory that belongs to no process
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180),
}
# fmt: on
"""Number of each refused call on x86_64 and on aarch64."""

_NEW_NAMESPACES: Final = 0x7E020000
"""Every `CLONE_NEW...` flag."""
_FAMILIES: Final = (1, 2, 10)
"""Sockets that may be made: unix, IPv4 and IPv6; the network namespace has nothing but its own loopback."""
_TERMINAL_INPUT: Final = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into a terminal."""
_X32: Final = 0x40000000
_SHARED, _ANONYMOUS, _HUGE_PAGES = 0x01, 0x20, 0x40000
_SOCKET_LEVEL: Final = 1
_BUFFER_SIZES: Final = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF and their forced kinds; all sockets keep the machine's default."""
_PIPE_SIZE: Final = 1031
"""F_SETPIPE_SZ."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1, _ARGUMENT_2, _ARGUMENT_3 = 0, 4, 16, 24, 32, 40


def native_architecture() -> Architecture:
    """Return the numbering of this machine's processor; one that the filter does not know is a ConfigError."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        known = " and ".join(_ARCHITECTURES)
        raise ConfigError(f"sandbox: the system call filter knows {known}, not {machine}; use the docker or remote backend")
    return _ARCHITECTURES[machine]


def seccomp_filter(architecture: Architecture) -> bytes:
    """Return the filter as the kernel's `sock_filter` array: denied calls get EPERM, other architectures end the process."""
    code = [_word(_LOAD, _ARCHITECTURE), _word(_EQUAL, architecture.audit, yes=1), _word(_RETURN, _KILL)]
    code.append(_word(_LOAD, _NUMBER))
    if architecture.column == 0:
        code += [_word(_AT_LEAST, _X32, no=1), _word(_RETURN, _KILL)]
    for numbers in DENIED.values():
        number = numbers[architecture.column]
        if number is not None:
            code += [_word(_EQUAL, number, no=1), _refuse(errno.EPERM)]
    # Its flags are in memory, where a filter cannot look; the C library falls back to clone.
    code += [_word(_EQUAL, architecture.clone3, no=1), _refuse(errno.ENOSYS)]
    code += [_word(_EQUAL, architecture.clone, no=4), _word(_LOAD, _ARGUMENT_0), _word(_ANY_BIT, _NEW_NAMESPACES, no=1)]
    code += [_refuse(errno.EPERM), _word(_RETURN, _ALLOW)]
    code += _only_for(architecture.socket, _ARGUMENT_0, _FAMILIES, others=_refuse(errno.EAFNOSUPPORT))
    code += _only_for(architecture.ioctl, _ARGUMENT_1, _TERMINAL_INPUT, them=_refuse(errno.EPERM))
    code += _uncounted_memory(architecture)
    code.append(_word(_RETURN, _ALLOW))
    return b"".join(code)


def _only_for(
    call: int, argument: int, values: Sequence[int], *, them: bytes | None = None, others: bytes | None = None
) -> list[bytes]:
    """Return the treatment of `call` for some values of an argument and for the others; None: allowed."""
    allow = _word(_RETURN, _ALLOW)
    tests = [_word(_EQUAL, value, yes=len(values) - place) for place, value in enumerate(values)]
    return [
        _word(_EQUAL, call, no=len(tests) + 3),
        _word(_LOAD, argument),
        *tests,
        others or allow,
        them or allow,
    ]


def _uncounted_memory(architecture: Architecture) -> list[bytes]:
    """Return the treatment of the calls that make memory which no process and no directory shows.

    Shared mappings without a file, huge pages and larger pipes fail. Larger buffers of sockets are answered with success
    and not given, as the kernel does beyond its own maximum: programs ask for them to be faster, and work without.
    """
    code = [
        _word(_EQUAL, architecture.mmap, no=7),
        _word(_LOAD, _ARGUMENT_3),
        _word(_ANY_BIT, _HUGE_PAGES, no=1),
        _refuse(errno.ENOMEM),
        _word(_ANY_BIT, _ANONYMOUS, no=2),
        _word(_ANY_BIT, _SHARED, no=1),
        _refuse(errno.EPERM),
        _word(_RETURN, _ALLOW),
    ]
    sizes = _only_for(architecture.setsockopt, _ARGUMENT_2, _BUFFER_SIZES, them=_refuse(0))
    code += [_word(_EQUAL, architecture.setsockopt, no=len(sizes) + 2), _word(_LOAD, _ARGUMENT_1)]
    code += [_word(_EQUAL, _SOCKET_LEVEL, yes=1), _word(_RETURN, _ALLOW), *sizes[1:]]
    return code + _only_for(architecture.fcntl, _ARGUMENT_1, (_PIPE_SIZE,), them=_refuse(errno.EPERM))


def _word(operation: int, operand: int, *, yes: int = 0, no: int = 0) -> bytes:
    """Return one instruction; `yes` and `no` are how many instructions a comparison skips."""
    return struct.pack("=HBBI", operation, yes, no, operand)


def _refuse(number: int) -> bytes:
    return _word(_RETURN, _REFUSE | number)
