"""Compare the arms of `benchmarks.staleness`: regret to the best arm of each cell, and alarms before a fall.

Run: `python -m benchmarks.staleness_regret`. It reads benchmarks/results/staleness.json, prints tables, and writes
them with all figures to benchmarks/results/staleness.md.

A cell is a policy or the demo, a number of minibatches, a learning rate and a lag. The regret of an arm there is the mean
success of the best arm minus its own, with the root of the sum of both squared half intervals. An arm loses a cell whose
regret is above that. An alarm is the first step at which a metric passes its bound; a fall is the first step after which the
mean success of five steps is below half of the best one.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.engine.alarms import DRAGGED
from benchmarks.staleness import ARMS, show
from benchmarks.staleness_demo import demo_table, fall_of

RESULTS = Path(__file__).parent / "results" / "staleness.json"
PAGE = RESULTS.with_suffix(".md")
Row: TypeAlias = Mapping[str, Any]
Cell: TypeAlias = tuple[str, int, float, int]
DEMO_MAIN = ("naive", "decoupled", "dppo_tv", "anchored", "by_age")
"""Arms that were measured on ten seeds of the demo; the tables of success have the others too."""
ALARMS: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    f"log_ratio_positive < {DRAGGED}": ("log_ratio_positive", lambda value: value < DRAGGED),
    "fallen_fraction_negative > 0.2": ("fallen_fraction_negative", lambda value: value > 0.2),
    "sample_ess_ratio < 0.1": ("sample_ess_ratio", lambda value: value < 0.1),
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean success of an arm in a cell, with half of its 95 % interval, and the share of runs below 0.45."""

    mean: float
    half: float
    low: float
    runs: int


def estimates(results: Mapping[str, Any]) -> dict[Cell, dict[str, Estimate]]:
    """Return the estimates of both tiers by cell and arm."""
    found: dict[Cell, dict[str, Estimate]] = {}
    for row in results.get("rows", ()):
        cell = (str(row["policy"]), int(row["minibatches"]), float(row["rate"]), int(row["lag"]))
        found.setdefault(cell, {})[row["arm"]] = Estimate(row["success"], row["half_interval"], 0.0, int(results["seeds"]))
    runs: dict[tuple[Cell, str], list[float]] = {}
    for row in results.get("demo", {}).get("rows", ()):
        cell = ("demo", int(row["minibatches"]), float(row["rate"]), int(row["lag"]))
        runs.setdefault((cell, row["arm"]), []).append(float(row["success"]))
    for (cell, arm), values in sorted(runs.items()):
        half = 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
        low = sum(value < 0.45 for value in values) / len(values)
        found.setdefault(cell, {})[arm] = Estimate(statistics.fmean(values), half, low, len(values))
    return found


def regret_table(cells: Mapping[Cell, Mapping[str, Estimate]], tier: str, names: Sequence[str]) -> Iterator[str]:
    """Yield a table of arms of a tier over the cells in which all of them were measured, the smallest regret first."""
    here = {cell: arms for cell, arms in cells.items() if (cell[0] == "demo") == (tier == "demo")}
    whole = {
        cell: {name: arms[name] for name in names}
        for cell, arms in here.items()
        if all(name in arms and arms[name].runs > 1 for name in names)
    }
    yield f"\n{tier}: {len(names)} arms, {len(whole)} of {len(here)} cells\n"
    yield "| arm | largest regret | in | mean regret | cells lost | mean success | runs below 0.45 |"
    yield "|---|---|---|---|---|---|---|"
    rows: list[tuple[float, str]] = []
    for name in names:
        losses: list[tuple[float, float, Cell]] = []
        for cell, arms in whole.items():
            best = max(arms.values(), key=lambda each: each.mean)
            own = arms[name]
            losses.append((best.mean - own.mean, math.hypot(best.half, own.half), cell))
        if not losses:
            continue
        largest, _, where = max(losses)
        lost = sum(regret > joint for regret, joint, _ in losses)
        mean = statistics.fmean(regret for regret, _, _ in losses)
        own_cells = [arms[name] for arms in whole.values()]
        low = sum(each.low * each.runs for each in own_cells) / sum(each.runs for each in own_cells)
        place = f"{where[0]}, {where[1]}, {where[2]:g}, lag {where[3]}"
        success = statistics.fmean(each.mean for each in own_cells)
        fell = f"{low:.0%}" if tier == "demo" else "-"
        rows.append((largest, f"| {name} | {largest:.3f} | {place} | {mean:.3f} | {lost} | {success:.3f} | {fell} |"))
    yield from (text for _, text in sorted(rows))


def alarm_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how many steps before a fall each alarm rings, and how often it rings in runs that do not fall."""
    recorded = [row for row in rows if "log_ratio_positive" in row]
    fell = {id(row): fall for row in recorded if (fall := fall_of(row["curve"])) is not None}
    yield f"\nalarms: {len(fell)} of {len(recorded)} runs fell\n"
    yield "| alarm | rang in runs that fell | steps before the fall, median | rang in others |"
    yield "|---|---|---|---|"
    for name, (metric, rings) in ALARMS.items():
        first = {id(row): _first(row[metric], rings) for row in recorded}
        ahead = [fall - at for key, fall in fell.items() if (at := first[key]) is not None and at <= fall]
        others = [row for row in recorded if id(row) not in fell]
        false = sum(first[id(row)] is not None for row in others)
        middle = f"{statistics.median(ahead):g}" if ahead else "-"
        yield f"| {name} | {len(ahead)} of {len(fell)} | {middle} | {false} of {len(others)} |"


def _first(values: Sequence[float | None], rings: Callable[[float], bool]) -> int | None:
    """Return the first step, from 1, whose value rings; a step that trained nothing has none."""
    return next((at for at, value in enumerate(values, 1) if value is not None and rings(value)), None)


def main() -> None:
    """Print and write the tables."""
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    cells, runs = estimates(results), results["demo"]["rows"]
    lines = [
        *regret_table(cells, "small policies", list(ARMS)),
        *regret_table(cells, "demo", DEMO_MAIN),
        *alarm_table(runs),
    ]
    print("\n".join(lines))
    figures = [*lines, show(results["rows"]), *demo_table(runs)]
    head = "# Stale data: all figures\n\nWritten by `python -m benchmarks.staleness_regret` from staleness.json.\n"
    PAGE.write_text(head + "\n".join(figures) + "\n")


if __name__ == "__main__":
    main()
