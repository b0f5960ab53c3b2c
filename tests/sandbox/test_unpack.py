"""Images of `docker save` and OCI layouts become folders that containers begin with."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import re
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox.containers import open_containers
from agentrl_sandbox.containers.image_facts import FACTS_FILE, ImageFacts, facts_of_images
from agentrl_sandbox.containers.layer_archive import unpack_layer
from agentrl_sandbox.containers.services.layer_bytes import names_at_top
from agentrl_sandbox.containers.unpack import unpack_image

OWN = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "amd64")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def layer(files: Mapping[str, bytes | str | None]) -> bytes:
    """Return a layer: contents, the target of a link, or None for a directory, by path."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.mode = 0o755
            if data is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(data, str):
                member.type, member.linkname = tarfile.SYMTYPE, data
            else:
                member.size = len(data)
            archive.addfile(member, io.BytesIO(data) if isinstance(data, bytes) else None)
    return packed.getvalue()


def docker_save(path: Path, layers: list[bytes], architecture: str = OWN) -> Path:
    own = {"Env": ["PATH=/opt/bin:/bin", "bad-name=1", "EMPTY=", "NO"], "WorkingDir": "/srv/app", "Cmd": ["sh"]}
    config = json.dumps({"architecture": architecture, "os": "linux", "config": own}).encode()
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": "config.json", "Layers": names}]).encode()
    files = {"manifest.json": manifest, "config.json": config, **dict(zip(names, layers, strict=True))}
    path.write_bytes(layer(files))
    return path


def oci_layout(folder: Path, layers: list[bytes]) -> Path:
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes) -> dict[str, str]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}"}

    config = put(json.dumps({"architecture": OWN, "os": "linux"}).encode())
    manifest = put(json.dumps({"config": config, "layers": [put(gzip.compress(each)) for each in layers]}).encode())
    (folder / "index.json").write_text(json.dumps({"manifests": [manifest]}))
    return folder


def small_image() -> dict[str, bytes | str | None]:
    """Return bash, cat, mkdir and their libraries of this machine, as an image without Python."""
    programs = ["/usr/bin/bash", "/usr/bin/cat", "/usr/bin/mkdir", "/usr/bin/ls"]
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True, timeout=300).stdout
    libraries = set(re.findall(r"(/lib\S+)", said)) - {f"{each}:" for each in programs}
    found: dict[str, bytes | str | None] = dict.fromkeys(("usr", "usr/bin", "etc", "tmp", "app"))
    found |= {"bin": "usr/bin", "usr/bin/sh": "bash"}
    found |= {name.removeprefix("/"): Path(name).read_bytes() for name in (*programs, *sorted(libraries))}
    return found


def open_to_containers(folder: Path) -> None:
    for part in (folder, *folder.parents):
        if part.stat().st_uid == folder.stat().st_uid and part != Path("/"):
            part.chmod(part.stat().st_mode | 0o011)


@pytest.mark.starts
@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["docker save", "OCI layout"])
async def test_a_container_over_an_unpacked_image_has_its_files_and_no_other(tmp_path: Path, kind: str) -> None:
    open_to_containers(tmp_path)
    layers = [layer({**small_image(), "app/a": b"1", "app/b": b"2"}), layer({"app/.wh.a": b"", "app/c": b"3"})]
    image = oci_layout(tmp_path / "oci", layers) if kind == "OCI layout" else docker_save(tmp_path / "a.tar", layers)
    unpack_image(image, tmp_path / "root")
    async with (
        open_containers(images={"small": str(tmp_path / "root")}) as containers,
        containers.workbench(image="small") as bench,
        bench.run(directory="/app") as container,
    ):
        said = await container.shell("ls; cat b c; type git python3; echo here > /usr/bin/new && ls /usr/bin/new")
    assert said.stdout.startswith(b"b\nc\n23")
    assert said.stdout.count(b"not found") == 2
    assert said.stdout.endswith(b"/usr/bin/new\n")


def test_links_of_an_image_lead_nowhere_else(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    bad = layer({"usr": None, "x": str(outside), "x/evil": b"1", "../../up": b"2", "y": "../../..", "y/evil": b"3"})
    unpack_image(docker_save(tmp_path / "a.tar", [bad]), tmp_path / "root")
    assert list(outside.iterdir()) == []
    assert not (tmp_path.parent / "up").exists()
    assert (tmp_path / "root" / "evil").read_bytes() == b"3"


def test_later_layers_replace_and_remove(tmp_path: Path) -> None:
    layers = [layer({"d/one": b"1", "d/two": b"2", "f": b"3"}), layer({"d/.wh..wh..opq": b"", "d/new": b"4", "f": "d/new"})]
    unpack_image(docker_save(tmp_path / "a.tar", layers), tmp_path / "root")
    assert sorted(path.name for path in (tmp_path / "root" / "d").iterdir()) == ["new"]
    assert (tmp_path / "root" / "f").is_symlink()


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh...", "d/.wh...", "d/.wh.."])
def test_a_deletion_that_names_no_file_is_refused_and_deletes_nothing(tmp_path: Path, name: str) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "other").write_text("kept")
    bad = layer({"d": None, name: b""})
    with pytest.raises(ConfigError, match=r"deletes '\.{0,2}'"):
        unpack_image(docker_save(tmp_path / "a.tar", [bad]), images / "root")
    with pytest.raises(ConfigError, match=r"deletes '\.{0,2}'"):
        unpack_layer(bad, images / "layer")
    with pytest.raises(EnvironmentFault, match=r"deletes '\.{0,2}'"):
        names_at_top(bad)
    assert (images / "other").read_text() == "kept"


def test_an_image_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"an image for linux/s390x; this machine runs"):
        unpack_image(docker_save(tmp_path / "a.tar", [], "s390x"), tmp_path / "root")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match="expected a tar"):
        unpack_image(tmp_path / "text", tmp_path / "root")
    with pytest.raises(ConfigError, match="zstd"):
        unpack_image(docker_save(tmp_path / "b.tar", [b"\x28\xb5\x2f\xfdrest"]), tmp_path / "root")
    assert not (tmp_path / "root").exists()
    (tmp_path / "root").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        unpack_image(docker_save(tmp_path / "c.tar", []), tmp_path / "root")


def test_the_folder_knows_the_variables_and_the_directory_of_its_image(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    image = docker_save(tmp_path / "image.tar", [layer({"usr": None, FACTS_FILE: str(outside)})])
    unpack_image(image, tmp_path / "docker")
    facts_of = facts_of_images({"a": str(tmp_path / "docker"), "b": str(tmp_path / "oci"), "none": None})
    assert facts_of("a") == ImageFacts(env={"PATH": "/opt/bin:/bin", "EMPTY": ""}, workdir="/srv/app")
    assert outside.read_text() == "kept"
    unpack_image(oci_layout(tmp_path / "layout", [layer({"usr": None})]), tmp_path / "oci")
    assert facts_of("b") == ImageFacts()
    assert (facts_of("none"), facts_of("other")) == (None, None)
    (tmp_path / "docker" / FACTS_FILE).unlink()
    assert facts_of("a") is None
    (tmp_path / "docker" / FACTS_FILE).symlink_to(outside)
    with pytest.raises(ConfigError, match="unpack the image again, or delete this file"):
        facts_of("a")
