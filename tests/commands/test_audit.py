"""`agentrl audit` proves a run from its files, and names each record that somebody changed."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.client import Client
from agentrl.commands.running import run_command
from agentrl.errors import ConfigError
from agentrl.types import ForkReason, Task
from agentrl.workflow import RolloutWorkflow
from agentrl_viewer.commands.audit import FORK_REASONS, audit_command
from agentrl_viewer.runs.proof import audit_run
from tests.engine.harness import TASKS, coin, make_engine, run
from tests.rollout.harness import make_renderer, make_server

Record = dict[str, Any]
Damage = Callable[[Path], str]
"""Changes a run, and returns the words by which the audit must name the change."""


class Twice(RolloutWorkflow):
    """Asks, asks again in the same conversation, and starts another one: three turns, one fork."""

    async def run(self, task: Task, client: Client) -> float:
        history: list[Any] = [{"role": "user", "content": task["question"]}]
        for _ in range(2):
            completion = await client.chat.completions.create(messages=history)
            history += [completion.choices[0].message, {"role": "user", "content": "Again."}]
        completion = await client.chat.completions.create(messages=[{"role": "user", "content": "Sum up."}])
        return float(completion.choices[0].message.content == task["answer"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, with an evaluation."""
    folder, renderer = tmp_path_factory.mktemp("run"), make_renderer(tmp_path_factory.mktemp("renderer"))
    options: Record = {"workflow": Twice(), "steps": 3, "algorithm": {"max_staleness": 0}}
    options |= {"eval_tasks": TASKS[:2], "engine": {"eval_every": 2, "eval_episodes": 2}}
    anyio.run(run, make_engine(folder, renderer, inference=make_server(renderer, coin), **options))
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def audited(path: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[int, str, str]:  # noqa: ANN401 - of it
    """Return exit status, output and errors of the command."""
    status = 0
    try:
        run_command(partial(audit_command, path, **options))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    printed = capsys.readouterr()
    return status, printed.out, " ".join(printed.err.split())


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def write(path: Path, records: list[Record]) -> None:
    path.write_bytes(gzip.compress(b"".join(json.dumps(record).encode() + b"\n" for record in records)))


def trained(path: Path) -> Iterator[str]:
    """Yield the episodes that the first step trained."""
    for line in read(path / "episodes" / "trained-000001.jsonl.gz")[1:]:
        yield line["episode_id"]


def change(path: Path, episode_id: str, edit: Callable[[Record], None]) -> None:
    """Change the record of one episode."""
    for file in (path / "episodes").glob("step-*.jsonl.gz"):
        records = read(file)
        for record in records:
            if record.get("episode_id") == episode_id:
                edit(record)
                write(file, records)


def change_metrics(path: Path, event: str, edit: Callable[[Record], None]) -> None:
    """Change the last line of one event."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    edit([line for line in lines if line["event"] == event][-1])
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def one_sampled_id(path: Path) -> str:
    def edit(record: Record) -> None:
        record["turns"][2]["output_ids"][0] += 1

    change(path, name := next(trained(path)), edit)
    return f"episode {name}, turn 2: its ids, log-probs or versions"


def one_id_of_a_request(path: Path) -> str:
    def edit(record: Record) -> None:
        record["turns"][1]["context_ids"][0] += 1

    change(path, name := next(trained(path)), edit)
    return f"episode {name}, turn 1: the recorded ids are not the request that was sent"


def one_logprob(path: Path) -> str:
    def edit(record: Record) -> None:
        record["turns"][1]["output_logprobs"][0] -= 1e-3

    change(path, name := next(trained(path)), edit)
    return f"episode {name}, turn 1: its ids, log-probs or versions"


def an_impossible_logprob(path: Path) -> str:
    def edit(record: Record) -> None:
        record["turns"][0]["output_logprobs"][0] = 2.0

    change(path, name := next(trained(path)), edit)
    return f"episode {name}, turn 0: log-probs must be finite and at most 0"


def version_changed(path: Path, version: int) -> tuple[str, int]:
    """Give the last turn of an episode another version; return the episode and the end of the turn's span."""
    name, ends = next(trained(path)), list[int]()

    def edit(record: Record) -> None:
        [span] = record["turns"][2]["spans"]
        ends.append(span[1])
        span[2] = version

    change(path, name, edit)
    return name, ends[0]


def a_version_that_never_was(path: Path) -> str:
    name, count = version_changed(path, 99)
    return f"episode {name}, turn 2: tokens 0 to {count}: version 99 sampled them, but the run never published it"


def a_version_after_the_step(path: Path) -> str:
    name, count = version_changed(path, 3)
    return f"episode {name}, turn 2: tokens 0 to {count}: version 3 sampled them, but step 1 trained them at version 1"


def a_digest_of_a_server(path: Path) -> str:
    def edit(line: Record) -> None:
        line["server_digests"] = dict.fromkeys(line["server_digests"], "agentrl:00")

    change_metrics(path, "published", edit)
    return "version 4: scripted://0 held weights of digest agentrl:00, the trainer published agentrl:"


def no_publication_of_a_version(path: Path) -> str:
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    gone = [line for line in lines if '"event":"published"' in line and '"version":2,' in line]
    (path / "metrics.jsonl").write_text("".join(line for line in lines if line not in gone))
    return "but metrics.jsonl has no line of its publication"


def an_episode_trained_twice_in_a_step(path: Path) -> str:
    file = path / "episodes" / "trained-000001.jsonl.gz"
    records = read(file)
    write(file, [*records, records[1]])
    return f"episode {records[1]['episode_id']}: step 1 trained its turns, 0 to 2, twice"


def an_episode_trained_by_two_steps(path: Path) -> str:
    file = path / "episodes" / "trained-000002.jsonl.gz"
    first = read(path / "episodes" / "trained-000001.jsonl.gz")[1]
    write(file, [*read(file), {**first, "step": 2}])
    return f"episode {first['episode_id']}: step 2 trained its turns, 0 to 2, again; by metrics.jsonl step 1 trained"


def a_turn_that_was_left_out(path: Path) -> str:
    def edit(record: Record) -> None:
        record["turns"][1]["left_out"] = True

    change(path, name := next(trained(path)), edit)
    return f"episode {name}, turn 1: the run file left it out of training, and it was trained"


def an_episode_out_of_a_step(path: Path) -> str:
    file = path / "episodes" / "trained-000001.jsonl.gz"
    name = next(trained(path))
    write(file, [record for record in read(file) if record.get("episode_id") != name])
    return f"step 1 trained 6 episodes by metrics.jsonl, and its record has 5; episodes of its groups without a line: {name}"


def an_episode_out_of_the_index(path: Path) -> str:
    name = next(trained(path))
    index = path / "episodes" / "index.jsonl"
    lines = index.read_text().splitlines(keepends=True)
    index.write_text("".join(line for line in lines if f'"episode_id":"{name}"' not in line))
    return f"episode {name}: step 1 trained it, but the run has no record of it"


def a_record_cut_in_its_middle(path: Path) -> str:
    file = path / "episodes" / "step-000001.jsonl.gz"
    lines = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
    name = json.loads(lines[1])["episode_id"]
    lines[1] = lines[1][:200] + b"\n"
    file.write_bytes(gzip.compress(b"".join(lines)))
    return f"episode {name}: line 1 of episodes/step-000001.jsonl is no record of it"


def a_file_cut_at_its_end(path: Path) -> str:
    file = path / "episodes" / "step-000001.jsonl.gz"
    name = read(file)[-1]["episode_id"]
    file.write_bytes(file.read_bytes()[:-200])
    return (
        f"episode {name}: line {len(read_index_lines(path, 1))} of episodes/step-000001.jsonl, its record, is missing or cut"
    )


def read_index_lines(path: Path, step: int) -> list[Record]:
    lines = [json.loads(line) for line in (path / "episodes" / "index.jsonl").read_text().splitlines()[1:]]
    return [line for line in lines if line["file"] == f"step-{step:06d}"]


def a_fork_without_a_reason(path: Path) -> str:
    def edit(record: Record) -> None:
        record["turns"][2]["fork"] = None

    change(path, name := next(trained(path)), edit)
    return f"episode {name}, turn 2: it begins a conversation after 2 turns, and no reason of this fork is recorded"


def another_reward(path: Path) -> str:
    def edit(record: Record) -> None:
        record["final_reward"] += 1.0

    change(path, name := next(trained(path)), edit)
    return f"episode {name}: episode_return is"


def what_a_step_trained(path: Path) -> str:
    (path / "episodes" / "trained-000002.jsonl.gz").unlink()
    return "step 2: episodes/trained-000002.jsonl.gz, what it trained, is missing"


DAMAGES: list[Damage] = [
    one_sampled_id,
    one_id_of_a_request,
    one_logprob,
    an_impossible_logprob,
    a_version_that_never_was,
    a_version_after_the_step,
    a_digest_of_a_server,
    no_publication_of_a_version,
    an_episode_trained_twice_in_a_step,
    an_episode_trained_by_two_steps,
    a_turn_that_was_left_out,
    an_episode_out_of_a_step,
    an_episode_out_of_the_index,
    a_record_cut_in_its_middle,
    a_file_cut_at_its_end,
    a_fork_without_a_reason,
    another_reward,
    what_a_step_trained,
]


def test_a_whole_run_is_proved(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, errors = audited(whole, capsys)
    assert (status, errors) == (0, "")
    lines = [line.split(maxsplit=2) for line in out.splitlines()]
    assert ["ids", "sent", "turns of trained episodes: 54 equal"] in lines
    assert ["ids", "trained", "turns of trained episodes: 54 equal"] in lines
    assert "new_conversation" in out
    audit = audit_run(whole)
    assert sum(version.trained_tokens for version in audit.versions.values()) == audit.trained_tokens > 0
    assert [*audit.versions] == [1, 2, 3, 4]
    assert all(version.trainer_digest in version.server_digests.values() for version in audit.versions.values())


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_change_is_found_and_named(damage: Damage, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = damage(copy)
    status, _, errors = audited(copy, capsys, all=True)
    assert status == 1
    assert words in errors


def test_a_page_shows_each_turn_of_an_episode(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(trained(whole))
    status, out, errors = audited(whole, capsys, episode=name)
    assert (status, errors) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert out.startswith(f"episode {name}: 3 turns, trained by step 1")
    assert [row[0] for row in rows if row[-2:] == ["equal", "equal"]] == ["0", "1", "2"]
    assert rows[4][:6] == ["1", "in", "process", "turn", "0", "–"]
    assert rows[5][:5] == ["2", "in", "process", "–", "new_conversation"]
    assert "new_conversation  the request continues no recorded turn" in out


def test_the_program_that_asked_is_named_and_forks_are_counted_for_each(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def by_claude(record: Record) -> None:
        for turn in record["turns"]:
            turn |= {"client": "claude-cli/2.1", "dialect": "messages"}
        record["turns"][2]["role"] = "subagent"

    change(copy, name := next(trained(copy)), by_claude)
    status, out, _ = audited(copy, capsys)
    assert status == 0
    assert "asked by       claude-cli/2.1, messages: 3 turns, forks: 1 new_conversation" in out
    status, out, _ = audited(copy, capsys, episode=name)
    assert status == 0
    assert "2     claude-cli/2.1, messages, as subagent" in out
    assert set(FORK_REASONS) == set(ForkReason)


def test_a_page_names_what_does_not_hold_in_its_episode_alone(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, other = one_sampled_id(copy), [*trained(copy)][1]
    status, out, errors = audited(copy, capsys, episode=next(trained(copy)))
    assert (status, words in errors) == (1, True)
    assert "differs" in out
    assert audited(copy, capsys, episode=other)[0] == 0


def test_a_run_of_an_older_release_has_what_it_recorded(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (copy / "episodes").glob("trained-*.jsonl.gz"):
        records = read(file)
        for turn in (turn for record in records[1:] for turn in record["turns"]):
            del turn["sent"], turn["trained"]
        write(file, records)
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(line for line in lines if '"event":"publish' not in line))
    status, out, errors = audited(copy, capsys)
    assert (status, errors) == (0, "")
    assert "54 not recorded" in out
    assert audit_run(copy).versions[1].trainer_digest is None


def test_what_keep_episode_steps_deleted_is_counted(copy: Path) -> None:
    fields = {"name": "x", "workflow": "a:A", "tasks": {"path": "t.jsonl"}, "model": {"path": "m"}}
    (copy / "config.yaml").write_text(json.dumps({**fields, "engine": {"keep_episode_steps": 2}}))
    for name in ("step-000001.jsonl.gz", "trained-000001.jsonl.gz"):
        (copy / "episodes" / name).unlink()
    audit = audit_run(copy)
    assert audit.findings == []
    assert audit.pruned == len(read_index_lines(copy, 1))


def test_what_cannot_be_audited_is_refused(tmp_path: Path, whole: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"stores no episodes.*engine\.save_trajectories"):
        audit_run(tmp_path)
    with pytest.raises(ConfigError, match=r"has no episode '9\.9\.9'"):
        audit_run(whole, episode_id="9.9.9")


@pytest.mark.starts
def test_an_audit_loads_no_torch(whole: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from agentrl_viewer.commands.audit import audit_command\n"
        "audit_command(Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(whole)], check=True, timeout=300, capture_output=True)
