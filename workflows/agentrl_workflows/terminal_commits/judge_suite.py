"""The end of each task's `tests/check.py`: puts the right tests back, runs them, and pays where all that must pass do.

Like all tests of code, those of a project import what they judge. Code that was written to deceive its own tests runs in
their process (`run_suite.py`); it cannot reach this one, which alone writes the reward.
"""

import json
import os
import shutil
import sys
import tempfile

from agentrl_workflows.terminal_commits.suite import put_back
from agentrl_workflows.terminal_tasks.checks import APP, LOGS, begin, pay, run

HERE = "/tests"


def judge(mode: str) -> None:
    """Pay 1 where all required tests pass, in the mode `share` their share; `survey` writes all outcomes down instead."""
    with open(HERE + "/plan.json") as file:
        plan = json.load(file)
    suite: dict[str, bytes] = {}
    for folder, _, names in os.walk(HERE + "/suite"):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                suite[os.path.relpath(os.path.join(folder, name), HERE + "/suite")] = file.read()
    place = tempfile.mkdtemp(prefix="judge-")
    shutil.copy(HERE + "/run_suite.py", place)
    packages = os.path.join(place, "packages")
    if os.path.isdir(HERE + "/packages"):
        shutil.copytree(HERE + "/packages", packages)
    begin()
    if os.path.islink(APP) or not os.path.isdir(APP):
        pay(0)
    put_back(APP, suite, plan["tests"])
    settings = next((APP + "/" + name for name in plan["settings"] if name in suite), os.path.join(place, "none.ini"))
    if settings.startswith(place):
        with open(settings, "w") as file:
            file.write("[pytest]\n")
    order = {key: plan[key] for key in ("runner", "files", "paths")}
    order.update(root=APP, packages=[packages], settings=settings)
    command = ("python3", "-I", "-S", "-B", os.path.join(place, "run_suite.py"))
    _, said = run(*command, stdin=json.dumps(order), timeout=plan["seconds"])
    try:
        answer = json.loads(said)
        outcomes = dict(answer["outcomes"])
    except (ValueError, KeyError, TypeError):
        answer, outcomes = {"log": said[-4000:]}, {}
    if mode == "survey":
        with open(LOGS + "/outcomes.json", "w") as file:
            json.dump({"outcomes": outcomes, "log": answer["log"]}, file)
        return
    passed = [name for name in plan["required"] if outcomes.get(name) == "passed"]
    share = len(passed) / len(plan["required"])
    pay(share if mode == "share" else float(share == 1))


if __name__ == "__main__":
    judge(sys.argv[1])
