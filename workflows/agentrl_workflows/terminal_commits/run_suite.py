"""Runs a project's tests and prints what became of each, as JSON; `tests/check.py` of a task starts it.

The project's code runs in this process. So nothing here is secret, and whoever reads the output ends this process first.
"""

import json
import os
import sys
import tempfile
import traceback
import unittest

LOG_CHARS = 4000


def run_pytest(root: str, files: "list[str]", settings: str) -> "dict[str, str]":
    """Return the outcomes by the names that pytest has for tests."""
    import pytest

    found: dict[str, str] = {}

    class Recorder:
        def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
            is_whole = report.outcome == "passed" and not hasattr(report, "wasxfail")
            if not is_whole:
                found[report.nodeid] = report.outcome if report.outcome != "passed" else "xpassed"
            elif report.when == "call":
                found.setdefault(report.nodeid, "passed")

    options = ["-q", "--rootdir=" + root, "--confcutdir=" + root, "-c", settings, "-p", "no:cacheprovider"]
    pytest.main([*options, "--continue-on-collection-errors", *files], plugins=[Recorder()])
    return found


def run_unittest(root: str, files: "list[str]") -> "dict[str, str]":
    """Return the outcomes by the names that unittest has for tests."""
    found: dict[str, str] = {}

    class Recorder(unittest.TestResult):
        def startTest(self, test: "unittest.TestCase") -> None:
            found[test.id()] = "passed"
            super().startTest(test)

        def stopTest(self, test: "unittest.TestCase") -> None:
            bad = [*self.failures, *self.errors, *self.skipped, *self.expectedFailures]
            if any(test is each or getattr(each, "test_case", None) is test for each, _ in bad):
                found[test.id()] = "failed"
            if test in self.unexpectedSuccesses:
                found[test.id()] = "failed"
            super().stopTest(test)

    suite = unittest.TestSuite()
    for file in files:
        folder, name = os.path.split(os.path.join(root, file))
        top = folder
        while os.path.exists(os.path.join(top, "__init__.py")) and top != root:
            top = os.path.dirname(top)
        loader = unittest.TestLoader()
        sys.path[:] = [top, *(each for each in sys.path if each != top)]
        module = os.path.relpath(os.path.join(folder, name), top)[: -len(".py")].replace("/", ".")
        try:
            suite.addTest(loader.loadTestsFromName(module))
        except (Exception, SystemExit):  # noqa: BLE001 - a file that cannot be read has no tests, whatever it raises
            traceback.print_exc()
    recorder = Recorder()
    suite.run(recorder)
    for _, said in [*recorder.errors, *recorder.failures]:
        sys.stderr.write(said)
    return {name: outcome for name, outcome in found.items() if not name.startswith("unittest.loader.")}


def main() -> None:
    """Read the order, run the tests, and print the outcomes."""
    order = json.load(sys.stdin)
    answer = os.dup(1)
    log = tempfile.TemporaryFile()  # noqa: SIM115 - it is open to the end of the process
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    os.chdir(order["root"])
    sys.path[:0] = order["packages"]
    sys.path += [os.path.normpath(os.path.join(order["root"], each)) for each in order["paths"]]
    outcomes: dict[str, str] = {}
    try:
        if order["runner"] == "pytest":
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
            outcomes = run_pytest(order["root"], order["files"], order["settings"])
        else:
            outcomes = run_unittest(order["root"], order["files"])
    except (Exception, SystemExit):  # noqa: BLE001 - what ends a test runner is told, whatever it is
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - LOG_CHARS))
    said = json.dumps({"outcomes": outcomes, "log": log.read().decode(errors="replace")})
    with os.fdopen(answer, "w") as out:
        out.write(said)
    os._exit(0)


if __name__ == "__main__":
    main()
