"""Task folders of Harbor become tasks, and what cannot be honoured is refused by its name when they load."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.data.config import TasksConfig
from agentrl.data.load import load_tasks
from agentrl.errors import ConfigError
from agentrl_sandbox.harbor.task import read_harbor_folder
from tests.support.harbor import TOML, write_task


def test_a_folder_of_tasks_is_read_with_its_limits_and_variables(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "set" / "one")
    tasks = load_tasks(TasksConfig(path=str(tmp_path), format="harbor")).train.finite
    assert [task.id for task in tasks] == ["set/one"]
    assert tasks[0]["question"] == "Write 42 to b.txt."
    assert tasks[0]["difficulty"] == "easy"
    read = read_harbor_folder(folder)
    assert (read.agent_timeout_s, read.verifier_timeout_s, read.memory_mb, read.storage_mb) == (120, 60, 2048, 512)
    assert (read.agent_env, read.verifier_env, read.solution_env) == ({"MODE": "work"}, {"CHECK": "yes"}, {"HINT": "42"})
    assert (read.image.image, read.image.workdir) == ("debian:12", "/srv/job")
    assert [(file.source, file.target) for file in read.image.files] == [(folder / "environment/a.txt", "/srv/job/a.txt")]


def test_an_agent_does_not_read_the_marks_that_keep_a_task_out_of_corpora(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one")
    marks = "<!-- BENCHMARK canary 123 -->\n# Canary GUID 456\n"
    (folder / "instruction.md").write_text(f"{marks}\n# The canary\n\nFeed it.\n")
    assert read_harbor_folder(folder).instruction == "# The canary\n\nFeed it."


def test_a_task_names_no_test_and_no_solution_in_its_fields(tmp_path: Path) -> None:
    task = read_harbor_folder(write_task(tmp_path / "one")).as_task("one")
    assert "echo" not in str(dict(task.data))


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"1.4"', '"2.0"', "schema_version"),
        ("storage_mb = 512", "gpus = 1", "environment.gpus"),
        ("storage_mb = 512", 'os = "windows"', "environment.os"),
        ("storage_mb = 512", 'network_mode = "allowlist"', "environment.network_mode"),
        ("storage_mb = 512", "color = 1", "color"),
        ('memory = "2G"', 'memory = "two"', "environment.memory"),
        ('{MODE = "work"}', '{KEY = "${SECRET}"}', "environment.env.KEY"),
        ("timeout_sec = 60.0", 'user = "bob"', "verifier.user"),
        ("timeout_sec = 60.0", "timeout_sec = -1", "verifier.timeout_sec"),
        ("[metadata]", '[[steps]]\nname = "a"\n[metadata]', "steps/a/instruction.md"),
        ("[metadata]", '[[steps]]\nname = "a"\n[[steps]]\nname = "A"\n[metadata]', "steps: .*a name of its own"),
        ("[metadata]", '[[steps]]\nname = "../a"\n[metadata]', "name: expected the name of a folder"),
        ("[metadata]", '[[steps]]\nname = "a"\ncolor = 1\n[metadata]', "color"),
        ("[metadata]", '[[steps]]\nname = "a"\nagent = {user = "bob"}\n[metadata]', "steps.a.agent.user.*got 'bob'"),
        (
            "[metadata]",
            '[[steps]]\nname = "a"\nverifier = {environment = {}}\n[metadata]',
            "steps.a.verifier.environment: set",
        ),
        (
            "[metadata]",
            '[[steps]]\nname = "a"\nhealthcheck = {command = "x", retries = 0}\n[metadata]',
            "steps.a.healthcheck",
        ),
        (
            "[metadata]",
            '[[steps]]\nname = "a"\nverifier = {env = {K = "${S}"}}\n[metadata]',
            "steps/a/instruction.md|steps.a",
        ),
        ('"1.4"', '"1.4"\nmulti_step_reward_strategy = "sum"', "multi_step_reward_strategy.*'mean' or 'final', got 'sum'"),
        ("[metadata]", "[metadata", "task.toml"),
        ("storage_mb = 512", 'allowed_hosts = ["x.org"]', "environment.allowed_hosts"),
        ("timeout_sec = 120.0", 'allowed_hosts = ["x.org"]', "agent.allowed_hosts"),
        ("timeout_sec = 60.0", 'allowed_hosts = ["x.org"]', "verifier.allowed_hosts"),
        ("storage_mb = 512", 'network_mode = "bogus"', "environment.network_mode.*expected .*no-network.*'bogus'"),
        ("timeout_sec = 60.0", 'network_mode = "bogus"', "verifier.network_mode"),
        (
            "timeout_sec = 60.0",
            'environment_mode = "weird"',
            "verifier.environment_mode.*expected 'shared' or 'sep.*'weird'",
        ),
        ("timeout_sec = 60.0", 'environment_mode = "shared"\nenvironment = {}', "verifier.environment: .*'separate'"),
        ("timeout_sec = 60.0", "environment = {gpus = 1}", "verifier.environment.gpus"),
        ("timeout_sec = 60.0", "environment = {color = 1}", "color"),
        ("timeout_sec = 60.0", 'environment = {memory = "two"}', "verifier.environment.memory"),
        ("timeout_sec = 60.0", 'environment = {env = {KEY = "${SECRET}"}}', "verifier.environment.env.KEY"),
        ("timeout_sec = 60.0", 'environment = {network_mode = "allowlist"}', "verifier.environment.network_mode"),
        ("timeout_sec = 60.0", 'environment = {healthcheck = {command = "true"}}', "verifier.environment.healthcheck"),
        ("timeout_sec = 60.0", 'collect = [{command = "dump", service = "db"}]', "verifier.collect.*no service but main"),
        (
            "timeout_sec = 60.0",
            'collect = [{command = "dump", user = "bob"}]',
            "verifier.collect.*one user, root; got 'bob'",
        ),
        ("timeout_sec = 60.0", 'collect = [{command = "dump", timeout_sec = 0}]', "verifier.collect.*above 0"),
        ("storage_mb = 512", 'healthcheck = {command = "true", retries = 0}', "environment.healthcheck.*at least 1, got 0"),
        ("storage_mb = 512", 'healthcheck = {command = "true", timeout_sec = 0}', "environment.healthcheck.*seconds"),
        ("storage_mb = 512", "healthcheck = {}", "command"),
        ("storage_mb = 512", "cpus = -3", "environment.cpus.*above 0, got -3"),
        ("storage_mb = 512", "cpus = inf", "environment.cpus.*above 0, got inf"),
        ("storage_mb = 512", "cpus = nan", "environment.cpus.*above 0, got nan"),
        ("storage_mb = 512", "storage_mb = -1", "environment.storage_mb.*above 0, got -1"),
        ("storage_mb = 512", "storage_mb = 0", "environment.storage_mb.*above 0, got 0"),
        ('memory = "2G"', "memory_mb = -5", "environment.memory_mb.*above 0, got -5"),
        ('memory = "2G"', 'memory = "0G"', "environment.memory.*at least 1M.* got '0G'"),
        ('memory = "2G"', 'memory = "1K"', "environment.memory.*at least 1M.* got '1K'"),
        ("storage_mb = 512", "gpus = -1", "environment.gpus"),
        ("storage_mb = 512", 'workdir = "/"', "environment.workdir.*expected a directory below /, got '/'"),
        ("storage_mb = 512", 'workdir = "/srv/.."', "environment.workdir"),
        ('{MODE = "work"}', '{"A=B" = "c"}', "environment.env.*expected a name of letters.*got 'A=B'"),
        ('{CHECK = "yes"}', '{"X Y" = "2"}', "verifier.env.*'X Y'"),
        ('{HINT = "42"}', '{"" = "2"}', "solution.env.*''"),
        ('{MODE = "work"}', '{MODE = "a\\u0000b"}', "environment.env.MODE.*expected no zero byte"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, old: str, new: str, field: str) -> None:
    write_task(tmp_path / "one", TOML.replace(old, new))
    with pytest.raises(ConfigError, match=field):
        load_tasks(TasksConfig(path=str(tmp_path), format="harbor"))


@pytest.mark.parametrize(
    ("artifact", "said"),
    [
        ('"out"', "expected an absolute path without '..' as source, got 'out'"),
        ('"/app/../etc"', "expected an absolute path without '..'"),
        ('"/"', "/ holds /tests, which an agent must not write"),
        ('"/logs"', "/logs holds /logs/verifier"),
        ('"/tests/expected.txt"', "which an agent must not write"),
        ('{source = "/app", exclude = ["*.log"]}', "/app: exclude is not honoured"),
        ('{source = "/app", service = "db"}', "no service but main; got 'db'"),
    ],
)
def test_artifacts_of_tests_with_an_environment_of_their_own_are_checked(tmp_path: Path, artifact: str, said: str) -> None:
    toml = TOML.replace('schema_version = "1.4"', f'schema_version = "1.4"\nartifacts = [{artifact}]')
    read_harbor_folder(write_task(tmp_path / "shared", toml))
    apart = toml.replace("timeout_sec = 60.0", 'environment_mode = "separate"')
    with pytest.raises(ConfigError, match=f"apart: artifacts: .*{said}"):
        read_harbor_folder(write_task(tmp_path / "apart", apart))


def test_the_environment_of_the_tests_is_an_image_a_dockerfile_of_theirs_or_a_copy(tmp_path: Path) -> None:
    named = TOML.replace(
        "timeout_sec = 60.0", 'environment = {docker_image = "judge:1", workdir = "/j", memory_mb = 64, env = {A = "b"}}'
    )
    read = read_harbor_folder(write_task(tmp_path / "named", named))
    place = read.for_judge()
    assert (place.image.image, place.image.workdir, place.memory_mb) == ("judge:1", "/j", 64)
    assert (place.agent_env, place.verifier_env, read.agent_env) == ({"A": "b"}, {"CHECK": "yes"}, {"MODE": "work"})
    assert read.judge is not None
    assert (read.judge.has_tests, read.judge.artifacts) == (True, ("/logs/artifacts",))

    apart = TOML.replace("timeout_sec = 60.0", 'environment_mode = "separate"')
    copy = read_harbor_folder(write_task(tmp_path / "copy", apart))
    assert copy.judge is not None
    assert (copy.for_judge().image, copy.for_judge().memory_mb, copy.judge.has_tests) == (copy.image, 2048, False)

    built = write_task(tmp_path / "built", apart)
    (built / "tests" / "Dockerfile").write_text("FROM judge:2\nCOPY test.sh /tests/\n")
    place = read_harbor_folder(built).for_judge()
    assert place.image.image == "judge:2"
    assert [file.source for file in place.image.files] == [built / "tests" / "test.sh"]


@pytest.mark.parametrize(
    "lines",
    [
        'network_mode = "no-network"',
        'network_mode = "public"\nallowed_hosts = []',
        "cpus = 0.5",
        'workdir = "/srv"',
        'healthcheck = {command = "true"}',
    ],
)
def test_settings_that_change_nothing_here_are_honoured(tmp_path: Path, lines: str) -> None:
    toml = TOML.replace("storage_mb = 512", lines).replace("timeout_sec = 60.0", 'environment_mode = "shared"')
    read_harbor_folder(write_task(tmp_path / "one", toml))


@pytest.mark.parametrize(
    ("environment", "agent", "permitted"),
    [
        ("", "", True),
        ('network_mode = "no-network"', "", False),
        ("allow_internet = false", "", False),
        ("", 'network_mode = "no-network"', False),
        ('network_mode = "no-network"', 'network_mode = "public"', True),
        ("allow_internet = false", 'network_mode = "public"', False),
    ],
)
def test_a_task_says_whether_its_agent_may_have_a_network(
    tmp_path: Path, environment: str, agent: str, permitted: bool
) -> None:
    whole = TOML.replace("storage_mb = 512", environment).replace("timeout_sec = 120.0", agent)
    assert read_harbor_folder(write_task(tmp_path / "whole", whole)).permits_network is permitted
    step = f'[[steps]]\nname = "a"\nagent = {{{agent}}}\n[metadata]'
    steps = write_task(tmp_path / "steps", TOML.replace("storage_mb = 512", environment).replace("[metadata]", step))
    for file in ("instruction.md", "tests/test.sh"):
        (steps / "steps" / "a" / file).parent.mkdir(parents=True, exist_ok=True)
        (steps / "steps" / "a" / file).write_text("true")
    assert read_harbor_folder(steps).steps[0].permits_network is permitted


def test_an_environment_that_is_a_link_out_of_its_task_is_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one")
    (folder / "environment").rename(tmp_path / "elsewhere")
    (folder / "environment").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"environment.* leads to .*elsewhere"):
        read_harbor_folder(folder)


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_a_folder_without_a_file_says_which(tmp_path: Path, missing: str) -> None:
    folder = write_task(tmp_path / "one")
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=missing):
        read_harbor_folder(folder)


def test_a_file_of_several_services_is_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one")
    (folder / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(ConfigError, match=r"docker-compose\.yaml"):
        read_harbor_folder(folder)
