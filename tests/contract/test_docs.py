"""The documentation is true: links resolve, snippets run, and the commands it names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from agentrl.config import RunConfig, parse_config
from agentrl.observe.metric_keys import METRIC_KEYS
from agentrl.workflow import RolloutWorkflow, as_workflow

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
GUIDES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/howto/*.md")])
README_PAGE = ROOT / "README.md"
README = README_PAGE.read_text()
METRICS_OF_THE_TRAINER = [entry for entry in METRIC_KEYS if entry.key.startswith("trainer.") and entry.key != "trainer.NAME"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_resolves(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_readme_s_agent_is_a_workflow() -> None:
    [snippet] = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(snippet, "README.md", "exec"), names)
    kind = names["CalculatorAgent"]
    assert isinstance(kind, type)
    assert issubclass(kind, RolloutWorkflow)
    assert as_workflow(kind).name == "CalculatorAgent"


def test_the_readme_s_run_file_is_valid() -> None:
    [snippet] = re.findall(r"```yaml\n(.*?)```", README, re.S)
    run = parse_config({"workflow": "my:Agent", "tasks": {"path": "tasks.jsonl"}, **yaml.safe_load(snippet)})
    assert run.inference.backend == "sglang"


@pytest.mark.parametrize(
    "page", sorted({README_PAGE, *ROOT.glob("*.md"), *GUIDES} - {ROOT / "CHANGELOG.md"}), ids=lambda page: page.name
)
def test_a_page_names_make_targets_that_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^ {4})make ([a-z-]+)", page.read_text(), re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_a_guide_s_run_files_are_valid_and_the_fields_it_names_exist(page: Path) -> None:
    text = page.read_text()
    for snippet in re.findall(r"```yaml\n(.*?)```", text, re.S):
        parse_config(
            {"workflow": "my:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": "m"}, **yaml.safe_load(snippet)}
        )
    for section, name in set(re.findall(r"`(inference|engine|trainer|sync|rollout)\.([a-z_]+)", text)):
        kind = RunConfig.model_fields[section].annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        keys = (f"trainer.{name}", f"trainer.{name}.PART", f"trainer.{name}.PART.PART")
        is_metric = section == "trainer" and any(entry.covers(key) for entry in METRICS_OF_THE_TRAINER for key in keys)
        assert name in kind.model_fields or is_metric, f"{section}.{name}"


@pytest.mark.usefixtures("starts_truly")
@pytest.mark.starts
def test_the_python_files_of_each_guide_run_as_they_stand(tmp_path: Path) -> None:
    folders: list[str] = []
    for page in GUIDES:
        folder = tmp_path / page.stem
        folder.mkdir()
        for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page.read_text(), re.S):
            (folder / name).write_text(text)
        folders += [str(folder)] if any(folder.glob("test_*.py")) else []
    assert len(folders) >= 7
    command = [sys.executable, "-m", "tests.support.folders", *folders]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.starts
def test_the_readme_s_dry_run_prints_the_plan() -> None:
    [arguments] = re.findall(r"agentrl (train \S+ --dry-run)", README)
    command = [str(Path(sys.executable).with_name("agentrl")), *arguments.split()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == (0 if (ROOT / "runs" / "demo" / "warm-start").is_dir() else 1), result.stderr
    assert "mean over tokens of" in result.stdout  # the loss, as a formula


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:agentrl|companions|envs|workflows|scripts|docs|tests|benchmarks|examples)/[\w./-]+?)/?`", page.read_text()
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_each_journey_to_read_has_at_most_eleven_files() -> None:
    journeys = (ROOT / "docs" / "concepts.md").read_text().partition("## Where to read")[2].split("\n**")[1:]
    assert len(journeys) >= 8
    assert [journey for journey in journeys if not 6 <= len(re.findall(r"^\d+\. `", journey, re.M)) <= 11] == []


def test_the_code_of_the_page_on_frameworks_is_that_of_its_examples() -> None:
    examples = "\n".join(path.read_text() for path in sorted(ROOT.glob("examples/frameworks/*.py")))
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "howto" / "frameworks.md").read_text(), re.S)
    parts = [part.strip("\n") for block in blocks for part in block.split("\n\n\n")]
    assert len(parts) >= 8
    assert [part for part in parts if part not in examples] == []


def test_the_versions_on_the_page_on_frameworks_are_the_pinned_ones() -> None:
    packages = {"pydantic-ai": "pydantic-ai-slim", "autogen": "autogen-agentchat", "llamaindex": "llama-index-core"}
    packages |= {"openai agents sdk": "openai-agents"}
    pins = "".join(path.read_text() for path in ROOT.glob("scripts/frameworks_*_requirements.txt"))
    page = (ROOT / "docs" / "howto" / "frameworks.md").read_text()
    rows = re.findall(r"^\| \[([^\]]+)\]\(#[\w-]+\) ([\d.]+) \|", page, re.M)
    assert len(rows) == 8
    assert [row for row in rows if f"\n{packages.get(row[0].lower(), row[0].lower())}=={row[1]}\n" not in pins] == []


def test_the_first_hour_takes_at_most_twelve_commands() -> None:
    script = (ROOT / "scripts" / "first_hour.sh").read_text()
    commands = re.findall(r"^(?:echo .*\| )?run (.+)$", script, re.M)
    assert 5 < len(commands) <= 12
    assert any("pip install" in command for command in commands)
    assert any(command.startswith("agentrl train run.yaml") for command in commands)
    assert any(command.startswith("agentrl view") for command in commands)
