"""Write `docs/reference/run-directory.md` from the docstrings of what is recorded of episodes.

    python -m scripts.run_directory_reference

Invariant: the tables hold every field of the files of episodes and of the timeline, and nothing else; a test compares the
page.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from pathlib import Path

from agentrl.episode.codec import RECORDED_EPISODE, RECORDED_TURN
from agentrl.episode.summary import EndedEpisode, EpisodeSummary, TrainedEpisode, TrainedTurn
from agentrl.episode.trajectory import EpisodeFailure, Trajectory, Turn
from agentrl.observe.timeline import Activity

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "run-directory.md"
_HEAD = """\
# Run directory

`agentrl train` writes everything about a run into `runs/NAME/`. `agentrl.open_run("runs/NAME")` reads it, also while
the run writes it:

    run = agentrl.open_run("runs/demo")
    run.metrics("step")                        # the lines of metrics.jsonl
    run.episodes(step=7).worst(3)              # rows of the index; also best, failed, forked, of_group
    run.episodes().to_pandas()                 # or to_polars
    run.episode("12.0.0").show(tokens=True)    # one episode in the terminal; a notebook shows it as HTML
    run.plot().savefig("curve.png")            # needs agentrl[plot]
    for episode in run.read_episodes(purpose="evaluation"):
        print(episode.trajectory.messages())

| file | content |
|---|---|
| `config.yaml` | the run file with all defaults; `agentrl train` reads the same run from it |
| `plan.txt` | what `--dry-run` prints |
| `left_out_tasks.jsonl` | the tasks that `unreadable: skip` left out, each with its source and the reason |
| `online/` | conversations of [an online run](../howto/online.md) that no checkpoint holds yet |
| `metrics.jsonl` | one line for each step, evaluation, failure and checkpoint: [Metrics](metrics.md) |
| `timeline.jsonl` | who worked and who waited |
| `episodes/index.jsonl` | one line for each finished attempt; nothing is ever taken out |
| `episodes/step-NNNNNN.jsonl` | full records of the episodes that ended while that step was the next to complete |
| `episodes/trained-NNNNNN.jsonl.gz` | what that step trained of each episode of its batch |
| `checkpoints/`, `weights/` | checkpoints of the trainer, and published weights; the newest of each |
| `logs/` | what servers and trainer print |
| `tracked.jsonl`, `tensorboard/`, `wandb/` | what [trackers](../howto/trackers.md) wrote, where `track` names them |
| `wandb-id.txt`, `mlflow-id.txt` | by which a resumed run finds its curves there |
| `splits.json` | the GPUs of trainer and servers at each start, where `cluster.split` divides them |
| `summary.json` | how the run ended, written at its end |

The file of a step is plain while the step is open; when the step has ended, the run compresses it to
`step-NNNNNN.jsonl.gz`. The first line of each file in `episodes/` is a header with its format and version, such as
`{"format": "agentrl.episodes", "version": 1}`. With `engine.keep_episode_steps: N`, the run deletes the files of steps
older than the last N; where one holds evaluations, their records stay, and the lines of the others become empty. With
`engine.save_trajectories: false` there is no `episodes/`.

A checkpoint `checkpoints/step-NNNNNN/` is a Hugging Face model, and appears when all of it is on the disk, while training
continues. A trainer of several processes writes `model-00001-of-00002.safetensors` and so on.

| file of a checkpoint | content |
|---|---|
| `model.safetensors` | the weights; `model.safetensors.index.json` beside several files says which holds what |
| `optimizer.state` | optimizer and random states, in safetensors format; one file for each process |
| `shards.json` | which file holds which part of which tensor |
| `trainer.json` | counters, the state of the run, and the digest of every file above |
| `config.json`, `tokenizer.json`, ... | copies of those of the model |

The directory is its owner's alone (mode 0700), and so is one that `engine.publish_dir` names and that is not there yet.
`chmod -R a+rX runs/NAME` shares a run, also what it writes later: a directory that is there keeps its mode.

A resumed run goes back to a checkpoint and appends a line with `"event": "resumed"` to the index. `agentrl.open_run`
leaves out the episodes before it that run again. Times are seconds on the run's clock, which continues over a resume.

`python -m scripts.run_directory_reference` makes this page from the code.
"""
_DERIVED = {
    "episode_return": "Sum of all rewards, undiscounted; null for a failed episode.",
    "success": "Whether it succeeded, by `agentrl.episode.summary.is_success`; null for a failed episode.",
}


def page() -> str:
    """Return the page as Markdown."""
    place = {name: text for name, text in _described(EndedEpisode).items() if name not in ("trajectory", "run_begin_s")}
    turn, trajectory = _described(Turn), _described(Trajectory)
    record = dict(place)
    for name in RECORDED_EPISODE:
        record[name] = trajectory[name]
        if name == "advantage":
            record |= _DERIVED
    tables = {
        "A line of episodes/index.jsonl": _described(EpisodeSummary),
        "A line of episodes/step-NNNNNN.jsonl": record,
        "One of its turns": {name: turn[name] for name in RECORDED_TURN},
        "Its failure": _described(EpisodeFailure),
        "A line of episodes/trained-NNNNNN.jsonl.gz": _described(TrainedEpisode),
        "One of its turns that was trained": _described(TrainedTurn),
        "A line of timeline.jsonl": _described(Activity),
    }
    return "\n".join([_HEAD, *(f"## {title}\n\n{_table(rows)}" for title, rows in tables.items())])


def _table(meanings: Mapping[str, str]) -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in meanings.items()]
    return "\n".join(["| field | meaning |", "|---|---|", *rows, ""])


def _described(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a record."""
    [definition] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            described = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            text = str(below.value.value) if described else ""
            found[field.target.id] = " ".join(text.split()).replace("|", "\\|")
    return found


if __name__ == "__main__":
    PAGE.write_text(page())
