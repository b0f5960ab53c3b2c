"""`agentrl import`, and a GGUF file where a run file or a command takes a model."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl.commands.evaluate import command_target
from agentrl.commands.init import start_project
from agentrl.config.run import ModelConfig
from agentrl.errors import ConfigError, TrainError
from agentrl.plan.model import model_of, read_model
from agentrl_gguf.cached import cached_directory, model_directory
from agentrl_gguf.commands.import_model import import_command
from tests.gguf.writing import tiny_model, write_gguf
from tests.support.cli import agentrl, status_here, write_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    tiny_model(folder, "qwen3")
    return folder


@pytest.fixture
def file(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_gguf(tmp_path / "tiny.gguf", model)


def test_the_same_import_again_changes_nothing_and_another_one_is_refused(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "imported"
    assert status_here("import", str(file), str(folder)) in (None, 0)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    import_command(str(file), folder)
    assert "there already" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    with pytest.raises(ConfigError, match=r"is not this import of tiny\.gguf as bfloat16"):
        import_command(str(file), folder, dtype="bfloat16")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="give another directory, or remove it"):
        import_command(str(file), tmp_path / "other")


def test_a_template_that_is_given_takes_the_place_of_the_file(tmp_path: Path, file: Path, model: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    bare = write_gguf(tmp_path / "bare.gguf", model, keys={"tokenizer.chat_template": None})
    for number, source in enumerate((file, bare)):
        import_command(str(source), tmp_path / str(number), chat_template=template)
        assert (tmp_path / str(number) / "chat_template.jinja").read_text() == template.read_text()


def test_a_file_without_a_template_says_so(
    tmp_path: Path, file: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = write_gguf(tmp_path / "bare.gguf", model, keys={"tokenizer.chat_template": None})
    import_command(str(bare), tmp_path / "imported")
    assert "has no chat template; put one into" in capsys.readouterr().out


def test_a_disk_that_refuses_leaves_nothing(tmp_path: Path, file: Path) -> None:
    folder = tmp_path / "place" / "imported"
    with files_of_at_most(50_000), pytest.raises(TrainError, match=r"cannot write .*imported: File too large"):
        import_command(str(file), folder)
    assert list(folder.parent.iterdir()) == []


def test_a_run_file_takes_the_file_and_imports_it_once(file: Path) -> None:
    config = ModelConfig(path=str(file))
    assert model_of(config).shape is not None
    assert not cached_directory(file).exists()
    folder = Path(config.directory)
    assert folder == cached_directory(file)
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert Path(config.directory) == folder
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    assert read_model(str(folder), str(file)) == model_of(config)
    assert command_target(file, None, None, None).checkpoint == folder


def test_a_new_project_tells_the_size_of_a_model_by_the_header_of_its_file(tmp_path: Path, file: Path) -> None:
    with pytest.raises(ConfigError, match="parameters are no pretrained model"):
        start_project(tmp_path / "new", model=str(file))
    assert not cached_directory(file).exists()


def test_a_file_that_changed_is_another_import(file: Path) -> None:
    first = model_directory(str(file))
    os.utime(file, ns=(1, 1))
    assert model_directory(str(file)) != first


def test_two_that_ask_at_once_get_one_import(file: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(model_directory(str(file)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cached_directory(file)] * 4
    assert {path.name for path in found[0].parent.iterdir()} == {found[0].name, f".{found[0].name}.lock"}


def test_a_file_in_the_cache_of_the_hub_is_imported(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    snapshot = hub / "models--org--tiny" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (hub / "models--org--tiny" / "refs").mkdir()
    (hub / "models--org--tiny" / "refs" / "main").write_text("0" * 40)
    file.rename(snapshot / "tiny.gguf")
    assert Path(ModelConfig(path="hf://org/tiny/tiny.gguf").directory, "tokenizer.json").is_file()
    with pytest.raises(ConfigError, match=r"agentrl download hf://org/tiny/absent\.gguf"):
        _ = ModelConfig(path="hf://org/tiny/absent.gguf").directory


@pytest.mark.starts
def test_a_run_trains_a_gguf_file(tmp_path: Path, file: Path) -> None:
    run = write_run(tmp_path, file)
    plan = agentrl(tmp_path, "train", run.name, "--dry-run")
    assert plan.returncode == 0, plan.stdout + plan.stderr
    assert not cached_directory(file).exists()
    done = agentrl(tmp_path, "train", run.name)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "small" / "summary.json").is_file()
    file.write_bytes(file.read_bytes()[:-100])
    broken = agentrl(tmp_path, "train", run.name, "--dry-run")
    assert broken.returncode == 1
    assert "model.path:" in broken.stdout
    assert "cut short or damaged" in broken.stdout


@contextmanager
def files_of_at_most(size: int) -> Generator[None]:
    """Refuse writes beyond `size` bytes of a file, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
