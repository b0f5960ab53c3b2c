"""Wheels that tests write: a package of PyPI with a few lines in the form of its data."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from agentrl_envs.data_packages import DataPackage


def write_wheel(folder: Path, package: DataPackage, files: Mapping[str, bytes | str], version: str | None = None) -> str:
    """Write a wheel of `package` with these files, and return its path."""
    version = version or package.version
    name = package.name.replace("-", "_")
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}-{version}.dist-info/METADATA", _metadata(package, version))
        for file, content in files.items():
            wheel.writestr(file, content)
    return str(path)


def install(folder: Path, package: DataPackage, files: Mapping[str, str]) -> None:
    """Write a package as it is installed into `folder`."""
    info = folder / f"{package.name.replace('-', '_')}-{package.version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(_metadata(package, package.version))
    for file, content in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(content)


def hide_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process find no installed package for the rest of the test."""

    def no_distributions(**_: object) -> Iterator[Distribution]:
        return iter(())

    monkeypatch.setattr("importlib.metadata.distributions", no_distributions)


def _metadata(package: DataPackage, version: str) -> str:
    return f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {version}\n"
