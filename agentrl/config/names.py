"""Names of the Hugging Face hub, such as `hf://org/name@revision/file`, and where they are on this machine.

Invariant: a run never downloads. A name is looked up in the local cache of the hub, and only `download` opens a connection.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, cast

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.support.companions import ModelFile

SCHEME: Final = "hf://"
_NAME: Final = re.compile(
    r"hf://(?P<datasets>datasets/)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?(?:/(?P<file>.+))?"
)
_UNUSED: Final = ("*.bin", "*.h5", "*.msgpack", "*.onnx", "*.pth", "*.pt", "*.gguf", "original/*")
"""Files of models that agentrl does not read: other formats of the weights, some of which are pickle."""
RepoKind: TypeAlias = Literal["model", "dataset"]


class HubName(NamedTuple):
    """What a name of the hub says."""

    kind: RepoKind
    repo: str
    """Owner and name, such as `Qwen/Qwen3-0.6B`."""
    revision: str | None
    """Branch, tag or commit; None: the main branch."""
    file: str | None
    """File or folder in the repository; None: all of it."""

    def __str__(self) -> str:
        kind = "datasets/" if self.kind == "dataset" else ""
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{SCHEME}{kind}{self.repo}{revision}" + ("" if self.file is None else f"/{self.file}")


def parse_hub_name(text: str, kind: RepoKind = "model") -> HubName:
    """Return the parts of a name.

    Args:
        text: `hf://org/name[@revision][/file]`, with `hf://datasets/` before a data set where the context does not say it.
        kind: what the name means without `datasets/`.

    Raises:
        ConfigError: it has another form.

    Example:
        >>> parse_hub_name("hf://datasets/openai/gsm8k@main/main/test.parquet")
        HubName(kind='dataset', repo='openai/gsm8k', revision='main', file='main/test.parquet')
    """
    found = _NAME.fullmatch(text)
    if found is None or ".." in (found["file"] or "").split("/"):
        raise ConfigError(f"expected hf://org/name, hf://org/name@revision or hf://org/name/file, got {text!r}")
    return HubName("dataset" if found["datasets"] else kind, found["repo"], found["revision"], found["file"])


def local_file(path: str) -> str:
    """Return the place of a model's file or directory: `path` itself, or what an `hf://` name means in the local cache.

    Raises:
        ConfigError: the cache does not have it; the message has the command that downloads it.
    """
    return str(_find(parse_hub_name(path))) if path.startswith(SCHEME) else path


def model_file(path: str) -> ModelFile | None:
    """Return the format of a model that is one file, such as `FILE.gguf`; None: it is a directory."""
    from agentrl.support.companions import companion_names, load_companion  # to read a run file needs neither

    form = Path(path).suffix.removeprefix(".")
    if form not in companion_names("agentrl.model_files"):
        return None
    return cast("ModelFile", load_companion("agentrl.model_files", form))


def local_model(path: str) -> str:
    """Return the directory of a model; one that is a single file is imported once, into a cache.

    Raises:
        ConfigError: the cache of the hub does not have it, or its file cannot be imported.
    """
    form, place = model_file(path), local_file(path)
    return place if form is None else str(form.directory(place))


def local_dataset(path: str) -> str:
    """Return the files of a data set: `path` itself, or their place in the local cache.

    Raises:
        ConfigError: the cache does not have them, or the name has no file; the message lists the files that are there.
    """
    if not path.startswith(SCHEME):
        return path
    name = parse_hub_name(path, "dataset")
    found = _find(name)
    if name.file is None:
        files = sorted(str(file.relative_to(found)) for file in found.rglob("*") if file.is_file())
        raise ConfigError(f"{path}: name a file or a folder of this data set; in the local cache it has {files[:20]}")
    return str(found)


def download(text: str) -> Path:
    """Download what a name means into the local cache of the hub, and return its place.

    Raises:
        ConfigError: there is no such repository or file, the hub cannot be reached, or HF_HUB_OFFLINE is set.
    """
    name, hub = parse_hub_name(text), _library()
    try:
        snapshot = hub.snapshot_download(
            name.repo,
            repo_type=name.kind,
            revision=name.revision,
            allow_patterns=None if name.file is None else [name.file, f"{name.file}/*"],
            ignore_patterns=list(_UNUSED) if name.kind == "model" and name.file is None else None,
        )
    except Exception as error:
        offline = "; HF_HUB_OFFLINE is set: unset it to download" if hub.constants.HF_HUB_OFFLINE else ""
        raise ConfigError(f"{name}: cannot download it: {type(error).__name__}: {error}{offline}") from error
    place = Path(snapshot) / (name.file or "")
    if not _matches(place):
        raise ConfigError(f"{name}: the repository has no file or folder {name.file!r}")
    return place


def _find(name: HubName) -> Path:
    hub = _library()
    try:
        snapshot = hub.snapshot_download(name.repo, repo_type=name.kind, revision=name.revision, local_files_only=True)
    except (OSError, ValueError) as error:  # what the library raises for a name that the cache lacks
        raise ConfigError(_absent(name)) from error
    place = Path(snapshot) / (name.file or "")
    if not _matches(place):
        raise ConfigError(_absent(name))
    return place


def _matches(place: Path) -> bool:
    """Return whether a file or folder is there, or one that fits a pattern such as `train-*.parquet`."""
    return place.exists() or ("*" in place.name and next(place.parent.glob(place.name), None) is not None)


def _absent(name: HubName) -> str:
    return f"{name} is not in the local cache of the hub, and a run downloads nothing; run `agentrl download {name}` first"


def _library() -> Any:  # noqa: ANN401 - imported only where it is used
    import huggingface_hub  # comes with transformers

    return huggingface_hub
