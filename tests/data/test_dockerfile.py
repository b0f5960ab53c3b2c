"""A Dockerfile of a task is read as Docker reads it, and what the sandbox cannot do is refused by instruction and line."""

from __future__ import annotations

import os
import platform
import tarfile
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl_sandbox.containers.image_facts import ImageFacts
from agentrl_sandbox.harbor.dockerfile import read_dockerfile
from agentrl_sandbox.harbor.recipe import CopyStep, ImageRecipe, RunStep


def recipe(
    folder: Path,
    *lines: str,
    docker_image: str | None = None,
    workdir: str | None = None,
    files: tuple[str, ...] = ("a.txt",),
) -> ImageRecipe:
    """Return what a Dockerfile of these lines in a folder with these files says."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}\n")
    (folder / "Dockerfile").write_text("\n".join([*lines, ""]))
    return read_dockerfile(folder, docker_image=docker_image, workdir=workdir)


def copied(found: ImageRecipe) -> dict[str, str]:
    """Return the text of each file that is copied, by its place."""
    return {file.target: file.source.read_text() if file.source else file.text for file in found.files}


def run_words(found: ImageRecipe) -> list[str]:
    return [step.argv[-1] for step in found.commands]


@pytest.mark.parametrize(
    ("dockerfile", "said"),
    [
        ("FROM a AS b\nFROM c\n", "Dockerfile:2: FROM: a build of several stages"),
        ("FROM a AS b\nFROM c\nCOPY --from=b /x /x\n", "Dockerfile:2: FROM: a build of several stages"),
        ("FROM a\nCOPY --from=b:1 /x /x\n", "Dockerfile:2: COPY --from=b:1 needs a network"),
        ("FROM scratch\n", "Dockerfile:1: FROM: expected an image with files, got scratch"),
        ("RUN true\n", "Dockerfile:1: RUN: expected FROM first"),
        ("# nothing\n", "Dockerfile: expected FROM and an image, got none"),
        ("FROM a\nCOPY ../x /\n", "Dockerfile:2: COPY: '../x' is no file of"),
        ("FROM a\nCOPY x /\n", "Dockerfile:2: COPY: 'x' is no file of"),
        ("FROM a\nCOPY *.md /\n", r"Dockerfile:2: COPY: '\*.md' is no file of"),
        ("FROM a\nCOPY a.txt\n", "Dockerfile:2: COPY: expected files of the folder and a target, got 'a.txt'"),
        ("FROM a\nCOPY --chmod=u+x a.txt /\n", "Dockerfile:2: COPY: expected --chmod with an octal number.*'u\\+x'"),
        ("FROM a\nCOPY --chown=a:b:c a.txt /\n", "Dockerfile:2: COPY: expected --chown=USER or"),
        ("FROM a\nCOPY --parents a.txt /\n", "Dockerfile:2: COPY: expected --chown, --chmod or --link, got --parents"),
        ("FROM a\nADD https://x.org/y /y\n", "Dockerfile:2: ADD https://x.org/y needs a network"),
        ("FROM a\nUSER bob\n", "Dockerfile:2: USER: expected root, the one user of the sandbox, got 'bob'"),
        ("FROM $BASE\n", "Dockerfile:1: FROM: expected one image, got '\\$BASE'"),
        ("FROM\n", "Dockerfile:1: FROM: expected one image"),
        ("FROM --platform=linux/s390x a\n", "Dockerfile:1: FROM: expected the platform of this machine, linux/.*, got"),
        ("FROM --other=1 a\n", "Dockerfile:1: FROM: expected one image, got '--other=1 a'"),
        ("FROM a\nENV A-B c\n", "Dockerfile:2: ENV: expected NAME=value, got 'A-B c'"),
        ("FROM a\nENV A\n", "Dockerfile:2: ENV: expected NAME=value, got 'A'"),
        ("FROM a\nENV A it's\n", 'Dockerfile:2: ENV: No closing quotation in "A it\'s"'),
        ("FROM a\nENV A=${B\n", "Dockerfile:2: ENV: .* in 'A=\\${B'"),
        ("FROM a\nENV A=${B#x}\n", "Dockerfile:2: ENV: expected \\${B} with :-, :\\+ or :\\? at most"),
        ("FROM a\nENV A=${B:?named}\n", "Dockerfile:2: ENV: the variable B has no value: named"),
        ("FROM a\nWORKDIR $HOMEDIR\n", "Dockerfile:2: WORKDIR: expected one directory, got '\\$HOMEDIR'"),
        ("FROM a\nWORKDIR\n", "Dockerfile:2: WORKDIR: expected one directory, got ''"),
        ("FROM a\nCOPY a.txt /x\nWORKDIR /x/y\n", "Dockerfile:3: WORKDIR: .*/x is a file"),
        ("FROM a\nCOPY a.txt /x\nCOPY a.txt /x/y\n", "Dockerfile:3: COPY: .*/x is a file"),
        ("FROM a\nSHELL bash -c\n", "Dockerfile:2: SHELL: expected a list"),
        ("FROM a\nRUN\n", "Dockerfile:2: RUN: expected a command, got ''"),
        ("FROM a\nRUN --mount=type=bind,target=/x true\n", "Dockerfile:2: RUN: expected --mount=type=cache"),
        ("FROM a\nRUN --security=insecure true\n", "Dockerfile:2: RUN: expected no option but"),
        ("FROM a\nRUN <<END\ntrue\n", "Dockerfile:2: expected a line 'END' at the end of the here-document"),
        ("FROM a\nINCLUDE x\n", "Dockerfile:2: INCLUDE: this is no instruction"),
        ("# escape=x\nFROM a\n", "Dockerfile:1: escape: expected a backslash or a backtick, got 'x'"),
    ],
)
def test_what_cannot_be_had_is_refused_by_instruction_and_line(tmp_path: Path, dockerfile: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe(tmp_path, dockerfile).settled()


@pytest.mark.parametrize("target", ["/app", "/app/", ".", "./", "../app", "/tmp", "/"])
def test_a_file_that_is_copied_to_a_directory_goes_into_it(tmp_path: Path, target: str) -> None:
    found = recipe(tmp_path, "FROM a", "WORKDIR /app", f"COPY a.txt {target}")
    assert list(copied(found)) == [{"/tmp": "/tmp/a.txt", "/": "/a.txt"}.get(target, "/app/a.txt")]


def test_a_copy_over_an_earlier_copy_goes_where_docker_puts_it(tmp_path: Path) -> None:
    lines = ("FROM a", "WORKDIR /app", "COPY data d", "COPY a.txt d", "COPY a.txt new", "COPY a.txt new")
    found = recipe(tmp_path, *lines, files=("a.txt", "data/b.txt"))
    assert [file.target for file in found.files] == ["/app/d/b.txt", "/app/d/a.txt", "/app/new", "/app/new"]


def test_a_target_that_may_be_a_directory_of_the_image_keeps_the_name_of_its_file(tmp_path: Path) -> None:
    [unknown] = recipe(tmp_path, "FROM a", "COPY a.txt /data").files
    assert (unknown.target, unknown.inner) == ("/data", "a.txt")
    [known] = recipe(tmp_path, "FROM a", "COPY a.txt /data/").files
    assert (known.target, known.inner) == ("/data/a.txt", "")


def test_sources_are_several_or_wildcards_or_directories_with_what_is_hidden_or_empty(tmp_path: Path) -> None:
    files = ("a.txt", "b.txt", "c.md", "tree/.hidden", "tree/deep/d.txt")
    (tmp_path / "tree" / "empty").mkdir(parents=True)
    found = recipe(tmp_path, "FROM a", "COPY ?.txt /one/", "COPY [^ab].* tree /two/", "COPY /tree/d*p /three", files=files)
    places = ["/one/a.txt", "/one/b.txt", "/two/c.md", "/two/.hidden", "/two/deep/d.txt", "/three/d.txt"]
    assert list(copied(found)) == places
    assert "/two/empty" in [folder for step in found.steps if isinstance(step, CopyStep) for folder in step.folders]


def test_files_with_spaces_are_named_by_a_list_or_quotes(tmp_path: Path) -> None:
    found = recipe(tmp_path, "FROM a", 'COPY ["a b.txt", "/x y/"]', "COPY 'a b.txt' /z/", files=("a b.txt",))
    assert list(copied(found)) == ["/x y/a b.txt", "/z/a b.txt"]


def test_permissions_are_those_of_chmod_and_the_owner_is_the_one_user(tmp_path: Path) -> None:
    lines = ("FROM a", "COPY --chown=app:app --chmod=755 a.txt /one", "COPY --link --chown=1000 a.txt /two")
    assert [file.mode for file in recipe(tmp_path, *lines).files] == [0o755, None]


def test_an_archive_that_add_would_unpack_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tgz", "w:gz"):
        pass
    with pytest.raises(ConfigError, match=r"Dockerfile:2: ADD: x\.tgz is an archive, which ADD unpacks"):
        recipe(tmp_path, "FROM a", "ADD x.tgz /x")
    assert list(recipe(tmp_path, "FROM a", "COPY x.tgz /x/", "ADD a.txt /x/").files)[1].target == "/x/a.txt"


def test_lines_are_joined_and_comments_and_empty_lines_between_them_are_left_out(tmp_path: Path) -> None:
    found = recipe(
        tmp_path,
        "# syntax=docker/dockerfile:1",
        "",
        "  # a comment",
        "from a as base",
        "RUN one \\",
        "    # not a command",
        "",
        "  && two \\   ",
        "  && three",
        "RUN echo '# kept' # kept too",
        "RUN printf a\\\\",
        'CMD ["x"]',
    )
    assert run_words(found) == ["one   && two   && three", "echo '# kept' # kept too", "printf a\\\\"]
    assert (found.image, [step.said.rpartition("Dockerfile:")[2] for step in found.commands]) == (
        "a",
        ["5: RUN", "10: RUN", "11: RUN"],
    )


def test_the_escape_directive_names_what_joins_lines(tmp_path: Path) -> None:
    found = recipe(tmp_path, "# escape=`", "FROM a", "ENV A=`$B", "RUN one `", "  two\\", "COPY a.txt C:\\x\\")
    assert (found.env, run_words(found)) == ({"A": "$B"}, ["one   two\\"])
    assert list(copied(found)) == ["/C:\\x\\"]


def test_variables_are_those_of_the_instructions_above(tmp_path: Path) -> None:
    found = recipe(
        tmp_path,
        "ARG VERSION=12",
        "FROM debian:${VERSION}",
        "ARG VERSION",
        "ARG NAME=x OTHER",
        "ENV A=1 B=$A",
        "ENV A=2 C=\"$A $NAME\"  D='$A' E=\\$A F=${OTHER:-none} G=${NAME:+set} H=${MISSING}",
        "ENV GREETING hello  $NAME there",
        "ENV PATH=/opt/x:$PATH",
        "ENV NAME=env",
        "WORKDIR /srv/$VERSION",
        "WORKDIR ${NAME}",
        "COPY a.txt ${A}/",
    )
    assert found.image == "debian:12"
    assert found.env == {
        "A": "2",
        "B": "",
        "C": "1 x",
        "D": "$A",
        "E": "$A",
        "F": "none",
        "G": "set",
        "H": "",
        "GREETING": "hello  x there",
        "PATH": "/opt/x:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "NAME": "env",
    }
    assert (found.workdir, list(copied(found))) == ("/srv/12/env", ["/srv/12/env/2/a.txt"])


def test_a_command_has_the_variables_and_the_directory_of_its_line(tmp_path: Path) -> None:
    found = recipe(tmp_path, "FROM a", "ARG X=1", "RUN one", "ENV X=2 Y=3", "WORKDIR /srv", "RUN two")
    assert [(step.directory, step.environment) for step in found.commands] == [
        ("/", {"X": "1"}),
        ("/srv", {"X": "2", "Y": "3"}),
    ]
    assert found.env == {"X": "2", "Y": "3"}


def test_a_command_is_a_list_or_a_line_for_the_shell(tmp_path: Path) -> None:
    lines = ('RUN ["/bin/echo", "$0"]', "RUN [ -e /opt ]", 'SHELL ["/bin/bash", "-ec"]', "RUN --network=none three")
    found = recipe(tmp_path, "FROM a", *lines)
    assert [step.argv for step in found.commands] == [
        ("/bin/echo", "$0"),
        ("/bin/sh", "-c", "[ -e /opt ]"),
        ("/bin/bash", "-ec", "three"),
    ]


def test_instructions_keep_their_order(tmp_path: Path) -> None:
    found = recipe(tmp_path, "FROM a", "RUN one", "COPY a.txt /x/", "WORKDIR /y", "RUN two", "ADD a.txt /z/")
    kinds = [step.said.rpartition(" ")[2] for step in found.steps]
    assert kinds == ["RUN", "COPY", "WORKDIR", "RUN", "ADD"]
    assert [isinstance(step, RunStep) for step in found.steps] == [True, False, False, True, False]


def test_here_documents_are_scripts_files_and_input(tmp_path: Path) -> None:
    found = recipe(
        tmp_path,
        "FROM a",
        "ENV NAME=x",
        "RUN <<END",
        "# one",
        "echo $NAME",
        "END",
        "RUN cat <<'ONE' > /a && cat <<-TWO > /b",
        "$NAME",
        "ONE",
        "\tb",
        "\tTWO",
        "COPY <<END /etc/one",
        "it's $NAME \\$NAME",
        "END",
        'COPY <<"a.conf" <<-b.conf a.txt /etc/d/',
        "$NAME",
        "a.conf",
        "\t$NAME",
        "b.conf",
    )
    assert run_words(found) == ["# one\necho $NAME\n", "cat <<'ONE' > /a && cat <<-TWO > /b\n$NAME\nONE\nb\nTWO"]
    assert copied(found) == {
        "/etc/one": "it's x $NAME\n",
        "/etc/d/a.conf": "$NAME\n",
        "/etc/d/b.conf": "x\n",
        "/etc/d/a.txt": "a.txt\n",
    }


def test_what_is_no_here_document_is_left_to_the_shell(tmp_path: Path) -> None:
    lines = ("RUN echo '<<END' $((1<<2)) \"a <<b c\"", "RUN cat <<< text")
    assert run_words(recipe(tmp_path, "FROM a", *lines)) == [line.removeprefix("RUN ") for line in lines]


def test_a_stage_that_continues_the_one_above_is_the_same_image(tmp_path: Path) -> None:
    found = recipe(tmp_path, "FROM a AS base", "ARG X=1", "ENV A=1", "RUN one", "FROM base", "RUN two $X")
    assert (found.image, found.env, run_words(found)) == ("a", {"A": "1"}, ["one", "two $X"])
    assert found.commands[1].environment == {"A": "1"}


def test_instructions_about_the_start_of_a_container_have_no_effect(tmp_path: Path) -> None:
    lines = ("USER root", "USER 0:0", 'ENTRYPOINT ["x"]', "HEALTHCHECK CMD true", "EXPOSE 80", "VOLUME /v", "LABEL a=b")
    found = recipe(tmp_path, "FROM a", *lines, "RUN --mount=type=cache,target=/c true")
    [volume, run] = found.steps
    assert isinstance(volume, CopyStep)
    assert isinstance(run, RunStep)
    assert (volume.folders, run.folders) == (("/v",), ("/c",))


def test_the_platform_of_this_machine_may_stand_before_an_image(tmp_path: Path) -> None:
    own = {"x86_64": "linux/amd64", "aarch64": "linux/arm64/v8"}[platform.machine()]
    assert recipe(tmp_path, f"FROM --platform={own} a").image == "a"
    assert recipe(tmp_path, "FROM --platform=$TARGETPLATFORM a", "ARG TARGETOS", "ENV A=$TARGETOS").env == {"A": "linux"}


@pytest.mark.parametrize(
    "command",
    [
        "apt-get install -y vim",
        "apt-get -qq update && rm -rf /var/lib/apt/lists/*",
        "python3 -m pip install --no-cache-dir pytest==8",
        "true; curl -LsSf https://x.org | sh",
        '["sh", "-c", "apt-get install vim"]',
        "<<END\nnpm ci\nEND",
        "bash <<END\ngit clone https://x.org/y\nEND",
        "--mount=type=bind,target=/x pip install /x",
        "R -e \"install.packages('x', repos='https://x.org')\"",
    ],
)
def test_a_command_that_needs_a_network_counts_as_done_in_an_image_that_has_the_packages(
    tmp_path: Path, command: str
) -> None:
    found = recipe(tmp_path, "FROM a", "RUN one", f"RUN {command}", "COPY a.txt /x/")
    with pytest.raises(ConfigError, match=r"Dockerfile:3: RUN [a-z0-9.-]+ needs a network.*has_packages: \['a'\]"):
        found.settled()
    with pytest.raises(ConfigError, match="Dockerfile:3"):
        found.settled(["b"])
    for has_packages in (["a"], ["*"]):
        settled = found.settled(has_packages)
        assert [step.said.rpartition(" ")[2] for step in settled.steps] == ["RUN", "COPY"]
        [left] = settled.left_out
        assert (left.said.rpartition("Dockerfile")[2], left.text[:20]) == (":3: RUN", command.partition("\n")[0][:20])
        assert left.why == "the image 'a' counts as having it"


def test_files_of_other_images_and_addresses_count_as_done_in_an_image_that_has_the_packages(tmp_path: Path) -> None:
    found = recipe(tmp_path, "FROM a", "COPY --from=uv:1 /uv /bin/", "ADD https://x.org/y /y", "COPY a.txt /").settled(["a"])
    assert [left.text for left in found.left_out] == ["--from=uv:1 /uv /bin/", "https://x.org/y /y"]
    assert list(copied(found)) == ["/a.txt"]


@pytest.mark.parametrize(
    "command",
    [
        "apt-get clean",
        "pip --version",
        "pip install --no-index /wheels/x.whl",
        "npm run build",
        "git init",
        "command -v curl >/dev/null",
        "which wget && true",
        "curl --version",
        "echo 'pip install x' > /README",
        "cat <<END > /README\npip install x\nEND",
        "rm -rf /var/lib/apt/lists/*",
    ],
)
def test_a_command_that_needs_no_network_is_run(tmp_path: Path, command: str) -> None:
    found = recipe(tmp_path, "FROM a", f"RUN {command}")
    assert found.settled() == found


def test_an_image_of_the_task_keeps_files_variables_and_directory_of_the_dockerfile(tmp_path: Path) -> None:
    found = recipe(
        tmp_path,
        "FROM build AS build",
        "ENV LOST=1",
        "RUN make",
        "FROM --platform=linux/s390x b",
        "ENV PATH=/opt/x:$PATH A=1",
        "WORKDIR /srv",
        "RUN apt-get install -y vim",
        "COPY a.txt .",
        "COPY --from=build /x /x",
        "COPY elsewhere /y",
        "ADD https://x.org/y /y",
        "USER bob",
        docker_image="prebuilt:1",
    )
    assert (found.image, found.workdir, copied(found)) == ("prebuilt:1", "/srv", {"/srv/a.txt": "a.txt\n"})
    assert (found.env["A"], found.env["PATH"][:8], "LOST" in found.env, found.commands) == ("1", "/opt/x:/", False, [])
    said = [(each.said.rpartition(":")[0].rpartition(":")[2], each.why) for each in found.left_out]
    has_it = "the image 'prebuilt:1' counts as having it"
    assert said == [*((line, has_it) for line in ("7", "9", "10", "11")), ("12", said[-1][1])]
    assert said[-1][1].startswith("everything runs as root")


def test_an_image_that_is_known_brings_its_variables_and_its_directory(tmp_path: Path) -> None:
    facts = ImageFacts(env={"PATH": "/opt/go/bin:/bin", "LANG": "C"}, workdir="/go")
    (tmp_path / "Dockerfile").write_text("FROM go\nENV PATH=/x:$PATH LEVEL=${LANG}1\nWORKDIR src\nRUN one\n")
    found = read_dockerfile(tmp_path, docker_image=None, workdir=None, facts_of={"go": facts}.get)
    assert (found.workdir, found.env) == ("/go/src", {"PATH": "/x:/opt/go/bin:/bin", "LANG": "C", "LEVEL": "C1"})
    assert found.commands[0].environment == found.env
    (tmp_path / "Dockerfile").unlink()
    found = read_dockerfile(tmp_path, docker_image="go", workdir=None, facts_of={"go": facts}.get)
    assert (found.image, found.workdir, found.env) == ("go", "/go", facts.env)


def test_a_working_directory_of_the_task_goes_before_that_of_the_dockerfile(tmp_path: Path) -> None:
    assert recipe(tmp_path, "FROM a", "WORKDIR /x", workdir="y").workdir == "/x/y"
    assert recipe(tmp_path, "FROM a").workdir == "/app"


@pytest.mark.parametrize("leads_to", ["/etc/passwd", "../../solution", "/etc", "../../nothing"])
def test_a_link_in_a_copied_directory_that_leads_out_is_refused(tmp_path: Path, leads_to: str) -> None:
    folder = tmp_path / "environment"
    recipe(folder, "FROM a", "COPY data /data", files=("a.txt", "data/deep/b.txt"))
    (folder / "data" / "deep" / "a").symlink_to(folder / "a.txt")
    assert "/data/deep/a" in copied(recipe(folder, "FROM a", "COPY data /data"))
    (folder / "data" / "link").symlink_to(leads_to)
    for source in ("data", "d*", "data/link"):
        with pytest.raises(ConfigError, match=r"Dockerfile:2: COPY: .*data/link.* leads to .*; put a copy"):
            recipe(folder, "FROM a", f"COPY {source} /data")


def test_no_path_through_a_link_and_no_file_that_is_none_is_copied(tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    (tmp_path / "secret" / "deep").mkdir(parents=True)
    (tmp_path / "secret" / "deep" / "key").write_text("secret")
    folder.mkdir()
    (folder / "out").symlink_to("../secret")
    for source in ("out/deep/key", "out/*/key", "*/deep"):
        with pytest.raises(ConfigError, match=r"Dockerfile:2: COPY: .*/out is a link, and leads to "):
            recipe(folder, "FROM a", f"COPY {source} /x")
    (folder / "out").unlink()
    (folder / "data").mkdir()
    os.mkfifo(folder / "data" / "pipe")
    with pytest.raises(ConfigError, match=r"Dockerfile:2: COPY: .*pipe is neither a file nor a directory"):
        recipe(folder, "FROM a", "COPY data /x")
    (folder / "data" / "pipe").unlink()
    (folder / "data" / "self").symlink_to(".")
    with pytest.raises(ConfigError, match="self is a link to a directory; put a copy of the directory in its place"):
        recipe(folder, "FROM a", "COPY data /x")
