"""Converts the private tests of LiveCodeBench files to JSON: `python -m agentrl_workflows.tasks.private_tests IN OUT`.

They are published as base64 of zlib of a pickle of a JSON text. The sandbox decodes them, with an unpickler that knows no
globals; this process reads JSON alone.

Invariant: nothing is unpickled or decompressed outside the sandbox. Whatever comes back is checked before it is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, cast

import anyio
from cyclopts import App
from rich.console import Console

from agentrl.commands.running import run_command
from agentrl.data.source import DataRecord, iterate_records
from agentrl.errors import ConfigError
from agentrl.support.exact_json import decode_exact_json, encode_exact_json
from agentrl.support.foreign import one_line, shortened
from agentrl_sandbox import Limits, Sandbox, open_sandbox, python_program

_MAX_MIB: Final = 512
"""Of the decoded tests of one record."""
DECODER: Final = f"""
import base64, io, json, pickle, sys, zlib

class NoGlobals(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {{module}}.{{name}}")

    def persistent_load(self, pid):
        raise pickle.UnpicklingError("it names something outside")

packed = zlib.decompressobj()
data = packed.decompress(base64.b64decode(sys.stdin.buffer.read()), {_MAX_MIB} << 20)
if packed.unconsumed_tail:
    sys.exit("it has more than {_MAX_MIB} MiB")
text = NoGlobals(io.BytesIO(data)).load()
cases = json.loads(text) if isinstance(text, (str, bytes)) else text
sys.stdout.write(json.dumps(cases))
"""
"""Runs in the sandbox only."""
_LIMITS: Final = Limits(wall_s=120, cpu_s=60, memory_mb=4096, output_kb=_MAX_MIB * 1024)


async def decode_private_tests(sandbox: Sandbox, record: DataRecord) -> list[dict[str, str]]:
    """Return the private tests of a record, decoded in the sandbox where they are packed.

    Raises:
        ConfigError: they cannot be decoded, or are no tests; the message names the record.

    Cancellation: the sandbox is ended.
    """
    written = record.value("private_test_cases", kind="tests")
    cases: object = written
    if isinstance(written, str) and written.lstrip().startswith("["):
        cases = record.listed("private_test_cases")
    elif isinstance(written, str):
        result = await sandbox.run(python_program(DECODER, stdin=written.encode()), _LIMITS)
        if not result.is_success:
            said = shortened(one_line(result.stderr.decode(errors="replace").strip()[-200:]), 200)
            raise record.error(f"'private_test_cases' cannot be decoded in the sandbox ({result.ended}): {said}")
        try:
            cases = decode_exact_json(result.stdout)
        except ValueError as error:
            raise record.error(f"'private_test_cases': the sandbox sent no JSON: {error}") from None
    return [_checked_test(record, case) for case in (cast("list[object]", cases) if isinstance(cases, list) else [cases])]


def _checked_test(record: DataRecord, case: object) -> dict[str, str]:
    found = cast("dict[str, object]", case) if isinstance(case, dict) else {}
    texts = {name: str(found[name]) for name in ("input", "output", "testtype") if isinstance(found.get(name), str)}
    if "input" not in texts or "output" not in texts:
        raise record.error(f"'private_test_cases': expected tests with the texts 'input' and 'output', got {case!r:.100}")
    return texts


async def convert_private_tests(source: str, target: Path) -> int:
    """Write the records of `source` to the JSON lines `target`, with private tests as JSON; return their number.

    Raises:
        ConfigError: a record cannot be used, or this machine has no sandbox.

    Cancellation: the sandbox is ended; `target` holds the records up to there.
    """
    number = 0
    async with open_sandbox() as sandbox, await anyio.open_file(target, "wb") as out:
        for record in iterate_records(source):
            cases = await decode_private_tests(sandbox, record)
            await out.write(encode_exact_json({**record, "private_test_cases": cases}) + b"\n")
            number += 1
    return number


app = App(name="private-tests", help="Convert the private tests of LiveCodeBench files to JSON, in the sandbox.")


@app.default
def convert(source: str, target: Path) -> None:
    """Convert a file.

    Args:
        source: A file of LiveCodeBench, a pattern, or a folder.
        target: The JSON lines to write.
    """
    if target.exists():
        raise ConfigError(f"{target}: it exists; name another file")
    number = anyio.run(convert_private_tests, source, target)
    Console().print(f"{target}: {number} records", soft_wrap=True)


if __name__ == "__main__":
    run_command(app)
