"""The SGLang launcher, run as it is run for real, around a stand-in for the `sglang` package: keys, ends, placeholders."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, STDOUT
from threading import Timer
from typing import Any

import pytest

from agentrl.inference.launch.sglang import LAUNCHER

PATIENCE_S = 60.0
"""Deadline of a step; a process that needs longer hangs."""
PACKAGE = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/utils.py": """
import os, signal
def kill_process_tree(pid, include_parent=True):
    print("tree ended", include_parent, flush=True)
""",
    "sglang/srt/server_args.py": """
def prepare_server_args(arguments):
    return list(arguments)
""",
    "sglang/child.py": """
import json, logging, os, signal, sys, time
def child(arguments):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
    logging.getLogger("child").info("child has %s", arguments)
    print(json.dumps({"child": os.getpid(), "kernels": "sgl_kernel" in sys.modules}), flush=True)
    time.sleep(600)
""",
    "sglang/launch_server.py": """
import json, logging, multiprocessing, os, sys, time
from sglang.child import child
def run_server(arguments):
    logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
    logging.getLogger("main").info(f"arguments {arguments}")
    if "--fail" in arguments:
        raise RuntimeError("no such model")
    multiprocessing.get_context("spawn").Process(target=child, args=(arguments,)).start()
    seen = {name: os.environ.get(name) for name in ("SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")}
    shown = [word for word in arguments if word != os.environ.get("THE_KEY")]
    print(json.dumps({"main": os.getpid(), "arguments": shown, "environment": seen}), flush=True)
    time.sleep(600)
