"""The tasks of tau2, from the files of the package `inspect-evals`, which is read and not imported.

Invariant: a task has all that its grading needs, as the package has it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from agentrl.errors import ConfigError
from agentrl.support.exact_json import decode_exact_json
from agentrl.types import Task
from agentrl_envs.data_packages import INSPECT_EVALS

DATA: Final = "inspect_evals/tau2/data/domains"


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Where the package has the files of a domain, and what its names are."""

    folder: str
    tasks: str
    policy: Sequence[str]
    """Texts that make the system message."""
    prefix: str = ""
    """What stands before the names of actions in the names of tools."""
    basis: Sequence[str] = ()
    """Parts that are graded where a task names none."""
    has_splits: bool = True


DOMAINS: Final[Mapping[str, Domain]] = {
    "retail": Domain(folder="retail", tasks="tasks.json", policy=["policy.txt"], basis=["DB", "COMMUNICATE"]),
    "airline": Domain(folder="airline", tasks="tasks.json", policy=["policy.txt"], basis=["DB", "COMMUNICATE"]),
    "telecom": Domain(
        folder="telecom", tasks="tasks.json.gz", policy=["main_policy_solo.txt", "tech_support_workflow_solo.txt"]
    ),
    "banking": Domain(
        folder="banking_knowledge",
        tasks="tasks.json",
        policy=["prompts/components/policy_header.md", "prompts/components/additional_instructions.md"],
        prefix="banking_",
        has_splits=False,
    ),
}


def tau2_tasks(domain: str, *, split: str = "base", wheel: str | None = None, limit: int | None = None) -> list[Task]:
    """Return the tasks of a domain of tau2: `retail`, `airline`, `telecom` or `banking`.

    Each has `domain`, `question` (what the customer wants and knows), `criteria`, `initial_state`, and `reference`: a call
    for each reference action, and a text with what must be said.

    Args:
        domain: see above.
        split: `base`, all tasks of the leaderboard; `train` or `test`, which share none; telecom has `small` and `full`,
            too. Banking has `base` alone.
        wheel: a wheel of inspect-evals; None reads the installed package, which playing needs.
        limit: number of tasks, from the first; None: all.

    Raises:
        ConfigError: there is no such domain or split, or the package is not there.
    """
    found = DOMAINS.get(domain)
    if found is None:
        raise ConfigError(f"tau2_tasks: there is no domain {domain!r}; there is {', '.join(DOMAINS)}")
    rows = cast("list[dict[str, Any]]", _json(f"{DATA}/{found.folder}/{found.tasks}", wheel))
    splits = {"base": [row["id"] for row in rows]}
    if found.has_splits:
        splits = cast("dict[str, list[str]]", _json(f"{DATA}/{found.folder}/split_tasks.json", wheel))
    if split not in splits:
        raise ConfigError(f"tau2_tasks: {domain} has no split {split!r}; there is {', '.join(splits)}")
    chosen = set(splits[split])
    return [_task(domain, found, row) for row in rows if row["id"] in chosen][:limit]


def _json(path: str, wheel: str | None) -> object:
    content = INSPECT_EVALS.read(path, wheel)
    return decode_exact_json(gzip.decompress(content) if path.endswith(".gz") else content)


def _task(name: str, domain: Domain, row: Mapping[str, Any]) -> Task:
    given = cast("Mapping[str, Any]", row["evaluation_criteria"])
    actions = cast("Sequence[Mapping[str, Any]]", given.get("actions") or [])
    criteria = {
        "actions": actions,
        "env_assertions": given.get("env_assertions") or [],
        "communicate_info": given.get("communicate_info") or [],
        "reward_basis": given.get("reward_basis") or domain.basis,
    }
    calls = [{"name": domain.prefix + each["name"], "arguments": each["arguments"]} for each in actions]
    said = " ".join(["Done.", *cast("Sequence[str]", criteria["communicate_info"])])
    data = {
        "domain": name,
        "question": str(row.get("ticket") or _scenario(row["user_scenario"]["instructions"])),
        "criteria": criteria,
        "initial_state": row.get("initial_state"),
        "reference": [*(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls), said],
    }
    return Task(id=f"{name}-{row['id']}", data=data)


def _scenario(instructions: str | Mapping[str, str | None]) -> str:
    """Return what the customer wants and knows as one text."""
    if isinstance(instructions, str):
        return instructions
    fields = ("reason_for_call", "known_info", "unknown_info", "task_instructions")
    return "\n\n".join(text.strip() for name in fields if (text := instructions.get(name)))
