"""Weights published through a directory: written to a temporary name, then renamed into place.

Invariant: a directory that is visible under its final name is complete, and its `manifest.json` names the version and the
digest of every tensor in it. One process writes under one parent directory.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from agentrl.errors import TrainError, WeightSyncError
from agentrl.support.folders import make_private
from agentrl.weights.peft_files import ADAPTER_WEIGHTS_FILE
from agentrl.weights.tensors import WEIGHTS_FILE, RawTensor, model_checksum, read_safetensors, write_safetensors
from agentrl.weights.types import Publication

MANIFEST_FILE = "manifest.json"
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a HF checkpoint, besides the weights, that a copy of it needs; those present are copied byte for byte."""

_PARTIAL = ".writing-"
_VERSION_PREFIX = "v"


class DirectoryManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of `manifest.json`: the version and the digests of the weights next to it."""

    version: int
    checksum: str
    """Digest of the whole model, by `agentrl.weights.tensors.model_checksum`."""
    tensor_checksums: dict[str, str]
    """Digest of each tensor, by HF parameter name."""


@contextmanager
def atomic_directory(final: Path, *, durable: bool = True) -> Generator[Path]:
    """Yield an empty directory to fill; at the end of the block it becomes `final`, in place of an older one, or is removed.

    Without `durable` its files are not flushed: it is whole for every process, but not after a power cut.
    """
    partial = partial_directory(final)
    replaced = final.with_name(f"{_PARTIAL}replaced-{final.name}")
    try:
        if replaced.exists() and not final.exists():
            replaced.rename(final)  # a writer was killed between the two renames of `_swap`
        shutil.rmtree(partial, ignore_errors=True)
        make_private(final.parent)
        partial.mkdir()
        yield partial
        if durable:
            for path in [*partial.iterdir(), partial]:
                flush(path)
        # After the flush: a power cut must not leave a directory with its final name and without its contents.
        _swap(partial, final, replaced)
        if durable:
            flush(final.parent)
    except OSError as error:
        raise write_error(final, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def partial_directory(final: Path) -> Path:
    """Return the directory that `atomic_directory(final)` yields, for another process that fills it too."""
    return final.with_name(_PARTIAL + final.name)


def remove_partial_directories(parent: Path) -> None:
    """Remove the directories in `parent` that killed writers left incomplete."""
    for path in parent.glob(f"{_PARTIAL}*"):
        # A killed writer may have left the only whole copy under this name; `atomic_directory` gives it back.
        if not path.name.startswith(f"{_PARTIAL}replaced-"):
            shutil.rmtree(path, ignore_errors=True)


def write_error(final: Path, error: OSError) -> TrainError:
    """Return the error of a writer of the directory `final` that met `error`."""
    fix = "free space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "fix the cause"
    return TrainError(f"cannot write {final}: {error.strerror or error}; {fix}, or write elsewhere")


def flush(path: Path) -> None:
    """Return when a file or directory is on the disk; raises OSError when the disk refuses."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_model(folder: Path, tensors: Mapping[str, RawTensor], *, version: int, source: Path | None) -> DirectoryManifest:
    """Write weights, manifest, and copies of the other files of the checkpoint `source` into the existing `folder`."""
    # From memory, not from the file: the reader then notices a disk that wrote other bytes than it was given.
    digests = {name: tensor.checksum(name) for name, tensor in tensors.items()}
    manifest = DirectoryManifest(version=version, checksum=model_checksum(digests), tensor_checksums=digests)
    write_safetensors(folder / WEIGHTS_FILE, tensors)
    if source is not None:
        copy_model_files(source, folder)
    (folder / MANIFEST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return manifest


def copy_model_files(source: Path, folder: Path) -> None:
    """Copy the config and tokenizer files of the HF checkpoint `source` into `folder`; raises OSError as `write_model`."""
    for name in MODEL_FILES:
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())


