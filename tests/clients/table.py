"""Writes the table of clients in `docs/howto/gateway.md` from the rows that the tests of clients left.

Run: `python -m tests.clients.table`, which `make test-clients` does.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from tests.clients.catalog import CLIENTS, ROOT, ClientProgram
from tests.clients.harness import Played

ROWS = ROOT / "build" / "clients"
PAGE = ROOT / "docs" / "howto" / "gateway.md"
BEGIN, END = "<!-- clients: make test-clients -->\n", "<!-- /clients -->\n"
HEAD = """\
| client | version | mode | dialect | streams | turns | branches | forks | answers sent back changed | a lost answer is |
|---|---|---|---|---|---|---|---|---|---|
"""


def leave_row(played: Played) -> None:
    """Leave the row of a client for the table."""
    row = {
        "streams": played.streamed,
        "turns": len(played.trajectory.turns),
        "branches": played.branches,
        "forks": played.forks,
        "resent": played.resent,
        "ignored": played.ignored,
    }
    ROWS.mkdir(parents=True, exist_ok=True)
    (ROWS / f"{played.program.name}.json").write_text(json.dumps(row))


def leave_row_of_loss(played: Played) -> None:
    """Leave what became of a client's lost answer for the table."""
    row = {"lost": "sent again" if played.marks_retries else "sampled again"}
    ROWS.mkdir(parents=True, exist_ok=True)
    (ROWS / f"{played.program.name}.lost.json").write_text(json.dumps(row))


def written_table() -> str:
    """Return the table, and what stands below it; every client has a row."""
    rows: list[tuple[ClientProgram, dict[str, Any]]] = []
    for program in CLIENTS:
        path = ROWS / f"{program.name}.json"
        if not path.exists():
            raise SystemExit(f"{program.name} has no row in {ROWS}; run `make test-clients`, which plays all clients")
        lost = path.with_suffix(".lost.json")
        loss = json.loads(lost.read_text()) if lost.exists() else {"lost": "-"}
        rows.append((program, json.loads(path.read_text()) | loss))
    lines = [_line(program, row) for program, row in rows]
    reasons = [f"- {program.client}: {program.why}\n" for program, _ in rows if program.why]
    return (
        HEAD + "".join(lines) + _below("More than one branch:", reasons) + _below("Fields without effect:", _ignored(rows))
    )


@cache
def pins() -> dict[str, str]:
    """Return the version of each package of the clients."""
    text = "".join(path.read_text() for path in sorted((ROOT / "scripts").glob("clients_*_requirements.txt")))
    found = {f"pip {name}": version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)}
    packages = json.loads((ROOT / "scripts" / "clients_node" / "package.json").read_text())["dependencies"]
    return found | {f"npm {name}": version for name, version in packages.items()}


def _line(program: ClientProgram, row: dict[str, Any]) -> str:
    forks = ", ".join(f"{reason} {count}" for reason, count in row["forks"].items()) or "none"
    cells = [
        program.client,
        pins()[program.package],
        program.mode or "-",
        program.dialect,
        "yes" if row["streams"] else "no",
        row["turns"],
        row["branches"],
        forks,
        ", ".join(row["resent"]) or "no",
        row["lost"],
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |\n"


def _ignored(rows: list[tuple[ClientProgram, dict[str, Any]]]) -> list[str]:
    """Return a line for each client whose requests have fields without effect, in any of its modes."""
    found: dict[str, set[str]] = {}
    for program, row in rows:
        found.setdefault(program.client, set()).update(row["ignored"])
    return [f"- {client}: {', '.join(f'`{name}`' for name in sorted(names))}\n" for client, names in found.items() if names]


def _below(title: str, lines: list[str]) -> str:
    return f"\n{title}\n\n{''.join(lines)}" if lines else ""


def main() -> None:
    """Write the table into the page, between its marks."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{written_table()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
