"""A run directory with many episodes in the documented format, written without a model: for the viewer and its benchmark."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import yaml
from tokenizers import Tokenizer

from agentrl.episode.summary import EPISODES_HEADER, INDEX_HEADER, TRAINED_HEADER
from agentrl.observe.episode_files import step_file, trained_file
from tests.support.tiny import build_tokenizer

EPISODES_A_STEP = 64
GROUP_SIZE = 8
STEP_S = 4.0
FORKS = ("history_edited", "new_conversation")
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>@SCRIPT@"
FAILURE = {"kind": "WorkflowError", "message": f"broken {HOSTILE}", "traceback": "Traceback: ..."}
SENTENCE = "the sum of three and seven is ten so my answer stands unless the tool disagrees"

Record = dict[str, Any]
Encode = Callable[[str], list[int]]


def write_run(
    path: Path, *, steps: int = 12, with_records: bool = True, seed: int = 0, fields: Mapping[str, Any] | None = None
) -> Path:
    """Write a run of `steps` steps with an evaluation after every fourth; return its directory.

    Args:
        path: a directory that does not exist.
        steps: each has 64 episodes, in groups of eight.
        with_records: write the episodes themselves too, not only their index.
        seed: the same seed writes the same run.
        fields: of the run file, beside those that it must have.
    """
    draw = random.Random(seed)
    (path / "episodes").mkdir(parents=True)
    model = {"path": str(path / "model")}
    run_file = {"name": path.name, "workflow": "agent:Agent", "tasks": {"path": "tasks.jsonl"}, "model": model}
    (path / "config.yaml").write_text(yaml.safe_dump({**run_file, **(fields or {})}))
    build_tokenizer(path / "model")
    encode = ids_of(path / "model" / "tokenizer.json") if with_records else rough_ids
    index: list[Record] = []
    for step in range(1, steps + 1):
        records = [episode(draw, encode, step, number) for number in range(EPISODES_A_STEP)]
        if step % 4 == 0:
            records += [episode(draw, encode, step, number, purpose="evaluation") for number in range(16)]
        for line, record in enumerate(records, 1):
            index.append(summary(record, f"step-{step:06d}", line))
        if with_records:
            write_step(path / "episodes", step, records, is_open=step == steps)
    lines(path / "episodes" / "index.jsonl", [INDEX_HEADER, *index])
    lines(path / "metrics.jsonl", [event for step in range(1, steps + 1) for event in events(draw, step)])
    lines(path / "timeline.jsonl", [span for step in range(1, steps + 1) for span in spans(draw, step)])
    return path


def ids_of(file: Path) -> Encode:
    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: tokenizer.encode(text).ids


def rough_ids(text: str) -> list[int]:
    """Return as many ids as the text may have, for an index without records."""
    return [0] * (len(text) // 3)


def write_step(folder: Path, step: int, records: Sequence[Record], *, is_open: bool) -> None:
    lines(step_file(folder, step), [EPISODES_HEADER, *records], is_packed=not is_open)
    done = [record for record in records if record["purpose"] == "training" and record["failure"] is None]
    trained = [trained_line(record, step) for record in done]
    lines(trained_file(folder, step).with_suffix(""), [TRAINED_HEADER, *trained], is_packed=True)


def lines(path: Path, records: Sequence[Record], *, is_packed: bool = False) -> None:
    text = b"".join(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in records)
    if is_packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(text, 1))
    else:
        path.write_bytes(text)


def episode(draw: random.Random, encode: Encode, step: int, number: int, *, purpose: str = "training") -> Record:
    group = (step - 1) * (EPISODES_A_STEP // GROUP_SIZE) + number // GROUP_SIZE if purpose == "training" else None
    episode_id = f"{group}.{number % GROUP_SIZE}.0" if group is not None else f"eval.{step}.{number}"
    has_failed = draw.random() < 0.03
    reward = 0.0 if draw.random() > 0.3 + 0.5 * min(step / 40, 1) else 1.0
    turns = [turn(draw, encode, step, at, number) for at in range(draw.randint(1, 5))]
    started = STEP_S * (step - 1) + draw.uniform(0, STEP_S * 0.5)
    return {
        "purpose": purpose,
        "group": group,
        "policy_version": step,
        "episode_id": episode_id,
        "task_id": f"train-{group}" if group is not None else f"held-out-{number}",
        "stop_reason": "workflow_error" if has_failed else "completed",
        "final_reward": None if has_failed else reward,
        "episode_return": None if has_failed else reward,
        "failure": FAILURE if has_failed else None,
        "metrics": {"correct": reward},
        "task": {"question": f"What is {number} + {step}? {HOSTILE}", "answer": number + step},
        "step": step,
        "started_s": started,
        "ended_s": started + draw.uniform(0.5, STEP_S),
        "success": None if has_failed else reward > 0,
        "turns": turns,
    }


def turn(draw: random.Random, encode: Encode, step: int, at: int, number: int) -> Record:
    words = " ".join(draw.choices(SENTENCE.split(), k=draw.randint(6, 30)))
    text = f"{words} {HOSTILE}" if number == 0 else words
    context, output = encode(f"question {at} " + words), encode(text)
    is_fork = at >= 2 and draw.random() < 0.3
    call = {"id": f"c{at}", "type": "function", "function": {"name": "add", "arguments": '{"a": 3, "b": 7}'}}
    question = {"role": "user", "content": f"What is {number} + {step}?"}
    result = {"role": "tool", "tool_call_id": f"c{at - 1}", "content": f"10\n{words}"}
    middle = len(output) // 2
    return {
        "player": "",
        "role": "solver" if at == 0 else "checker",
        "sent_after": at,
        "parent": None if at == 0 else at - 2 if is_fork else at - 1,
        "fork": draw.choice(FORKS) if is_fork else None,
        "kept_thinking": False,
        "stop_reason": "stop",
        "reward": None,
        "temperature": 1.0,
        "messages": [{"role": "system", "content": "You add numbers."}, question] if at == 0 else [result],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}] if at == 0 else None,
        "message": {"role": "assistant", "content": text, "tool_calls": [call]},
        "context_ids": context,
        "output_ids": output,
        "output_logprobs": [-draw.expovariate(2.0) for _ in output],
        "spans": [[0, middle, max(step - 1, 1)], [middle, len(output), step]],
        "started_s": STEP_S * (step - 1) + at * 0.1,
        "ended_s": STEP_S * (step - 1) + at * 0.1 + 0.08,
    }


def trained_line(record: Record, step: int) -> Record:
    advantage = record["episode_return"] - 0.5
    recomputed = [[value + 1e-4 * at for at, value in enumerate(turn["output_logprobs"])] for turn in record["turns"]]
    turns = [{"advantage": advantage, "proximal_logprobs": values} for values in recomputed]
    return {"episode_id": record["episode_id"], "step": step, "policy_version": step + 1, "turns": turns}


def summary(record: Record, file: str, line: int) -> Record:
    turns = record["turns"]
    parents = {turn["parent"] for turn in turns}
    names = ("episode_id", "task_id", "purpose", "group", "step", "policy_version", "started_s", "ended_s", "episode_return")
    forks = [turn["fork"] for turn in turns if turn["fork"]]
    versions = [span[2] for turn in turns for span in turn["spans"]]
    return {
        **{name: record[name] for name in names},
        "final_reward": record["final_reward"],
        "success": record["success"],
        "turns": len(turns),
        "output_tokens": sum(len(turn["output_ids"]) for turn in turns),
        "context_tokens": sum(len(turn["context_ids"]) for turn in turns),
        "branches": sum(index not in parents for index in range(len(turns))),
        "forks": {reason: forks.count(reason) for reason in sorted(set(forks))},
        "stop_reason": record["stop_reason"],
        "failure": record["failure"] and record["failure"]["kind"],
        "players": [],
        "min_version": min(versions),
        "max_version": max(versions),
        "file": file,
        "line": line,
        "prompt": turns[0]["messages"][1]["content"],
    }


def events(draw: random.Random, step: int) -> list[Record]:
    rate = 0.3 + 0.5 * min(step / 40, 1) + draw.uniform(-0.05, 0.05)
    common = {"wall_s": STEP_S * step, "policy_version": step + 1, "step": step, "success_rate": rate, "return_mean": rate}
    numbers = {
        **{
            "episodes": EPISODES_A_STEP,
            "return_std": 0.4,
            "turns_mean": 3.0,
            "output_tokens_mean": 300.0,
            "signal_share": 0.8,
        },
        **{"staleness_mean": 1.4, "staleness_p50": 1.0, "staleness_p99": 2.0, "staleness_max": 2.0},
        **{"tokens_per_s": draw.uniform(2000, 3000), "trainer_wait_s": draw.uniform(0, 1), "rollout_wait_s": 0.2},
        **{"loop_blocked_s": 0.0, "train_s": draw.uniform(1, 2), "publish_s": 0.05, "update_s": 0.1, "pause_s": 0.04},
        **{"trainer.loss": draw.uniform(-0.02, 0.02), "trainer.grad_norm": draw.uniform(0.2, 1), "trainer.entropy": 1.2},
        **{"trainer.kl_behavior_proximal_k3": draw.uniform(0, 0.001), "trainer.max_logprob_difference": 3e-6},
        **{"probe_difference": 2e-6, "workflow.correct": rate},
    }
    found: list[Record] = [{"event": "step", **common, **numbers, "trained_groups": groups_of(step)}]
    return found + ([{"event": "evaluation", **common, "episodes": 16}] if step % 4 == 0 else [])


def groups_of(step: int) -> list[int]:
    groups = EPISODES_A_STEP // GROUP_SIZE
    return list(range((step - 1) * groups, step * groups))


def spans(draw: random.Random, step: int) -> list[Record]:
    start = STEP_S * (step - 1)
    waited = draw.uniform(0.2, 1.5)
    trained = waited + draw.uniform(1, 2)
    parts = [
        ("trainer", "wait_for_batch", 0.0, waited),
        ("trainer", "train", waited, trained),
        ("trainer", "publish", trained, trained + 0.1),
        ("servers", "pause", trained + 0.1, trained + 0.3),
        ("servers", "update", trained + 0.12, trained + 0.28),
        ("dispatcher", "wait_for_bound", 0.5, 0.5 + waited / 2),
        ("dispatcher", "wait_for_slot", 2.0, 2.4),
    ]
    if step % 4 == 0:
        parts.append(("evaluation", "evaluate", 0.0, 3.0))
    return [
        {"actor": actor, "activity": activity, "start_s": start + low, "end_s": start + high, "step": step}
        for actor, activity, low, high in parts
    ]
