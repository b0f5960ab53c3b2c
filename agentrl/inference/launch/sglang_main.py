"""Starts an SGLang server that ends together with the process that started it.

agentrl runs this file by its path, with the Python of SGLang's own environment, where agentrl is not installed; so the file
imports nothing of agentrl. `python sglang_main.py [--api-key-env NAME] [--exit-with-stdin] [--no-sessions] ARGUMENTS...`:
the other arguments are those of `sglang.launch_server`. The server keeps the caches of running episodes where it can, but
not with `--no-sessions`.

Invariant: the key is on no command line and in no log line. With `--exit-with-stdin` no process of the server outlives this
process or the process at the other end of standard input. Only on a CPU do placeholders replace compiled packages.

SGLang spawns its child processes, so each of them imports this file again and runs what it does at import.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import re
import select
import signal
import sys
import types
from collections.abc import Callable, Sequence

_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL once the driver has ended."""
_CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_CPU_DEFAULTS = {
    "--attention-backend": ("torch_native",),
    "--dtype": ("float32",),  # "auto" would turn a float32 checkpoint into float16
    "--mem-fraction-static": ("0.3",),
    "--max-total-tokens": ("16384",),
    "--skip-server-warmup": (),
    "--sleep-on-idle": (),  # an idle scheduler would poll, and take a core from the trainer
}


_CPU_LORA_DEFAULTS = {"--lora-backend": ("torch_native",)}  # the other backends compute with Triton
_MAKES_TENSORS = ("empty", "ones", "tensor", "zeros")
_SESSIONS = "--enable-session-radix-cache"
_SESSIONS_SINCE = (0, 5, 23)
"""The first SGLang that has sessions with its usual cache."""
_WITHOUT_SESSIONS = frozenset(
    {
        "--no-sessions", "--disable-radix-cache", "--radix-cache-backend", "--enable-lmcache", "--enable-flexkv",
        "--enable-unified-cache-external-linker", "--enable-kv-cache-sharding", "--enable-encoder-swa-bounded-replay",
    }
)  # fmt: skip
"""Arguments with which SGLang cannot have sessions, and agentrl's own."""


class MissingKernels(types.ModuleType):
    """Replaces `sgl_kernel`, which has no CPU build: every name can be imported, and a call raises an error."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: object, **_kwargs: object) -> object:
            raise RuntimeError(
                f"sgl_kernel.{name} has no CPU build; this SGLang runs dense models on the torch_native backend only"
            )

        return missing


def take_own_arguments(arguments: Sequence[str]) -> tuple[list[str], str | None, bool]:
    """Return SGLang's arguments, the name of the key's variable or None, and whether to end when standard input ends.

    Example:
        >>> take_own_arguments(["--exit-with-stdin", "--port", "1", "--api-key-env", "KEY"])
        (['--port', '1'], 'KEY', True)
    """
    rest = list(arguments)
    key_name: str | None = None
    exit_with_stdin = "--exit-with-stdin" in rest
    if exit_with_stdin:
        rest.remove("--exit-with-stdin")
    if "--api-key-env" in rest:
        at = rest.index("--api-key-env")
        if at + 1 == len(rest):
            sys.exit("error: --api-key-env needs the name of an environment variable")
        key_name = rest[at + 1]
        del rest[at : at + 2]
    return rest, key_name, exit_with_stdin


def on_cpu(arguments: Sequence[str]) -> bool:
    """Return whether the arguments put the server on a CPU.

    Example:
        >>> on_cpu(["--device", "cpu"]), on_cpu(["--device=cpu"]), on_cpu(["--tp", "2"])
        (True, True, False)
    """
    pairs = itertools.pairwise(arguments)
    return "--device=cpu" in arguments or ("--device", "cpu") in pairs


def with_cpu_defaults(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with the defaults for a CPU in front of them where they are not given."""
    flags = {argument.partition("=")[0] for argument in arguments}
    defaults = _CPU_DEFAULTS | (_CPU_LORA_DEFAULTS if "--enable-lora" in flags else {})
    added = [word for flag, values in defaults.items() if flag not in flags for word in (flag, *values)]
    return [*added, *arguments]


def with_sessions(arguments: Sequence[str], version: str) -> list[str]:
    """Return the arguments, with sessions where this version of SGLang has them beside the other arguments.

    Example:
        >>> with_sessions(["--tp", "2"], "0.5.23"), with_sessions(["--tp", "2"], "0.5.22")
        (['--enable-session-radix-cache', '--tp', '2'], ['--tp', '2'])
        >>> with_sessions(["--no-sessions", "--tp", "2"], "0.5.23")
        ['--tp', '2']
    """
    given = {argument.partition("=")[0] for argument in arguments}
    rest = [argument for argument in arguments if argument != "--no-sessions"]
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if given & _WITHOUT_SESSIONS or _SESSIONS in given or numbers < _SESSIONS_SINCE:
        return rest
    return [_SESSIONS, *rest]