""",
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stand-in")
    for name, text in PACKAGE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(LAUNCHER), *arguments]


def environment(package: Path, **more: str) -> dict[str, str]:
    unset = ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "SGLANG_USE_CPU_ENGINE")
    return {name: value for name, value in os.environ.items() if name not in unset} | {"PYTHONPATH": str(package)} | more


@contextmanager
def launched(package: Path, *arguments: str, **more: str) -> Generator[subprocess.Popen[str]]:
    """Run the launcher in a session of its own, as agentrl does; whatever is left of it ends with the block."""
    with subprocess.Popen(
        command(*arguments),
        env=environment(package, **more),
        stdin=PIPE,
        stdout=PIPE,
        stderr=STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        overdue = Timer(PATIENCE_S, _kill, [process.pid])  # what is read from it then ends
        overdue.start()
        try:
            yield process
        finally:
            overdue.cancel()
            _kill(process.pid)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def until_ready(process: subprocess.Popen[str]) -> tuple[dict[str, Any], list[str]]:
    """Return what main and child process said of themselves, and every other line."""
    assert process.stdout is not None
    said: dict[str, Any] = {}
    others: list[str] = []
    while not {"main", "child"} <= said.keys():
        line = process.stdout.readline()
        assert line, f"it ended: {others}"
        if line.startswith("{"):
            said |= json.loads(line)
        else:
            others.append(line.rstrip())
    return said, others


def wait_for_the_end_of(*pids: int) -> None:
    """Wait until none of the processes runs; they need not be children of this one."""
    with ExitStack() as stack:
        for pid in pids:
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            stack.callback(os.close, handle)
            assert select.select([handle], [], [], PATIENCE_S)[0], f"process {pid} still runs"


@pytest.mark.starts
def test_the_key_reaches_the_server_and_is_on_no_command_line_and_in_no_log_line(package: Path) -> None:
    with launched(package, "--port", "1", "--api-key-env", "THE_KEY", THE_KEY="s3cret-value") as process:
        said, lines = until_ready(process)
        lines += [Path(f"/proc/{said[who]}/cmdline").read_text() for who in ("main", "child")]
    assert said["arguments"] == ["--port", "1", "--api-key"]
    assert [line for line in lines if "s3cret" in line] == []
    assert "arguments ['--port', '1', '--api-key', '***']" in lines
    assert "child has ['--port', '1', '--api-key', '***']" in lines


@pytest.mark.starts
def test_a_key_that_is_not_set_is_one_message(package: Path) -> None:
    ended = subprocess.run(
        command("--api-key-env", "NO_KEY"), env=environment(package), capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr == "error: --api-key-env: the environment variable NO_KEY is not set\n"


@pytest.mark.starts
def test_a_killed_driver_takes_the_whole_server_with_it(package: Path) -> None:
    driver = (
        "import subprocess, sys\n"
        "server = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)\n"
        "server.wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", driver, *command("--exit-with-stdin")], env=environment(package), stdout=PIPE, text=True
    ) as process:
        said, _ = until_ready(process)
        process.kill()  # SIGKILL: the driver cannot clean up
        wait_for_the_end_of(said["main"], said["child"])  # the child ignores SIGTERM


@pytest.mark.starts
def test_a_killed_launcher_takes_its_children_with_it(package: Path) -> None:
    with launched(package, "--exit-with-stdin") as process:
        said, _ = until_ready(process)
        os.kill(process.pid, signal.SIGKILL)
        wait_for_the_end_of(said["main"], said["child"])


@pytest.mark.starts
def test_standard_input_that_ends_at_once_ends_a_server_that_is_still_starting(package: Path) -> None:
    ended = subprocess.run(
        command("--exit-with-stdin"),
        env=environment(package),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode in (-signal.SIGTERM, -signal.SIGKILL)


@pytest.mark.starts
def test_what_the_server_raises_is_its_exit_status_and_its_children_are_ended(package: Path) -> None:
    with launched(package, "--exit-with-stdin", "--fail") as process:
        said = process.stdout.read() if process.stdout else ""
        assert process.wait(PATIENCE_S) == 1
    assert "RuntimeError: no such model" in said
    assert "tree ended False" in said


@pytest.mark.starts
def test_an_interrupt_ends_it_in_order_and_without_a_traceback(package: Path) -> None:
    with launched(package) as process:
        until_ready(process)
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C in a terminal sends, to all of them
        said = process.stdout.read(len("tree ended False")) if process.stdout else ""
        assert process.wait(PATIENCE_S) == 130
    assert said == "tree ended False"


@pytest.mark.starts
def test_on_a_cpu_the_defaults_and_placeholders_are_there_in_every_process(package: Path) -> None:
    with launched(package, "--dtype", "bfloat16", "--device", "cpu") as process:
        said, _ = until_ready(process)
    assert said["kernels"] is True
    assert said["environment"] == {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    assert said["arguments"].count("--dtype") == 1
    assert said["arguments"][:2] == ["--attention-backend", "torch_native"]


@pytest.mark.starts
def test_on_a_cpu_adapters_are_computed_by_torch_and_need_no_pinned_memory(package: Path) -> None:
    with launched(package, "--device", "cpu", "--enable-lora") as process:
        said, _ = until_ready(process)
    at = said["arguments"].index("--lora-backend")
    assert said["arguments"][at + 1] == "torch_native"
    asked = "torch.zeros(2, dtype=torch.int32, pin_memory=True).pin_memory().tolist()"
    code = f"import sys, torch; sys.path.insert(0, {str(LAUNCHER.parent)!r}); import sglang_main; "
    code += f"sglang_main.do_without_pinned_memory(); print({asked}, torch.tensor([3], pin_memory=True).tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S * 5)
    assert done.stdout == "[0, 0] [3]\n"


@pytest.mark.starts
def test_elsewhere_nothing_stands_in_for_compiled_packages_and_no_default_is_added(package: Path) -> None:
    with launched(package, "--tp", "2") as process:
        said, _ = until_ready(process)
    assert said["kernels"] is False
    assert said["arguments"] == ["--tp", "2"]
    assert said["environment"]["SGLANG_USE_CPU_ENGINE"] is None


def test_a_placeholder_says_what_is_missing_when_it_is_called() -> None:
    from agentrl.inference.launch.sglang_main import MissingKernels

    with pytest.raises(RuntimeError, match=r"sgl_kernel.rmsnorm_cpu has no CPU build"):
        MissingKernels("sgl_kernel").rmsnorm_cpu()
