"""Publishing weights through directories."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agentrl.errors import TrainError, WeightSyncError
from agentrl.weights.disk import atomic_directory, publish, read_manifest, verify_directory
from agentrl.weights.tensors import RawTensor, model_checksum, tensor_checksum

_FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
from agentrl.errors import TrainError
from agentrl.weights.disk import publish
from agentrl.weights.tensors import RawTensor
directory = Path(sys.argv[1])
small = {"w": RawTensor.of(np.zeros(10, np.float32))}
large = {"w": RawTensor.of(np.zeros(100_000, np.float32))}
publish(small, version=1, directory=directory, source=None)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    publish(large, version=2, directory=directory, source=None)
except TrainError as error:
    print(error)
"""


def _weights(value: float = 1.0) -> dict[str, RawTensor]:
    return {
        "a.weight": RawTensor.of(np.full((3, 2), value, np.float32)),
        "b": RawTensor.of(np.arange(4, dtype=np.float32)),
    }


def test_a_publication_names_its_version_and_the_digest_of_every_tensor(tmp_path: Path) -> None:
    publication = publish(_weights(), version=12, directory=tmp_path, source=None)

    assert publication.path == str(tmp_path / "v00000012")
    expected = tensor_checksum("b", "F32", [4], np.arange(4, dtype="<f4").tobytes())
    assert publication.tensor_checksums["b"] == expected
    assert publication.checksum == model_checksum(publication.tensor_checksums)
    assert verify_directory(tmp_path / "v00000012") == publication
    assert read_manifest(tmp_path / "v00000012").version == 12


def test_the_config_and_tokenizer_files_of_the_source_come_along(tmp_path: Path, checkpoint: Path) -> None:
    publication = publish(_weights(), version=1, directory=tmp_path, source=checkpoint)

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (Path(publication.path) / name).read_bytes() == (checkpoint / name).read_bytes()


def test_only_the_newest_versions_are_kept_and_leftovers_of_killed_writers_go(tmp_path: Path) -> None:
    (tmp_path / ".writing-v00000002").mkdir()
    (tmp_path / "notes").mkdir()

    for version in range(9, 12):
        publish(_weights(), version=version, directory=tmp_path, source=None, keep=2)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "v00000010", "v00000011"]


def test_publishing_a_version_again_replaces_it(tmp_path: Path) -> None:
    publish(_weights(1.0), version=3, directory=tmp_path, source=None)
    second = publish(_weights(2.0), version=3, directory=tmp_path, source=None)

    assert verify_directory(tmp_path / "v00000003") == second
    assert [path.name for path in tmp_path.iterdir()] == ["v00000003"]


def test_nothing_is_visible_until_everything_is_written(tmp_path: Path) -> None:
    final = tmp_path / "model"

    with atomic_directory(final) as folder:
        (folder / "a").write_text("a")
        assert not final.exists()

    assert (final / "a").read_text() == "a"


def test_a_failure_while_writing_leaves_the_former_directory_and_nothing_else(tmp_path: Path) -> None:
    final = tmp_path / "model"
    with atomic_directory(final) as folder:
        (folder / "a").write_text("first")

    def fail() -> None:
        with atomic_directory(final) as folder:
            (folder / "a").write_text("second")
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fail()

    assert (final / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_writer_killed_while_replacing_left_aside_is_put_back(tmp_path: Path) -> None:
    final = tmp_path / "model"
    with atomic_directory(tmp_path / ".writing-replaced-model") as folder:
        (folder / "a").write_text("former")

    def fail() -> None:
        with atomic_directory(final):
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fail()

    assert (final / "a").read_text() == "former"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.starts
def test_a_full_disk_is_an_error_that_names_path_and_cause_and_leaves_earlier_versions(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", _FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True)

    assert f"cannot write {tmp_path / 'v00000002'}: File too large" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["v00000001"]
    verify_directory(tmp_path / "v00000001")


def test_a_path_that_cannot_be_a_directory_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(TrainError, match=r"cannot write .*file/weights/v00000001: Not a directory"):
        publish(_weights(), version=1, directory=tmp_path / "file" / "weights", source=None)


def test_one_altered_bit_is_found_and_the_tensor_named(tmp_path: Path) -> None:
    publish(_weights(), version=1, directory=tmp_path, source=None)
    weights = tmp_path / "v00000001" / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)

    with pytest.raises(WeightSyncError, match=r"tensor 'b' was altered after it was written"):
        verify_directory(tmp_path / "v00000001")


def test_a_directory_without_a_manifest_is_not_a_publication(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"no readable manifest\.json"):
        verify_directory(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    publish(_weights(), version=1, directory=tmp_path, source=None)
    publish({"b": _weights()["b"]}, version=2, directory=tmp_path, source=None)
    (tmp_path / "v00000002" / "model.safetensors").replace(tmp_path / "v00000001" / "model.safetensors")

    with pytest.raises(WeightSyncError, match=r"disagree about the tensors \['a\.weight'\]"):
        verify_directory(tmp_path / "v00000001")