def installed_version() -> str:
    """Return the version of SGLang; empty where it is run from its sources."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return ""


def stand_in_for_kernels() -> object:
    """Return placeholders, to be kept alive, of two compiled packages that SGLang imports but never calls on a CPU."""
    import torch

    if importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = MissingKernels("sgl_kernel")
    found = importlib.util.find_spec("torchvision")
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    operators = [path for folder in folders for path in glob.glob(os.path.join(folder, "_C*.so"))]
    try:
        for path in operators:
            torch.ops.load_library(path)
    except OSError:
        # They are linked against CUDA torch and do not load; the import of torchvision needs these two names.
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


def do_without_pinned_memory() -> None:
    """Have torch make ordinary tensors where pinned ones are asked for.

    SGLang 0.5.23 pins the indices of every batch with LoRA adapters for a copy to a GPU, and a CPU build of torch refuses.
    """
    import torch

    def stays(tensor: torch.Tensor, *_args: object) -> torch.Tensor:
        return tensor

    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def made(*args: object, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
            return make(*args, **kwargs)

        return made

    setattr(torch.Tensor, "pin_memory", stays)  # noqa: B010 - a type checker compares the signatures
    for name in _MAKES_TENSORS:
        setattr(torch, name, unpinned(getattr(torch, name)))


def hide_in_logs(secret: str) -> None:
    """Replace `secret` in every log record of this process; SGLang logs all its arguments when it starts."""
    make = logging.getLogRecordFactory()

    def factory(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        with contextlib.suppress(TypeError, ValueError, KeyError):  # logging itself reports a malformed record
            message = record.getMessage()
            if secret in message:
                record.msg, record.args = message.replace(secret, "***"), None
        return record

    logging.setLogRecordFactory(factory)


def end_with_stdin() -> None:
    """Fork a process that waits for the end of standard input, the driver or this process, and then ends the process group.

    A separate process can act while this one loads a model or hangs in a library. PR_SET_PDEATHSIG is not enough: it acts
    when the *thread* that started this process ends. Nor is standard input: other children of the driver hold its other end.
    """
    driver = _open_driver()
    if os.getpgrp() != os.getpid():
        os.setsid()
    reader, writer = os.pipe()  # the writing end stays open here, and spawned children do not inherit it
    if os.fork():
        os.close(reader)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        if driver is not None:
            os.close(driver)
        return
    os.close(writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    driver_is_gone = False
    while not driver_is_gone:
        ready, _, _ = select.select([0, reader, *([] if driver is None else [driver])], [], [])
        if reader in ready:
            break
        driver_is_gone = driver in ready or _ended(0)
    if driver_is_gone:
        os.killpg(0, signal.SIGTERM)
        select.select([reader], [], [], _GRACE_S)
    os.killpg(0, signal.SIGKILL)


def _open_driver() -> int | None:
    try:
        return os.pidfd_open(os.getppid())
    except (AttributeError, OSError):  # another system, or a container that forbids it
        return None


def _ended(descriptor: int) -> bool:
    try:
        return not os.read(descriptor, 4096)
    except OSError:
        return True


def main() -> None:
    """Run the server until it is stopped, then end its whole process tree."""
    arguments, key_name, exit_with_stdin = take_own_arguments(sys.argv[1:])
    if key_name is not None and not os.environ.get(key_name):
        sys.exit(f"error: --api-key-env: the environment variable {key_name} is not set")
    if exit_with_stdin:
        end_with_stdin()
    held = prepare()
    if on_cpu(arguments):
        arguments = with_cpu_defaults(arguments)
    arguments = with_sessions(arguments, installed_version())
    if key_name is not None:
        arguments += ["--api-key", os.environ[key_name]]
    from sglang.launch_server import run_server  # pyright: ignore[reportMissingImports] - lives in its own environment
    from sglang.srt.server_args import prepare_server_args  # pyright: ignore[reportMissingImports]
    from sglang.srt.utils import kill_process_tree  # pyright: ignore[reportMissingImports]

    status: int | None = None
    try:
        run_server(prepare_server_args(arguments))
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    if status is not None:
        sys.stdout.flush()
        os._exit(status)  # at an orderly exit, libraries would print reports after the shell's prompt is back
    del held


def prepare() -> object:
    """Prepare a process of the server before it imports SGLang; the caller keeps the returned object."""
    arguments, key_name, _ = take_own_arguments(sys.argv[1:])
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]  # modules in this folder share names with the standard library
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if key_name is not None and os.environ.get(key_name):
        hide_in_logs(os.environ[key_name])
    if on_cpu(arguments):
        for name, value in _CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if "--enable-lora" in arguments:
            do_without_pinned_memory()
        return stand_in_for_kernels()
    return None


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the children too; the main process ends them in order
    _HELD = prepare()
