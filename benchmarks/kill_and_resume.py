"""Runs that are killed with SIGKILL at random points and resumed: equal weights, exact accounts.

Run: .venv/bin/python -m benchmarks.kill_and_resume [--kills 40] [--only synchronous]   (ten minutes on two idle cores)

A synchronous run with one episode at a time is killed, resumed, killed again and so on, and then ends. After each kill the
newest checkpoint of the resumed process, weights and optimizer, is compared byte by byte with the same step of a run that
was left alone. An asynchronous run with evaluations is killed in the same way. Its files, by the readers of
`agentrl.observe.runs.reading`, must hold every group trained once, every episode once and every evaluation once. The model
is a tiny random one on the embedded server.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from agentrl.support.files import write_json
from benchmarks.machine import describe_machine
from tests.support.kills import STEPS_BEFORE_A_KILL, account, compare, prepare
from tests.support.tiny import tiny_checkpoint

RESULTS = Path(__file__).parent / "results" / "kill_and_resume.json"


def main() -> None:
    """Kill both runs, or one of them, print what was found and write the results; those of the other one stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("synchronous", "asynchronous"))
    options = parser.parse_args()
    steps = options.kills * (STEPS_BEFORE_A_KILL[1] + 2)
    results = json.loads(RESULTS.read_text()) if options.only and RESULTS.exists() else {}
    results |= {"machine": describe_machine("torch"), "steps": steps}
    with tempfile.TemporaryDirectory(prefix="agentrl-kills-") as scratch:
        checkpoint = tiny_checkpoint(Path(scratch) / "model")
        for mode in ("synchronous", "asynchronous"):
            if options.only not in (None, mode):
                continue
            folder = Path(scratch) / mode
            folder.mkdir()
            prepare(folder, checkpoint, steps=steps, asynchronous=mode == "asynchronous")
            if mode == "synchronous":
                equality = compare(folder, kills=options.kills, seed=options.seed)
                print(f"{mode}: {equality.equal} of {equality.kills} resumed processes are bit-equal; {equality}")
                results[mode] = asdict(equality)
            else:
                accounts = account(folder, kills=options.kills, seed=options.seed, steps=steps)
                print(f"{mode}: {accounts}")
                results[mode] = asdict(accounts)
            write_json(RESULTS, results)
    print(f"wrote {RESULTS}")


if __name__ == "__main__":
    main()
