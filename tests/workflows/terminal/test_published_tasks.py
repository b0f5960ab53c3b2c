"""The benchmark of published task folders tells what is malformed from what is refused, and says why a task is not paid."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.commands.validate import Finding, FindingKind
from benchmarks.published_tasks import Folder, classify, counts_of, outcome
from tests.support.harbor import TOML, write_task

STEPS = f'{TOML}[[steps]]\nname = "one"\n[[steps]]\nname = "two"\ndependencies = ["one"]\ninherit_prior_session = true\n'


def folder_of(place: Path, form: str) -> Path:
    """Write a task folder of one of the forms that were met in public sets."""
    tomls = {"key": TOML.replace('"work"', '"${SOME_KEY}"'), "nodes": f'{TOML}type = "cloud"\n', "steps": STEPS}
    tomls["nodes"] = TOML.replace("storage_mb = 512", 'type = "cloud"')
    tomls["types"] = TOML.replace("timeout_sec = 120.0", 'timeout_sec = "soon"')
    dockerfiles = {
        "network": "FROM a\nRUN apt-get update && apt-get install -y jq\nCOPY a.txt /srv/\n",
        "user": "FROM a\nUSER worker\n",
        "stages": "FROM gcc:1 AS made\nRUN cc -o x x.c\nFROM a\nCOPY --from=made /x /x\n",
        "script": "FROM a\nRUN cat > run.py << 'END'\nimport sys\nEND\n",
        "lost": "FROM a\nCOPY secret.pyc /srv/\n",
    }
    write_task(place, tomls.get(form, TOML), dockerfiles.get(form, "FROM a\nCOPY a.txt /srv/\n"))
    if form == "compose":
        (place / "environment" / "docker-compose.yml").write_text("services: {}\n")
    if form == "no tests":
        (place / "tests" / "test.sh").rename(place / "tests" / "test_it.py")
    if form == "no solution":
        (place / "solution" / "solve.sh").unlink()
    if form == "no image":
        (place / "environment" / "Dockerfile").unlink()
    for name in ("one", "two") if form == "steps" else ():
        (place / "steps" / name).mkdir(parents=True)
        (place / "steps" / name / "instruction.md").write_text("Go on.\n")
    return place


@pytest.mark.parametrize(
    ("form", "kind", "why", "engine"),
    [
        ("plain", "loads", "", True),
        ("steps", "loads", "", True),
        ("network", "loads", "", True),
        ("user", "refused", "another user than root", True),
        ("stages", "refused", "stages of other images", True),
        ("key", "refused", "variables of the user's machine", False),
        ("nodes", "refused", "a field that Harbor's format does not have", False),
        ("types", "malformed", "task.toml cannot be read", False),
        ("script", "malformed", "a line of the Dockerfile is no instruction", False),
        ("lost", "malformed", "COPY of a file that is not there", False),
        ("no tests", "malformed", "no tests", False),
        ("no image", "malformed", "no Dockerfile and no image", False),
        ("compose", "compose", "", False),
    ],
)
def test_each_form_of_a_published_folder_is_counted_as_what_it_is(
    tmp_path: Path, form: str, kind: str, why: str, engine: bool
) -> None:
    found = classify(folder_of(tmp_path / "task", form))
    assert (found.kind, found.why, found.engine) == (kind, why, engine)
    assert found.packages == (kind == "loads")
    assert found.alone == (kind == "loads" and form != "network")


def test_counts_are_of_well_formed_folders_and_the_others_stand_beside_them(tmp_path: Path) -> None:
    forms = ("plain", "network", "no solution", "user", "lost", "compose")
    counts = counts_of([classify(folder_of(tmp_path / form, form)) for form in forms])
    assert (counts["folders"], counts["compose"], counts["well_formed"]) == (6, 1, 4)
    assert (counts["engine"], counts["packages"], counts["alone"], counts["with_solution"]) == (4, 3, 2, 2)
    assert counts["malformed"] == {"COPY of a file that is not there": 1}
    assert counts["refused"] == {"another user than root": 1}


def test_an_outcome_names_what_was_missing_and_none_of_the_words_of_the_task() -> None:
    folder, where = Folder(Path("/set/a"), "loads", is_solved=True), "train task /set/a"
    said = "return 0, completed; expected 1; the tests say: a secret text, line 3: jq: command not found"
    found = [Finding(FindingKind.REFERENCE, where, said), Finding(FindingKind.REFERENCE, "train task /set/b", "x")]
    assert outcome(folder, found) == {
        "folder": "/set/a",
        "oracle": "not paid: the container has no program: jq",
        "empty": "not paid",
    }
    paid = outcome(folder, [Finding(FindingKind.EMPTY, where, "return 1")])
    assert (paid["oracle"], paid["empty"]) == ("paid", "PAID")
    fault = outcome(folder._replace(is_solved=False), [Finding(FindingKind.FAILED, where, "with an empty reply, x: y")])
    assert (fault["oracle"], fault["empty"]) == ("none", "fault: another reason")
