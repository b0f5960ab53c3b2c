"""`agentrl audit`: the proof, from the files of a run, of what was sent, sampled and trained.

Invariant: nothing is written; text of a run cannot move the cursor. Exit status 1 says that something does not hold, and
each such thing is printed with its episode and turn.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentrl.episode.trajectory import ForkReason
from agentrl.errors import InvariantError
from agentrl.support.foreign import visible
from agentrl_viewer.runs.proof import Audit, AuditedTurn, VersionAudit, audit_run

_MAX_FINDINGS: Final = 20
_DIGEST_CHARACTERS: Final = 12
_NOTHING: Final = "not recorded"
FORK_REASONS: Final[Mapping[ForkReason, str]] = {
    ForkReason.HISTORY_EDITED: "the request changed, removed or inserted an earlier message",
    ForkReason.THINKING_STRIPPED: "the chat template drops earlier reasoning",
    ForkReason.TOOLS_CHANGED: "the request has other tools",
    ForkReason.NEW_CONVERSATION: "the request continues no recorded turn: another agent, or a shortened history",
    ForkReason.TEMPLATE_CHANGED: "the chat template writes known messages differently",
}
"""The reasons in words."""


def audit_command(run: Path, /, *, episode: str | None = None, all: bool = False) -> None:
    """Prove from a run's files that the trained tokens are those that were sent and sampled; status 1 where one is not.

    Args:
        run: Directory of the run, such as runs/demo; nothing in it is changed.
        episode: Print one page on this episode instead, turn by turn.
        all: Print every thing that does not hold, instead of the first 20.
    """
    with _episode_bar() as on_start:
        audit = audit_run(run, episode_id=episode, on_start=on_start)
    print(visible(describe_audit(audit) if episode is None else describe_episode(audit, episode)))
    if not audit.findings:
        return
    shown = audit.findings if all else audit.findings[:_MAX_FINDINGS]
    lines = [f"  {visible(finding.text)}" for finding in shown]
    if len(shown) < len(audit.findings):
        lines.append(f"  and {len(audit.findings) - len(shown)} more; --all lists them")
    raise InvariantError(f"{run}: {len(audit.findings)} of its records do not hold:\n" + "\n".join(lines))


def describe_audit(audit: Audit) -> str:
    """Return the counts of a run and a table of its versions."""
    pruned = f", {audit.pruned} deleted by engine.keep_episode_steps" if audit.pruned else ""
    facts = [
        ("episodes", f"{audit.episodes} read{pruned}"),
        ("turns", f"{audit.turns}"),
        ("trained", f"{audit.trained_tokens} tokens in {audit.steps} steps"),
        ("ids sent", f"turns of trained episodes: {_count_text(audit.sent.items())}"),
        ("ids trained", f"turns of trained episodes: {_count_text(audit.trained.items())}"),
        ("forks", _count_text(audit.forks.items()) or "none"),
        *_askers(audit),
        *([("left out", f"{audit.left_out} turns that the run file keeps out of training")] if audit.left_out else []),
        ("does not hold", f"{len(audit.findings)}" if audit.findings else "nothing"),
    ]
    return _columns(facts) + "\n\n" + _version_table(audit.versions)


def describe_episode(audit: Audit, episode_id: str) -> str:
    """Return one page on an episode: each turn with its versions, the proofs of its ids, and why it forked."""
    trained = "not trained" if audit.trained_step is None else f"trained by step {audit.trained_step}"
    head = f"episode {episode_id}: {len(audit.page)} turns, {trained}"
    rows = [("turn", "asked by", "continues", "fork", "context", "sampled", "versions", "ids sent", "ids trained")]
    rows += [_turn_row(index, audited) for index, audited in enumerate(audit.page)]
    used = {span.version for audited in audit.page for span in audited.turn.spans}
    versions = {number: audit.versions.get(number, VersionAudit()) for number in used}
    why = [(each, FORK_REASONS[each]) for each in ForkReason if any(audited.turn.fork == each for audited in audit.page)]
    explained = [_columns([("fork", "reason"), *why])] if why else []
    return "\n\n".join([head, _columns(rows), *explained, _version_table(versions)])


def _askers(audit: Audit) -> list[tuple[str, str]]:
    """Return a line for each program that asked over HTTP, with its turns and forks."""
    return [
        ("asked by", f"{_asker_text(*asker)}: {found.turns} turns, forks: {_count_text(found.forks.items()) or 'none'}")
        for asker, found in sorted(audit.askers.items())
        if asker.dialect
    ]


def _asker_text(client: str, dialect: str) -> str:
    return f"{client or 'a program without a name'}, {dialect}" if dialect else "in process"


def _turn_row(index: int, audited: AuditedTurn) -> tuple[str, ...]:
    turn = audited.turn
    return (
        f"{index}",
        _asker_text(turn.client, turn.dialect) + (f", as {turn.role}" if turn.role else ""),
        "–" if turn.parent is None else f"turn {turn.parent}",
        str(turn.fork or "–"),
        f"{len(turn.context_ids)}",
        f"{len(turn.output_ids)}",
        ", ".join(f"{span.version} ({span.start} to {span.end})" for span in turn.spans) or "–",
        audited.sent,
        audited.trained,
    )


def _version_table(versions: Mapping[int, VersionAudit]) -> str:
    rows = [("version", "trained tokens", "trainer", "servers", "probe", "spot check")]
    for number, version in sorted(versions.items()):
        digests = sorted(set(version.server_digests.values()))
        rows.append((
            f"{number}",
            f"{version.trained_tokens}",
            _short(version.trainer_digest),
            f"{len(version.server_digests)}: {', '.join(map(_short, digests))}" if digests else _NOTHING,
            _nats(version.probe_difference),
            _nats(version.spot_difference),
        ))  # fmt: skip
    return _columns(rows) + "\n(digests of the weights; largest differences of log-probs between server and trainer, nats)"


def _short(digest: str | None) -> str:
    if digest is None:
        return _NOTHING
    kind, _, value = digest.partition(":")
    return f"{kind}:{value[:_DIGEST_CHARACTERS]}"


def _nats(difference: float | None) -> str:
    return _NOTHING if difference is None else f"{difference:.2g}"


def _count_text(found: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(found))


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


@contextmanager
def _episode_bar() -> Generator[Callable[[int], Callable[[], None]]]:
    """Show the episodes that were checked on standard error when that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("episodes"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)

    def on_start(total: int) -> Callable[[], None]:
        task = bar.add_task("episodes", total=total)

        def advance() -> None:
            with suppress(OSError):  # a terminal that is gone does not end the command
                bar.advance(task)

        return advance

    with bar:
        yield on_start
