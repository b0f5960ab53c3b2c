"""Environments for stand-ins of docker, kubectl and E2B: copies of a root in bubblewrap, whose namespaces others enter.

`python fake_roots.py docker|kubectl FOLDER WORDS...` is the stand-in for the command. FOLDER holds its images, the copies of
running environments, and `calls.jsonl`. It understands the words that agentrl writes, and fails on any other. `python
fake_roots.py hold FOLDER NAME` starts an environment.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

FLAGS = {"--rm", "--interactive"}
OPTIONS = {
    *("--pull", "--name", "--network", "--cap-drop", "--security-opt", "--user", "--workdir", "--memory", "--memory-swap"),
    *(
        "--pids-limit",
        "--ulimit",
        "--shm-size",
        "--hostname",
        "--log-driver",
        "--mount",
        "--env",
        "--runtime",
        "--entrypoint",
    ),
}


def make_image(folder: Path, name: str) -> None:
    """Make an image of this machine's programs, which has a file of its own."""
    root = folder / "images" / name
    for place in ("app", "dev", "proc", "usr", "etc", "tmp", "root", "run", "data", "var/tmp"):
        (root / place).mkdir(parents=True)
    for place in ("bin", "sbin", "lib", "lib64"):
        if Path("/", place).is_symlink():
            (root / place).symlink_to(os.readlink(f"/{place}"))
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "data/of-image").write_text("image\n")


def copy_image(folder: Path, image: str, name: str) -> Path:
    """Begin an environment."""
    root = folder / "running" / name
    shutil.copytree(folder / "images" / image.replace(":", "_"), root, symlinks=True)
    return root


def first_words(root: Path, mounts: dict[str, str], variables: dict[str, str]) -> list[str]:
    """Return the words before the command that is the first process of an environment."""
    words = ["bwrap", "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--uid", "0", "--gid", "0"]
    words += ["--as-pid-1", "--clearenv", "--bind", str(root), "/", "--ro-bind", "/usr", "/usr"]
    words += ["--proc", "/proc", "--dev", "/dev"]
    for inner, outer in mounts.items():
        words += ["--ro-bind", outer, inner]
    for name, value in variables.items():
        words += ["--setenv", name, value]
    return [*words, "--chdir", "/"]


def hold(folder: Path, name: str) -> None:
    """Start an environment that does nothing until `end`, and return when others can enter it."""
    root = folder / "running" / name
    words = [*first_words(root, {}, {"PATH": "/usr/bin:/bin"}), "sh", "-c", "echo here; exec sleep infinity >/dev/null"]
    nothing = subprocess.DEVNULL
    child = subprocess.Popen(words, start_new_session=True, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"here\n"
    (folder / "running" / f"{name}.pid").write_text(str(child.pid))


def entry(folder: Path, name: str, variables: dict[str, str]) -> list[str]:
    """Return the words before a command that is a further process of an environment."""
    outer = (folder / "running" / f"{name}.pid").read_text()
    first = Path("/proc", outer, "task", outer, "children").read_text().split()[0]
    words = ["nsenter", "--target", first, "--user", "--mount", "--net", "--ipc", "--pid", "--preserve-credentials"]
    return [*words, "--wd=/", "--", "env", "-i", *(f"{key}={value}" for key, value in variables.items())]


def docker(folder: Path, words: list[str]) -> int:
    verb, *words = words
    if verb == "rm":
        end(folder, words[-1])
        return 0
    if verb == "image" and not (folder / "images" / words[-1].replace(":", "_")).is_dir():
        sys.stderr.write(f"Error: No such image: {words[-1]}\n")
        return 1
    if verb in ("version", "image"):
        return 0
    if verb == "exec":
        assert words.pop(0) == "--interactive"
        name, *command = words
        return subprocess.call([*entry(folder, name, {"PATH": "/usr/bin:/bin"}), *command])
    assert verb == "run", verb
    given: dict[str, list[str]] = {}
    while words[0].startswith("--"):
        word = words.pop(0)
        if word not in FLAGS:
            assert word in OPTIONS, word
            given.setdefault(word, []).append(words.pop(0))
    image, *command = words
    name = given["--name"][0]
    parts = [dict(pair.split("=", 1) for pair in mount.split(",") if "=" in pair) for mount in given["--mount"]]
    variables = dict(pair.split("=", 1) for pair in given["--env"])
    root = copy_image(folder, image, name)
    inside = first_words(root, {part["target"]: part["source"] for part in parts}, variables)
    code = play(folder, name, [*inside, given["--entrypoint"][0], *command])
    shutil.rmtree(root, ignore_errors=True)
    return code


def play(folder: Path, name: str, command: list[str]) -> int:
    """Run the first process of an environment to its end, in a group that `end` can find."""
    child = subprocess.Popen(command, start_new_session=True)
    (folder / "running" / f"{name}.pid").write_text(str(child.pid))
    code = child.wait()
    return code if code >= 0 else 128 - code


def end(folder: Path, name: str) -> None:
    """Kill an environment and delete its files."""
    with suppress(FileNotFoundError, ProcessLookupError):
        os.killpg(int((folder / "running" / f"{name}.pid").read_text()), signal.SIGKILL)
    (folder / "running" / f"{name}.pid").unlink(missing_ok=True)
    shutil.rmtree(folder / "running" / name, ignore_errors=True)


def kubectl(folder: Path, words: list[str]) -> int:
    verb, *words = words
    if verb == "create":
        asked = json.load(sys.stdin)
        with (folder / "calls.jsonl").open("a") as calls:
            calls.write(json.dumps(asked) + "\n")
        name = asked["metadata"]["name"]
        copy_image(folder, asked["spec"]["podTemplate"]["spec"]["containers"][0]["image"], name)
        hold(folder, name)
        return 0
    if verb == "wait":
        name = words[1].rpartition("/")[2]
        return 0 if (folder / "running" / name).is_dir() else 1
    if verb == "exec":
        name, command = words[1], words[words.index("--") + 1 :]
        return subprocess.call([*entry(folder, name, {"PATH": "/usr/bin:/bin"}), *command])
    if verb == "delete":
        end(folder, words[1])
        return 0
    assert verb == "get", verb
    if len(words) > 3 and not (folder / "running" / words[1]).is_dir():
        sys.stderr.write(f'Error from server (NotFound): sandboxes.agents.x-k8s.io "{words[1]}" not found\n')
        return 1
    sys.stdout.write(f"{words[0]}/{words[1] if len(words) > 3 else ''}\n")
    return 0


if __name__ == "__main__":
    kind, place, *rest = sys.argv[1:]
    if kind == "hold":
        raise SystemExit(hold(Path(place), *rest))
    raise SystemExit({"docker": docker, "kubectl": kubectl}[kind](Path(place), rest))
