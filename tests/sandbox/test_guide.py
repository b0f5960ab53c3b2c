"""The guide's programs run as they stand."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.bubblewrap.seccomp import DENIED
from agentrl_sandbox.types import Result

GUIDE = (Path(__file__).parents[2] / "docs" / "howto" / "sandbox.md").read_text()


@pytest.mark.starts
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_guide_s_snippets_run(sandbox: BoxSandbox, capsys: pytest.CaptureFixture[str]) -> None:
    del sandbox
    snippets = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE, re.S))
    names: dict[str, Callable[[], Awaitable[Result]]] = {}
    exec(f"async def guide():\n{textwrap.indent(snippets, '    ')}\n    return result\n", names)
    assert (await names["guide"]()).text == "42"
    assert capsys.readouterr().out == "\n"


def test_the_guide_counts_the_refused_calls() -> None:
    assert f"- {len(DENIED)} system calls are refused" in GUIDE
