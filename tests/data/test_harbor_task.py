"""Task folders of Harbor become tasks, and what cannot be honoured is refused by its name when they load."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from agentrl.data.config import TasksConfig
from agentrl.data.load import load_tasks
from agentrl.errors import ConfigError
from agentrl_sandbox.harbor.task import read_harbor_folder

TOML = """
schema_version = "1.4"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 60.0
env = {CHECK = "yes"}
[environment]
memory = "2G"
storage_mb = 512
env = {MODE = "work"}
[solution]
env = {HINT = "42"}
"""


def write_task(folder: Path, toml: str = TOML, dockerfile: str = "FROM debian:12\nWORKDIR /srv/job\nCOPY a.txt .\n") -> Path:
    for part in ("environment", "tests", "solution"):
        (folder / part).mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Write 42 to b.txt.\n")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "environment" / "a.txt").write_text("hello\n")
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (folder / "solution" / "solve.sh").write_text("echo 42 > b.txt\n")
    return folder


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
    assert read.image.copies == (("a.txt", "/srv/job/a.txt"),)


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
        ("[metadata]", '[[steps]]\nname = "a"\n[metadata]', "steps"),
        ("[metadata]", "[metadata", "task.toml"),
        ("storage_mb = 512", 'allowed_hosts = ["x.org"]', "environment.allowed_hosts"),
        ("timeout_sec = 120.0", 'allowed_hosts = ["x.org"]', "agent.allowed_hosts"),
        ("timeout_sec = 60.0", 'allowed_hosts = ["x.org"]', "verifier.allowed_hosts"),
        ("storage_mb = 512", 'network_mode = "bogus"', "environment.network_mode.*expected .*no-network.*'bogus'"),
        ("timeout_sec = 60.0", 'network_mode = "bogus"', "verifier.network_mode"),
        ("timeout_sec = 60.0", 'environment_mode = "weird"', "verifier.environment_mode.*expected 'shared', got 'weird'"),
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
    "lines", ['network_mode = "no-network"', 'network_mode = "public"\nallowed_hosts = []', "cpus = 0.5", 'workdir = "/srv"']
)
def test_settings_that_change_nothing_here_are_honoured(tmp_path: Path, lines: str) -> None:
    toml = TOML.replace("storage_mb = 512", lines).replace("timeout_sec = 60.0", 'environment_mode = "shared"')
    read_harbor_folder(write_task(tmp_path / "one", toml))


@pytest.mark.parametrize(
    ("dockerfile", "said"),
    [
        ("FROM a\nRUN apt-get install -y vim\n", "Dockerfile:2: RUN apt-get needs a network"),
        ("FROM a\nRUN true\nCOPY a.txt /\n", "Dockerfile:3: COPY after a RUN"),
        ("FROM a AS b\nFROM c\n", "Dockerfile:2: FROM: a build of several stages"),
        ("FROM a\nCOPY ../x /\n", "is no file of"),
        ("FROM a\nUSER bob\n", "Dockerfile:2: USER"),
        ("FROM $BASE\n", "Dockerfile:1: FROM: expected no variable, got '\\$BASE'"),
        ("FROM\n", "Dockerfile:1: FROM: expected one image"),
        ("FROM --platform=linux/s390x a\n", "Dockerfile:1: FROM: expected the platform of this machine, linux/.*, got"),
        ("FROM --other=1 a\n", "Dockerfile:1: FROM: expected one image, got '--other=1 a'"),
        ("FROM a\nENV PATH /opt/venv/bin:$PATH\n", "Dockerfile:2: ENV: expected no variable, got 'PATH /opt"),
        ("FROM a\nENV GREETING hello $USER\n", "Dockerfile:2: ENV: expected no variable"),
        ("FROM a\nENV A=1 B=$A\n", "Dockerfile:2: ENV: expected no variable"),
        ("FROM a\nENV A-B c\n", "Dockerfile:2: ENV: expected NAME=value, got 'A-B c'"),
        ("FROM a\nENV A it's\n", 'Dockerfile:2: ENV: No closing quotation in "A it\'s"'),
        ("FROM a\nWORKDIR $HOMEDIR\n", "Dockerfile:2: WORKDIR: expected no variable, got"),
        ("FROM a\nWORKDIR\n", "Dockerfile:2: WORKDIR: expected one directory, got ''"),
        ("FROM a\nCOPY a.txt $APP/\n", "Dockerfile:2: COPY: expected no variable, got"),
        ("FROM a\nCOPY a.txt /x\nWORKDIR /x/y\n", "Dockerfile:3: WORKDIR: .*/x is a file"),
        ("FROM a\nCOPY a.txt /x\nCOPY a.txt /x/y\n", "Dockerfile:3: COPY: .*/x is a file"),
        ('FROM a\nRUN ["sh", "-c", "apt-get install vim"]\n', "Dockerfile:2: RUN apt-get needs a network"),
        ("FROM a\nRUN --mount=type=cache,target=/x true\n", "Dockerfile:2: RUN: expected a command without options, got"),
    ],
)
def test_a_dockerfile_that_needs_docker_is_refused_by_its_line(tmp_path: Path, dockerfile: str, said: str) -> None:
    write_task(tmp_path / "one", dockerfile=dockerfile)
    with pytest.raises(ConfigError, match=said):
        read_harbor_folder(tmp_path / "one")


@pytest.mark.parametrize("target", ["/app", "/app/", ".", "./", "../app", "/tmp", "/"])
def test_a_file_that_is_copied_to_a_directory_goes_into_it(tmp_path: Path, target: str) -> None:
    folder = write_task(tmp_path / "one", dockerfile=f"FROM a\nWORKDIR /app\nCOPY a.txt {target}\n")
    place = {"/tmp": "/tmp/a.txt", "/": "/a.txt"}.get(target, "/app/a.txt")
    assert read_harbor_folder(folder).image.copies == (("a.txt", place),)


def test_a_copy_over_an_earlier_copy_goes_where_docker_puts_it(tmp_path: Path) -> None:
    lines = ("FROM a", "WORKDIR /app", "COPY data d", "COPY a.txt d", "COPY a.txt new", "COPY a.txt new")
    folder = write_task(tmp_path / "one", dockerfile="\n".join(lines))
    (folder / "environment" / "data").mkdir()
    targets = [target for _, target in read_harbor_folder(folder).image.copies]
    assert targets == ["/app/d", "/app/d/a.txt", "/app/new", "/app/new"]


def test_a_command_that_is_a_list_is_run_word_by_word(tmp_path: Path) -> None:
    lines = ('RUN ["/bin/sh", "-c", "echo $0 > /opt/x"]', "RUN [ -e /opt ] && true")
    folder = write_task(tmp_path / "one", dockerfile="\n".join(("FROM a", *lines)))
    commands = [command for _, command in read_harbor_folder(folder).image.commands]
    assert commands == ["/bin/sh -c 'echo $0 > /opt/x'", "[ -e /opt ] && true"]


def test_the_platform_of_this_machine_may_stand_before_an_image(tmp_path: Path) -> None:
    own = {"x86_64": "linux/amd64", "aarch64": "linux/arm64/v8"}[platform.machine()]
    folder = write_task(tmp_path / "one", dockerfile=f"FROM --platform={own} debian:12\nENV GREETING hello  there\n")
    read = read_harbor_folder(folder).image
    assert (read.image, read.env) == ("debian:12", {"GREETING": "hello there"})


@pytest.mark.parametrize("leads_to", ["/etc/passwd", "../../solution", "/etc", "../../nothing"])
def test_a_link_in_a_copied_directory_that_leads_out_is_refused(tmp_path: Path, leads_to: str) -> None:
    folder = write_task(tmp_path / "one", dockerfile="FROM a\nCOPY data /app/data\n")
    (folder / "environment" / "data" / "deep").mkdir(parents=True)
    (folder / "environment" / "data" / "deep" / "a").symlink_to(folder / "environment" / "a.txt")
    read_harbor_folder(folder)
    (folder / "environment" / "data" / "link").symlink_to(leads_to)
    with pytest.raises(ConfigError, match=r"Dockerfile:2: COPY: .*environment/data/link.* leads to .*; put a copy"):
        read_harbor_folder(folder)


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