def publish(
    tensors: Mapping[str, RawTensor], *, version: int, directory: Path, source: Path | None, keep: int | None = None
) -> Publication:
    """Write `tensors` as policy `version` to `directory/v<version>`; after an error nothing partial stays behind.

    The files are not flushed to the disk: after a power cut no server is left to read them. The `keep` newest versions stay,
    at least 2 while servers may still read the version before; None: all. A tied output head must not be listed twice.
    """
    final = directory / f"{_VERSION_PREFIX}{version:08d}"
    with atomic_directory(final, durable=False) as folder:
        manifest = write_model(folder, tensors, version=version, source=source)
    if keep is not None:
        prune(directory, keep=keep)
    return Publication(
        version=version, path=str(final), checksum=manifest.checksum, tensor_checksums=manifest.tensor_checksums
    )


def publish_adapter(
    tensors: Mapping[str, RawTensor], documents: Mapping[str, bytes], *, version: int, directory: Path
) -> Publication:
    """Write an adapter as policy `version`, as `publish` does whole weights: its matrices and the files that describe it."""
    final = directory / f"{_VERSION_PREFIX}{version:08d}"
    digests = {name: tensor.checksum(name) for name, tensor in tensors.items()}
    with atomic_directory(final, durable=False) as folder:
        write_safetensors(folder / ADAPTER_WEIGHTS_FILE, tensors)
        for name, content in documents.items():
            (folder / name).write_bytes(content)
    return Publication(
        version=version, path=str(final), checksum=model_checksum(digests), tensor_checksums=digests, adapter=True
    )


def prune(directory: Path, *, keep: int) -> None:
    """Remove published versions under `directory` except the `keep` newest, and the leftovers of killed writers."""
    pattern = f"{_VERSION_PREFIX}[0-9]*"
    published = sorted(path for path in directory.glob(pattern) if path.is_dir())
    leftovers = [*directory.glob(f"{_PARTIAL}{pattern}"), *directory.glob(f"{_PARTIAL}replaced-{pattern}")]
    for path in [*published[: max(0, len(published) - keep)], *leftovers]:
        # A server may be reading an old version: its open files stay valid, and a failed removal is no error.
        shutil.rmtree(path, ignore_errors=True)


def read_manifest(path: Path) -> DirectoryManifest:
    """Return the manifest of a published directory."""
    try:
        return msgspec.json.decode((path / MANIFEST_FILE).read_bytes(), type=DirectoryManifest)
    except (OSError, msgspec.DecodeError) as error:
        raise WeightSyncError(f"{path}: no readable {MANIFEST_FILE} ({error}); expected published weights here") from error


def verify_directory(path: Path) -> Publication:
    """Return the publication at `path` after checking the digest of every tensor in it."""
    manifest = read_manifest(path)
    tensors = read_safetensors(path / WEIGHTS_FILE)
    if tensors.keys() != manifest.tensor_checksums.keys():
        difference = sorted(tensors.keys() ^ manifest.tensor_checksums.keys())
        raise WeightSyncError(f"{path}: {WEIGHTS_FILE} and {MANIFEST_FILE} disagree about the tensors {difference[:5]}")
    for name, tensor in tensors.items():
        if tensor.checksum(name) != manifest.tensor_checksums[name]:
            raise WeightSyncError(f"{path}: tensor {name!r} was altered after it was written; publish the version again")
    if model_checksum(manifest.tensor_checksums) != manifest.checksum:
        raise WeightSyncError(f"{path}: {MANIFEST_FILE} contradicts itself; publish the version again")
    return Publication(
        version=manifest.version,
        path=str(path),
        checksum=manifest.checksum,
        tensor_checksums=manifest.tensor_checksums,
    )


def _swap(partial: Path, final: Path, replaced: Path) -> None:
    shutil.rmtree(replaced, ignore_errors=True)
    # A rename replaces only an empty directory, so an older version has to step aside first.
    if final.exists():
        final.rename(replaced)
    try:
        partial.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
