"""Two commits of a repository make a task that its oracle solves, and that no agent passes by its tests' weaknesses."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from agentrl.errors import ConfigError
from agentrl_sandbox.containers import open_containers
from agentrl_sandbox.harbor.task import harbor_tasks, read_harbor_folder
from agentrl_workflows.terminal_commits.commits import History
from agentrl_workflows.terminal_commits.folder import TaskOptions
from agentrl_workflows.terminal_commits.make_task import make_task
from agentrl_workflows.terminal_commits.suite import put_back
from tests.support.commits import AFTER, BEFORE, make_repository
from tests.support.terminal import play_script

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]
SOLVE = "printf 'def total(coins):\\n    return sum(coins)\\n' > pocket/purse.py"
HOSTILE = {
    "tests of its own": "printf 'import unittest\\n' > tests/test_purse.py",
    "tests that are a link": "rm -r tests; ln -s /tmp tests",
    "a test that is a link": "ln -sf /app/README.md tests/test_purse.py",
    "sitecustomize": "echo 'import os; os._exit(0)' | tee sitecustomize.py usercustomize.py",
    "false unittest": "mkdir unittest; echo 'import os; os._exit(0)' | tee unittest/__init__.py json.py tempfile.py",
    "an exit in the sources": "printf 'import os\\nos._exit(0)\\n' > pocket/purse.py",
    "a reward in the sources": 'printf \'import os\\nos.makedirs("/logs/verifier", exist_ok=True)\\n'
    'open("/logs/verifier/reward.txt", "w").write("1")\\nos._exit(0)\\n\' > pocket/purse.py',
    "a reward, and the judge is killed": 'printf \'import os\\nopen("/logs/verifier/reward.txt", "w").write("1")\\n'
    "os.kill(os.getppid(), 9)\\n' > pocket/purse.py",
    "false outcomes": 'printf \'import os\\nprint("{}")\\nos.write(1, b"{}")\\n\' > pocket/purse.py',
    "another load_tests": "printf 'def load_tests(*a):\\n    import unittest\\n    return unittest.TestSuite()\\n' "
    ">> tests/__init__.py",
    "no directory": "cd /; rm -rf /app; ln -s /tmp /app",
    "a broken other test": "printf 'def total(coins):\\n    return 0\\n' > pocket/purse.py",
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.starts
async def test_a_task_of_two_commits_pays_what_mends_the_sources_and_no_agent_that_goes_round_the_tests(
    tmp_path: Path,
) -> None:
    repository = make_repository(tmp_path / "repository", BEFORE, AFTER)
    (repository / ".git" / "hooks" / "post-checkout").write_text("#!/bin/sh\ntouch /tmp/never\n")
    made = await make_task(repository, "HEAD~", "HEAD", tmp_path / "task", TaskOptions(feedback=True))
    assert (made.to_fix, made.to_keep, made.left_out) == (1, 1, 0)
    [task] = harbor_tasks(str(made.folder))
    assert "Let the purse be empty (1)" in task["question"]
    assert "tests.test_purse.PurseTest.test_empty" in task["question"]
    assert (task["tests_to_fix"], task["tests_to_keep"]) == (1, 1)
    assert not (made.folder / "environment" / "app" / "pocket" / "tools.py").exists()
    assert "test_empty" not in (made.folder / "environment" / "app" / "tests" / "test_purse.py").read_text()
    assert (made.folder / "tests" / "feedback.sh").is_file()
    found: dict[str, float] = {}
    limit = anyio.CapacityLimiter(3)
    scripts = {"nothing": "", "mended": SOLVE, "mended, and hostile": f"{SOLVE}; {HOSTILE['sitecustomize']}", **HOSTILE}

    async def play(name: str, script: str) -> None:
        async with limit:
            found[name] = (await play_script(containers, made.folder, script)).reward

    async with open_containers(images={"debian:12": None}) as containers, anyio.create_task_group() as tasks:
        for name, script in scripts.items():
            tasks.start_soon(play, name, script)
    assert {name for name, reward in found.items() if reward} == {"mended", "mended, and hostile"}


@pytest.mark.starts
async def test_pytest_runs_the_tests_of_a_task_that_brings_it(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        place = next((Path(entry) / name for entry in sys.path if (Path(entry) / name).is_dir()), None)
        assert place is not None, name
        shutil.copytree(place, packages / name)
    shutil.copy(Path(pytest.__file__).parents[1] / "py.py", packages)
    plain = (
        "from pocket.purse import total\n\n\ndef test_empty():\n    assert total([]) == 0\n\n\n"
        "def test_sum(two):\n    assert total(two) == 3\n"
    )
    fixture = "import pytest\n\n\n@pytest.fixture\ndef two():\n    return [1, 2]\n"
    before, after = ({**files, "tests/conftest.py": fixture, "tests/test_purse.py": plain} for files in (BEFORE, AFTER))
    repository = make_repository(tmp_path / "repository", before, after)
    options = TaskOptions(runner="pytest", packages=packages)
    made = await make_task(repository, "HEAD~", "HEAD", tmp_path / "task", options)
    assert (made.to_fix, made.to_keep) == (1, 1)
    hook = "def pytest_runtest_call(item): item.obj = lambda **k: None\\n"
    planted = f"printf '{hook}' | tee conftest.py /conftest.py tests/conftest.py"
    settings = "printf '[pytest]\\naddopts = -p evil\\n' | tee pytest.ini /pytest.ini tox.ini; echo > evil.py"
    async with open_containers(images={"debian:12": None}) as containers:
        rewards = [
            (await play_script(containers, made.folder, each)).reward for each in (SOLVE, planted, f"{SOLVE}; {settings}")
        ]
    assert rewards == [1.0, 0.0, 1.0]


@pytest.mark.starts
@pytest.mark.parametrize(
    ("commits", "expected"),
    [
        ((AFTER, AFTER), "differ in no source"),
        (({**AFTER, "pocket/more.py": ""}, AFTER), "each of the 2 tests of the second commit passes over the first"),
        ((BEFORE, {**AFTER, "pocket/tools.py": "raise OSError(1)\n"}), "no test passes over the second commit; .*OSError"),
        (({"a.py": ""}, {"a.py": "1"}), "no test file; name the paths of tests by --tests"),
    ],
)
async def test_commits_that_make_no_task_are_refused_with_the_reason(
    commits: tuple[Mapping[str, str], ...], expected: str, tmp_path: Path
) -> None:
    repository = make_repository(tmp_path / "repository", *commits)
    with pytest.raises(ConfigError, match=f"(?s){expected}"):
        await make_task(repository, "HEAD~", "HEAD", tmp_path / "task", TaskOptions())
    assert not (tmp_path / "task").exists()


@pytest.mark.starts
def test_a_repository_that_a_task_cannot_hold_is_refused_with_the_reason(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "repository", BEFORE)
    for name, expected in (("HEAD~7", "git rev-parse"), ("--help", "git rev-parse")):
        with pytest.raises(ConfigError, match=expected):
            History(repository).commit(name)
    with pytest.raises(ConfigError, match="expected a local git repository"):
        History(tmp_path).commit("HEAD")
    (repository / "secret").symlink_to("/etc/passwd")
    (repository / "copy").symlink_to("README.md")
    subprocess.run(["git", "-C", str(repository), "add", "copy"], check=True)
    subprocess.run(
        ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "x"], check=True
    )
    assert History(repository).commit("HEAD").files["copy"].data == b"A purse.\n"
    subprocess.run(["git", "-C", str(repository), "add", "secret"], check=True)
    subprocess.run(
        ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "x"], check=True
    )
    with pytest.raises(ConfigError, match="secret links to '/etc/passwd', which is no file of the commit"):
        History(repository).commit("HEAD")


def test_tests_are_put_back_over_links_and_files_in_the_way(tmp_path: Path) -> None:
    root, outside = tmp_path / "app", tmp_path / "outside"
    (root / "src").mkdir(parents=True)
    outside.mkdir()
    (outside / "test_a.py").write_text("mine")
    (root / "tests").symlink_to(outside)
    (root / "src" / "conftest.py").write_text("planted")
    (root / "src" / "data").write_text("a file in the way")
    (root / "pytest.ini").write_text("planted")
    put_back(
        str(root), {"tests/test_a.py": b"right", "src/data/test_b.py": b"also"}, ("tests/*", "conftest.py", "*/conftest.py")
    )
    found = {str(place.relative_to(root)): place.read_text() for place in root.rglob("*") if place.is_file()}
    assert found == {"tests/test_a.py": "right", "src/data/test_b.py": "also"}
    assert (outside / "test_a.py").read_text() == "mine"


@pytest.mark.starts
def test_the_command_line_makes_a_folder_that_can_be_read(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "repository", BEFORE, AFTER)
    command = [sys.executable, "-m", "agentrl_workflows.terminal_commits", str(repository), str(tmp_path / "task")]
    done = subprocess.run([*command, "--before", "HEAD~", "--after", "HEAD"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"to_fix": 1, "to_keep": 1' in done.stdout
    assert read_harbor_folder(tmp_path / "task").image.env == {"PYTHONPATH": "/app/src:/app"}
    again = subprocess.run([*command, "--before", "HEAD~", "--after", "HEAD"], capture_output=True, text=True, check=False)
    assert (again.returncode, "does not exist yet" in again.stderr) == (1, True)
