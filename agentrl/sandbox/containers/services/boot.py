"""Brings the supervisor into an environment that has a Python and nothing of agentrl, over the input of one process."""

from __future__ import annotations

import json
import struct
from typing import Final

from agentrl.sandbox.box import supervisor_options
from agentrl.sandbox.inside import files_inside
from agentrl.sandbox.types import Limits

BOOT: Final = """
import json, os, struct, sys
def read(count):
    data = b""
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            sys.exit("the input ended before the supervisor came")
        data += piece
    return data
given = json.loads(read(struct.unpack(">I", read(4))[0]))
folder = "/run/agentrl"
os.makedirs(folder, exist_ok=True)
for name, text in given["files"].items():
    with open(os.path.join(folder, name), "w") as file:
        file.write(text)
os.environ.clear()
os.environ.update(given["environment"])
os.chdir("/")
sys.stderr.write("ready\\n")
sys.stderr.flush()
os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", folder + "/supervisor.py", given["options"]])
"""
"""What `python3 -I -S -c` runs: it reads the supervisor, writes it down and becomes it."""


def boot_message(limits: Limits, environment: dict[str, str]) -> bytes:
    """Return what `BOOT` reads before the supervisor's requests."""
    files = {name: data.decode() for name, data in files_inside("session").items()}
    given = {"files": files, "environment": environment, "options": json.dumps(supervisor_options(limits))}
    data = json.dumps(given).encode()
    return struct.pack(">I", len(data)) + data
