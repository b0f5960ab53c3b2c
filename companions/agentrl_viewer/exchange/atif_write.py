"""An episode as an ATIF document.

The document is the conversation of the last turn. Other branches are embedded, and steps that an earlier one has as well are
marked as copied context, so that every sampled token is there once. The metrics of a turn's step have the sampled ids and
log-probs, and `extra.agentrl` has the rest of the turn: the ids that the call added to its context, and policy versions.

Invariant: `agentrl_viewer.exchange.atif_read.read_atif` returns the record that was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final, TypeAlias

import msgspec

from agentrl_viewer.exchange.atif_format import (
    OURS,
    WRITTEN_VERSION,
    AtifAgent,
    AtifFinalMetrics,
    AtifMetrics,
    AtifStep,
    AtifTrajectory,
    Extra,
)
from agentrl_viewer.exchange.atif_messages import add_message, step_of

Record: TypeAlias = Mapping[str, Any]
"""The JSON of a line of `episodes/step-NNNNNN.jsonl`."""
OWN_FIELDS: Final = frozenset({"messages", "message", "output_ids", "output_logprobs", "tools"})
"""The fields of a turn that the format has a place for."""


def atif_document(record: Record, *, agent: str, model: str | None, run: str) -> bytes:
    """Return the JSON of the document of an episode.

    Args:
        record: the episode.
        agent: the name of its workflow.
        model: the name of its model; None where it is not known.
        run: the name of its run.
    """
    turns: Sequence[Record] = record["turns"]
    parents = {turn["parent"] for turn in turns}
    leaves = [index for index in range(len(turns)) if index not in parents]
    by = AtifAgent(name=agent, version=version("agentrl"), model_name=model)
    written: set[int] = set()
    documents = [_branch(record, by, leaf, written) for leaf in (*leaves[-1:], *leaves[:-1])]
    document = documents[0] if documents else _without_turns(record, by)
    document.subagent_trajectories = documents[1:] or None
    document.extra = {OURS: {"run": run, **{name: value for name, value in record.items() if name != "turns"}}}
    document.final_metrics = _final_metrics(record, turns, len(document.steps))
    return msgspec.json.encode(document)


def _branch(record: Record, agent: AtifAgent, leaf: int, written: set[int]) -> AtifTrajectory:
    """Return the conversation that ends with a turn; `written` are the turns of the documents before, and after."""
    turns: Sequence[Record] = record["turns"]
    path: list[int] = []
    at: int | None = leaf
    while at is not None:
        path.insert(0, at)
        at = turns[at]["parent"]
    steps: list[AtifStep] = []
    prompt_tokens = 0
    for index in path:
        turn, is_copied = turns[index], index in written
        first = len(steps)
        for message in turn["messages"]:
            add_message(steps, message)
        prompt_tokens += len(turn["context_ids"])
        steps.append(_answer_step(index, turn, len(steps) + 1, prompt_tokens))
        prompt_tokens += len(turn["output_ids"])
        if is_copied:
            _mark_copied(steps[first:], index)
    is_main = leaf == len(turns) - 1
    document = _document(record, agent, steps)
    document.agent.tool_definitions = turns[path[0]]["tools"]
    if not is_main:
        document.trajectory_id = f"{record['episode_id']}/turn-{leaf}"
    written.update(path)
    return document


def _answer_step(index: int, turn: Record, step_id: int, prompt_tokens: int) -> AtifStep:
    step = step_of(turn["message"] or {"role": "assistant", "content": ""}, step_id)
    own: Extra = {"turn": index, **{name: value for name, value in turn.items() if name not in OWN_FIELDS}}
    if turn["parent"] is not None and turn["tools"] is not None:
        own["tools"] = turn["tools"]
    if not turn["message"]:  # a call made of token ids
        own["message"] = {}
    step.extra = {OURS: {**(step.extra or {}).get(OURS, {}), **own}}
    step.llm_call_count = 1
    ids = turn["output_ids"]
    if ids or turn["context_ids"]:
        step.metrics = AtifMetrics(
            prompt_tokens=prompt_tokens,
            completion_tokens=len(ids),
            cached_tokens=turn.get("cached_tokens"),
            completion_token_ids=ids,
            logprobs=turn["output_logprobs"],
        )
    return step


def _mark_copied(steps: Sequence[AtifStep], index: int) -> None:
    """Leave of the steps of a turn, which another document has as well, what the format has fields for."""
    for step in steps:
        step.is_copied_context = True
    answer = steps[-1]
    answer.metrics = None
    kept = (answer.extra or {}).get(OURS, {})
    answer.extra = {OURS: {name: kept[name] for name in ("message",) if name in kept} | {"turn": index}}


def _document(record: Record, agent: AtifAgent, steps: list[AtifStep]) -> AtifTrajectory:
    identity = str(record["episode_id"])
    return AtifTrajectory(
        schema_version=WRITTEN_VERSION,
        agent=msgspec.structs.replace(agent),
        steps=steps,
        session_id=identity,
        trajectory_id=identity,
    )


def _without_turns(record: Record, agent: AtifAgent) -> AtifTrajectory:
    failure = record.get("failure")
    why = f": {failure['kind']}: {failure['message']}" if failure else ""
    return _document(record, agent, [AtifStep(1, "system", f"The episode ended before its first model call{why}")])


def _final_metrics(record: Record, turns: Sequence[Record], steps: int) -> AtifFinalMetrics:
    sizes: list[int] = []  # of each turn with all before it
    prompts = 0
    for turn in turns:
        before = 0 if turn["parent"] is None else sizes[turn["parent"]]
        prompts += before + len(turn["context_ids"])
        sizes.append(before + len(turn["context_ids"]) + len(turn["output_ids"]))
    cached = [turn["cached_tokens"] for turn in turns if turn.get("cached_tokens") is not None]
    rewarded = {name: record[name] for name in ("episode_return", "success") if record.get(name) is not None}
    return AtifFinalMetrics(
        total_prompt_tokens=prompts or None,
        total_completion_tokens=sum(len(turn["output_ids"]) for turn in turns) or None,
        total_cached_tokens=sum(cached) if cached else None,
        total_steps=steps,
        extra=rewarded or None,
    )
