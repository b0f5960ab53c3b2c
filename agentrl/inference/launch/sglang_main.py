"""Start a SGLang server that ends with whoever started it: run by path with the Python of SGLang's own environment.

`python sglang_main.py [--api-key-env NAME] [--exit-with-stdin] ARGUMENTS...`, the rest as for `sglang.launch_server`.
It imports nothing of agentrl, which is not installed there.

Invariant: the key is on no command line and in no log line. With `--exit-with-stdin` no process of the server outlives the
other end of standard input, however that ended, nor this process. Placeholders stand for compiled packages on a CPU only.

SGLang's child processes are spawned, so each of them imports this file again: what is done at import is done in all of them.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import itertools
import logging
import os
import select
import signal
import sys
import types
from collections.abc import Callable, Sequence

_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL once nobody needs the server any more."""
_CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_CPU_DEFAULTS = {
    "--attention-backend": ("torch_native",),
    "--dtype": ("float32",),  # "auto" would turn a float32 checkpoint into float16
    "--mem-fraction-static": ("0.3",),
    "--max-total-tokens": ("16384",),
    "--skip-server-warmup": (),
    "--sleep-on-idle": (),  # an idle scheduler would poll, and take a core from the trainer
}


class MissingKernels(types.ModuleType):
    """Stands for `sgl_kernel`, which has no CPU build: every name imports, and calling it says what is missing."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        """Return a function that raises."""
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: object, **_kwargs: object) -> object:
            raise RuntimeError(
                f"sgl_kernel.{name} has no CPU build; this SGLang runs dense models on the torch_native backend only"
            )

        return missing


def take_own_arguments(arguments: Sequence[str]) -> tuple[list[str], str | None, bool]:
    """Return SGLang's arguments, the name of the key's variable or None, and whether to end with standard input.

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
    """Return the arguments with those a CPU needs, where they are not given."""
    given = {argument.partition("=")[0] for argument in arguments}
    added = [word for flag, values in _CPU_DEFAULTS.items() if flag not in given for word in (flag, *values)]
    return [*added, *arguments]


def stand_in_for_kernels() -> object:
    """Make the two compiled packages importable that SGLang imports and the dense CPU path never calls.

    Returns what must be kept: the placeholders live as long as it does.
    """
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
        # Linked against CUDA torch, they do not load; torchvision's import asks for these two by name.
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


def hide_in_logs(secret: str) -> None:
    """Blank `secret` in every log record of this process; SGLang logs all its arguments when it starts."""
    make = logging.getLogRecordFactory()

    def factory(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        with contextlib.suppress(TypeError, ValueError, KeyError):  # a malformed record is logging's to report
            message = record.getMessage()
            if secret in message:
                record.msg, record.args = message.replace(secret, "***"), None
        return record

    logging.setLogRecordFactory(factory)


def end_with_stdin() -> None:
    """Fork a process that waits for the end of standard input, or of this process, and then ends the process group.

    A process of its own notices while this one loads a model or hangs in a library. PR_SET_PDEATHSIG would not do: it
    follows the *thread* that started this process, which a driver may end early.
    """
    if os.getpgrp() != os.getpid():
        os.setsid()
    reader, writer = os.pipe()  # the writing end stays open here, and spawned children do not inherit it
    if os.fork():
        os.close(reader)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        return
    os.close(writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    driver_is_gone = False
    while not driver_is_gone:
        ready, _, _ = select.select([0, reader], [], [])
        if reader in ready:
            break
        driver_is_gone = _ended(0)
    if driver_is_gone:
        os.killpg(0, signal.SIGTERM)
        select.select([reader], [], [], _GRACE_S)
    os.killpg(0, signal.SIGKILL)


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
        os._exit(status)  # libraries would report what is left at an orderly exit, after the prompt is back
    del held


def prepare() -> object:
    """Do what every process of the server needs before it imports SGLang; keep what is returned."""
    arguments, key_name, _ = take_own_arguments(sys.argv[1:])
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]  # this folder's modules have names of the standard library's
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if key_name is not None and os.environ.get(key_name):
        hide_in_logs(os.environ[key_name])
    if on_cpu(arguments):
        for name, value in _CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        return stand_in_for_kernels()
    return None


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches them too; the main process ends them in order
    _HELD = prepare()
