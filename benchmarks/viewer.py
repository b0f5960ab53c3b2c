"""`agentrl view` on 50,048 episodes: seconds to the first rows of the table, and the time of a frame while it scrolls.

Run: .venv/bin/python -m benchmarks.viewer        (about a minute; needs Chromium and the extra `browser`)

The clock starts with the command, in a fresh process, and stops when the rows are in the page of a browser that is already
open. The table then scrolls by 40 rows a frame for 300 frames.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports] - the extra `browser`

from benchmarks.machine import describe_machine
from tests.support.synthetic_run import write_run

RESULTS = Path(__file__).parent / "results" / "viewer.json"
STEPS = 736
REPEATS = 5
SCROLL = """async () => {
  const scroller = document.querySelector(".scroller");
  const times = [];
  let last = performance.now();
  for (let frame = 0; frame < 300; frame += 1) {
    scroller.scrollTop += 40 * 26;
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    times.push(now - last);
    last = now;
  }
  return times;
}"""
FILTER = """() => {
  const began = performance.now();
  setQuery({ outcome: "success", sort: "-output" });
  episodesView.refresh();
  return performance.now() - began;
}"""


def open_table(page: Any, run_dir: Path) -> dict[str, float]:  # noqa: ANN401 - Playwright's own type
    """Return the seconds from the command to its address and to the rows, and the milliseconds of frames and of a filter."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "agentrl", "view", str(run_dir), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        found = re.search(r"http://\S+", viewer.stdout.readline())
        assert found is not None
        address_s = time.perf_counter() - began
        page.goto(f"{found[0]}#/episodes")
        page.locator(".rows .row").first.wait_for()
        rows_s = time.perf_counter() - began
        frames = sorted(page.evaluate(SCROLL))
        filter_ms = page.evaluate(FILTER)
        cpu_s = cpu_seconds(viewer.pid)
        viewer.send_signal(signal.SIGINT)
        viewer.communicate(timeout=30)
    frame_p99_ms = frames[int(0.99 * len(frames))]
    return {
        "address_s": address_s,
        "rows_s": rows_s,
        "viewer_cpu_s": cpu_s,
        "frame_p50_ms": statistics.median(frames),
        "frame_p99_ms": frame_p99_ms,
        "filter_and_sort_ms": filter_ms,
    }


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds that a process has used."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, print and record."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        run_dir = write_run(Path(folder) / "large", steps=STEPS, with_records=False)
        browser = driver.chromium.launch(executable_path=chromium, chromium_sandbox=False, args=["--disable-gpu"])
        runs = [open_table(browser.new_page(viewport={"width": 1400, "height": 900}), run_dir) for _ in range(REPEATS)]
        browser.close()
    medians = {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
    least = {key: round(min(run[key] for run in runs), 3) for key in runs[0]}
    print(f"medians of {REPEATS}: {medians}\nleast: {least}")
    machine = {**describe_machine("aiohttp", "playwright"), "load_average": f"{os.getloadavg()[0]:.1f}"}
    results = {"machine": machine, "targets": {"rows_s": 2.0}, "medians": medians, "least": least, "runs": runs}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
