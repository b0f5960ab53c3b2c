"""A disk that is full of adapters: the publication fails by name, and what was published before stays whole."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agentrl.errors import TrainError
from agentrl.weights.disk import prune, publish_adapter
from agentrl.weights.peft_files import ADAPTER_BASE_FILE, ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, read_adapter
from agentrl.weights.tensors import RawTensor
from agentrl.weights.types import Publication

ROOT = Path(__file__).parents[2]
ALLOWED = ["unshare", "--user", "--map-root-user", "--mount"]


def publish_version(version: int, directory: Path) -> Publication:
    """Publish 256 KiB."""
    names = [f"base_model.model.layers.{layer}.q_proj.lora_{matrix}.weight" for layer in (0, 1) for matrix in ("A", "B")]
    tensors = {name: RawTensor.of(np.full((128, 128), version, np.float32)) for name in names}
    documents = {ADAPTER_CONFIG_FILE: b"{}", ADAPTER_BASE_FILE: b"{}"}
    return publish_adapter(tensors, documents, version=version, directory=directory)


def held(publication: Publication) -> bool:
    digests = {name: raw.checksum(name) for name, raw in read_adapter(Path(publication.path)).items()}
    return digests == publication.tensor_checksums


def fill_and_recover(directory: Path) -> None:
    """Publish versions into a disk of 1 MiB until it is full, then make room as a run does, and publish the same again."""
    published = [publish_version(version, directory) for version in (1, 2, 3)]
    with pytest.raises(TrainError, match=rf"cannot write {directory}/v\d+: No space left on device; free space, or write"):
        publish_version(4, directory)
    assert all(held(each) for each in published)
    assert sorted(path.name for path in directory.iterdir()) == [Path(each.path).name for each in published]
    prune(directory, keep=2)
    published.append(publish_version(4, directory))
    assert [held(each) for each in published[1:]] == [True] * 3
    assert not (Path(published[0].path) / ADAPTER_WEIGHTS_FILE).exists()


@pytest.mark.starts
def test_a_full_disk_fails_one_publication_and_loses_none(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run([*ALLOWED, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a disk of its own needs `mount` in a user namespace, which this machine does not allow")
    inside = f"mount -t tmpfs -o size=1m adapters {tmp_path} && exec {sys.executable} -m {__name__} {tmp_path}"
    done = subprocess.run([*ALLOWED, "sh", "-c", inside], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    fill_and_recover(Path(sys.argv[1]))
