"""The proof, from the files of a run alone, that the trained tokens are those that were sent and sampled.

Invariant: nothing is believed that two records do not say independently of each other: ids of an episode against the digests
of its requests and of the trained arrays, its record against its line of the index, a step's episodes and tokens against
its counts, weights of the trainer against those of the servers. What a run does not record is counted as not recorded.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import orjson

from agentrl.commands.open_run import open_run
from agentrl.episode.codec import stored_trajectory
from agentrl.episode.summary import EndedEpisode, EpisodeSummary, summarize
from agentrl.episode.trajectory import Trajectory, Turn, VersionSpan
from agentrl.errors import ConfigError, InvariantError
from agentrl.observe.episode_files import read_lines
from agentrl.observe.runs.reading import read_index, read_metrics, read_trained_lines
from agentrl.tokens.verify import request_digests, trained_digests, verify

Verdict: TypeAlias = Literal["equal", "differs", "not recorded", "not trained"]
_DAMAGE = (msgspec.MsgspecError, ValueError, TypeError, KeyError, AttributeError, OverflowError)
"""The errors of a line that is cut or that somebody changed."""
_UNREADABLE = (OSError, EOFError, zlib.error, gzip.BadGzipFile)
_INDEXED = ("task_id", "stop_reason", "episode_return", "turns", "output_tokens", "context_tokens", "branches", "forks")
_VERSIONS = ("min_version", "max_version")
"""Fields of an index line that its record says again."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Something that does not hold."""

    episode_id: str | None
    """None: of the run."""
    text: str
    """What does not hold, with the episode and the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedTurn:
    """The proof of one turn."""

    turn: Turn
    sent: Verdict
    """The ids of its request against the digest of the sent ids."""
    trained: Verdict
    """Ids, log-probs and versions against the digest of the trained ones."""


@dataclass(slots=True, kw_only=True)
class VersionAudit:
    """The records of one policy version."""

    trained_tokens: int = 0
    """Tokens that it sampled and that a step trained."""
    trainer_digest: str | None = None
    """None: not recorded."""
    server_digests: Mapping[str, str] = field(default_factory=dict[str, str])
    probe_difference: float | None = None
    spot_difference: float | None = None
    """Largest difference of a log-prob of a server from the trainer's in the spot checks at this version, nats."""


class Asker(NamedTuple):
    """The sender of the call of a turn."""

    client: str
    """The program; empty in process, and where it does not name itself."""
    dialect: str
    """Empty in process."""


@dataclass(slots=True)
class AskerAudit:
    """The turns of one asker."""

    turns: int = 0
    forks: Counter[str] = field(default_factory=Counter[str])
    """By reason."""


@dataclass(slots=True, kw_only=True)
class Audit:
    """The result for a run, or for one episode of it."""

    episodes: int = 0
    """Whose records were read."""
    pruned: int = 0
    """Episodes whose records `engine.keep_episode_steps` let the run delete."""
    turns: int = 0
    sent: Counter[Verdict] = field(default_factory=Counter[Verdict])
    """Turns, by what their requests are."""
    trained: Counter[Verdict] = field(default_factory=Counter[Verdict])
    """Turns, by what was trained of them."""
    trained_tokens: int = 0
    forks: Counter[str] = field(default_factory=Counter[str])
    """Turns that forked, by reason."""
    askers: dict[Asker, AskerAudit] = field(default_factory=dict[Asker, "AskerAudit"])
    """Turns by the program that asked over HTTP and its dialect."""
    left_out: int = 0
    """Turns that the run file kept out of training, side calls."""
    versions: dict[int, VersionAudit] = field(default_factory=dict[int, VersionAudit])
    steps: int = 0
    findings: list[Mismatch] = field(default_factory=list[Mismatch])
    page: list[AuditedTurn] = field(default_factory=list[AuditedTurn])
    """The turns, of an audit of one episode."""
    trained_step: int | None = None
    """The step that trained it, of an audit of one episode."""

    def count(self, turn: Turn) -> None:
        """Count a turn by its sender, and by the reason of its fork."""
        asker = self.askers.setdefault(Asker(turn.client, turn.dialect), AskerAudit())
        asker.turns += 1
        self.left_out += turn.left_out
        if turn.fork is not None:
            for forks in (self.forks, asker.forks):
                forks[str(turn.fork)] += 1

    def add(self, episode_id: str | None, reason: str, turn: int | None = None) -> None:
        """Record that something does not hold."""
        where = "" if episode_id is None else f"episode {episode_id}{'' if turn is None else f', turn {turn}'}: "
        self.findings.append(Mismatch(episode_id, reason if where and reason.startswith(where[:-2]) else where + reason))


class _ProvedTurn(msgspec.Struct, frozen=True):
    advantage: float | None
    sent: str | None = None
    trained: str | None = None


class _ProvedEpisode(msgspec.Struct, frozen=True):
    """A `TrainedEpisode` without what an audit does not need."""

    episode_id: str
    step: int
    policy_version: int
    turns: list[_ProvedTurn]


_PROVED = msgspec.json.Decoder(_ProvedEpisode)


def audit_run(
    path: str | Path, *, episode_id: str | None = None, on_start: Callable[[int], Callable[[], None]] | None = None
) -> Audit:
    """Check the records of a run, or of one episode; `on_start` gets the number of episodes and returns what each calls.

    Raises:
        ConfigError: there is no run, it stores no episodes, or it has no such episode.
        InvariantError: the index or the metrics cannot be read at all.
    """
    run = open_run(path)
    try:
        events, rows = list(map(_LoggedEvent.of, read_metrics(run.path))), read_index(run.path)
    except (msgspec.MsgspecError, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise InvariantError(f"{run.path}: a line of metrics.jsonl or of episodes/index.jsonl is cut: {error}") from error
    if not rows:
        raise ConfigError(
            f"{run.path} stores no episodes, so nothing can be proved; engine.save_trajectories: true keeps them"
        )
    wanted = rows if episode_id is None else [row for row in rows if row.episode_id == episode_id]
    if not wanted:
        raise ConfigError(f"{run.path} has no episode {episode_id!r}; run.episodes() lists those that have ended")
    auditor = _Auditor(run.path, events, only=episode_id)
    advance = (lambda: None) if on_start is None else on_start(len(wanted))
    for row, record in _records(run.path, wanted):
        auditor.check(row, record)
        advance()
    return auditor.finish()


class _LoggedEvent(msgspec.Struct, frozen=True):
    """The part of a line of `metrics.jsonl` that an audit needs."""

    kind: str
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> _LoggedEvent:
        kind = line["event"]
        names = _EVENT_FIELDS.get(kind, ("policy_version",))
        return cls(kind, {name: line[name] for name in names if name in line})


_EVENT_FIELDS: Mapping[str, Sequence[str]] = {
    "step": (
        *("step", "policy_version", "episodes", "trained_groups", "loss_tokens", "masked_tokens"),
        "staleness_max",
        "trainer.max_spot_difference",
    ),
    "publishing": ("version", "policy_version"),
    "published": ("version", "policy_version", "trainer_digest", "server_digests", "probe_difference"),
}


def _kept_steps(path: Path) -> int | None:
    try:
        config = open_run(path).config
    except ConfigError:  # of another release
        return None
    return None if config is None else config.engine.keep_episode_steps


class _Auditor:
    """Checks records one after the other, each against the training record of its step."""

    def __init__(self, path: Path, events: Sequence[_LoggedEvent], *, only: str | None) -> None:
        self._path, self._only, self._audit = path, only, Audit()
        self._kept_steps = _kept_steps(path)
        self._steps = {event.fields["step"]: event.fields for event in events if event.kind == "step"}
        self._last_step = max(self._steps, default=0)
        self._step_of = {group: step for step, line in self._steps.items() for group in line.get("trained_groups", ())}
        self._has_ended = bool(events) and events[-1].kind == "end"
        self._announced = {event.fields["version"] for event in events if event.kind == "publishing"}
        highest = max((event.fields.get("policy_version", 0) for event in events), default=0)
        self._announced = self._announced or set(range(highest + 1))  # an older run
        self._loaded = 0
        self._pending: dict[str, _ProvedEpisode] = {}
        self._lines: Counter[int] = Counter()
        """Lines of what a step trained."""
        self._found: Counter[int] = Counter()
        """Those whose records were found."""
        self._tokens: Counter[int] = Counter()
        self._without_line: dict[int, list[str]] = {}
        self._audit.steps = len(self._steps)
        self._read_versions(events)

    def check(self, row: EpisodeSummary, record: bytes | None) -> None:
        """Check one episode; without a record, it must be one that the run has deleted."""
        line = self._take(row)
        if record is None or record == b"\n":
            if self._is_pruned(row.step):
                self._audit.pruned += 1
            else:
                self._audit.add(
                    row.episode_id, f"line {row.line} of episodes/{row.file}.jsonl, its record, is missing or cut"
                )
            return
        try:
            trajectory = stored_trajectory(record)
            if trajectory.episode_id != row.episode_id:
                raise ValueError(f"it is that of episode {trajectory.episode_id}")
            self._check_episode(row, trajectory, line)
        except _DAMAGE as error:
            reason = f"line {row.line} of episodes/{row.file}.jsonl is no record of it: {type(error).__name__}: {error}"
            self._audit.add(row.episode_id, reason)
        except InvariantError as error:
            self._audit.add(row.episode_id, str(error))

    def finish(self) -> Audit:
        """Return the result, after the checks of whole steps and of versions."""
        for step in sorted(self._steps):
            self._load(step)
        if self._only is None:
            for line in self._pending.values():
                self._audit.add(line.episode_id, f"step {line.step} trained it, but the run has no record of it")
            for step in sorted(self._steps):
                self._check_step(step)
        self._check_versions()
        return self._audit

    def _take(self, row: EpisodeSummary) -> _ProvedEpisode | None:
        """Return the training record of an episode, from the step that trained it."""
        step = None if row.group is None else self._step_of.get(row.group)
        if step is None:
            return None
        while self._loaded < step:
            self._load(self._loaded + 1)
        line = self._pending.pop(row.episode_id, None)
        if line is None and row.failure is None:
            self._without_line.setdefault(step, []).append(row.episode_id)
        return line

    def _load(self, step: int) -> None:
        if step <= self._loaded:
            return
        self._loaded = step
        seen: set[str] = set()
        name = f"episodes/trained-{step:06d}.jsonl.gz"
        try:
            for number, text in enumerate(read_trained_lines(self._path, step), 1):
                try:
                    line = _PROVED.decode(text)
                except msgspec.MsgspecError as error:
                    self._audit.add(None, f"line {number} of {name} is cut or changed: {error}")
                    continue
                self._lines[step] += 1
                self._accept(line, step, seen)
        except _UNREADABLE as error:
            self._audit.add(None, f"{name} cannot be read to its end: {error}")

    def _accept(self, line: _ProvedEpisode, step: int, seen: set[str]) -> None:
        if self._only is not None and line.episode_id != self._only:
            return
        expected = self._steps[step]["policy_version"] if step in self._steps else line.policy_version
        group = line.episode_id.partition(".")[0]
        trained_in = self._step_of.get(int(group)) if group.isdecimal() else None
        turns = f"its turns, 0 to {len(line.turns) - 1},"
        if line.episode_id in seen:
            self._audit.add(line.episode_id, f"step {step} trained {turns} twice")
        elif trained_in != step:
            also = "no step" if trained_in is None else f"step {trained_in}"
            self._audit.add(line.episode_id, f"step {step} trained {turns} again; by metrics.jsonl {also} trained its group")
        elif (line.step, line.policy_version) != (step, expected):
            recorded = f"step {line.step} at version {line.policy_version}"
            self._audit.add(line.episode_id, f"its line says {recorded}; metrics.jsonl, step {step} at version {expected}")
        else:
            self._pending[line.episode_id] = line
        seen.add(line.episode_id)

    def _check_episode(self, row: EpisodeSummary, trajectory: Trajectory, line: _ProvedEpisode | None) -> None:
        audit = self._audit
        audit.episodes += 1
        audit.turns += len(trajectory.turns)
        for reason in _differences(row, trajectory):
            audit.add(row.episode_id, reason)
        for index, turn in enumerate(trajectory.turns):
            audit.count(turn)
            self._check_turn(row.episode_id, index, turn, line)
        samples = verify(trajectory, has_digests=False)
        digests = {turn: digest for sample in samples for turn, digest in trained_digests(sample).items()}
        if line is not None and len(line.turns) != len(trajectory.turns):
            audit.add(
                row.episode_id, f"its record has {len(trajectory.turns)} turns, step {line.step} got {len(line.turns)}"
            )
        elif line is not None:
            self._check_proofs(trajectory, line, digests)
        elif self._only is not None:
            audit.page = [AuditedTurn(turn=turn, sent="not recorded", trained="not trained") for turn in trajectory.turns]

    def _check_turn(self, episode_id: str, index: int, turn: Turn, line: _ProvedEpisode | None) -> None:
        if turn.parent is None and turn.fork is None and turn.sent_after > 0 and len(turn.context_ids):
            reason = f"it begins a conversation after {turn.sent_after} turns, and no reason of this fork is recorded"
            self._audit.add(episode_id, reason, index)
        for span in turn.spans:
            reason = self._wrong_version(span, line, is_trained=turn.in_loss)
            if reason is not None:
                self._audit.add(episode_id, f"tokens {span.start} to {span.end}: {reason}", index)

    def _wrong_version(self, span: VersionSpan, line: _ProvedEpisode | None, *, is_trained: bool) -> str | None:
        """Return why a version cannot have sampled these tokens; None: it can."""
        version = span.version
        if version not in self._announced:
            return f"version {version} sampled them, but the run never published it; it published {_range(self._announced)}"
        if line is None:
            return None
        trained = f"step {line.step} trained them at version {line.policy_version}"
        if version > line.policy_version:
            return f"version {version} sampled them, but {trained}"
        step = self._steps.get(line.step, {})
        oldest = step.get("staleness_max")
        if is_trained and oldest is not None and not step.get("masked_tokens") and line.policy_version - version > oldest:
            return f"version {version} sampled them, but {trained}, and its oldest token was {oldest:g} versions old"
        return None

    def _check_proofs(self, trajectory: Trajectory, line: _ProvedEpisode, digests: Mapping[int, str]) -> None:
        """Compare the ids of requests, and what was trained, with their digests; the digest of a turn covers those above."""
        audit, episode_id = self._audit, trajectory.episode_id
        self._found[line.step] += 1
        is_recorded = any(proved.sent is not None for proved in line.turns)
        seen: set[str] = set()
        for index, (turn, proved, request) in enumerate(
            zip(trajectory.turns, line.turns, request_digests(trajectory), strict=True)
        ):
            sent = _verdict(proved.sent, request.value.hex(), is_recorded=is_recorded)
            if sent == "differs" and "sent" not in seen:
                seen.add("sent")
                reason = f"the recorded ids are not the request that was sent: digest {request.value.hex()} of "
                audit.add(episode_id, f"{reason}{request.num_ids} context ids, sent {proved.sent or 'none'}", index)
            trained: Verdict = "not trained"
            if proved.advantage is not None:
                self._count(turn, line)
                trained = _verdict(proved.trained, digests.get(index), is_recorded=is_recorded)
            if trained == "differs" and "trained" not in seen:
                seen.add("trained")
                reason = "its ids, log-probs or versions, or ids before them, are not those that were trained: digest "
                audit.add(episode_id, f"{reason}{digests.get(index, 'none')}, trained {proved.trained or 'none'}", index)
            if trained != "not trained" and turn.temperature == 0:
                audit.add(episode_id, "it was sampled at temperature 0, which is never trained, and was trained", index)
            if trained != "not trained" and turn.left_out:
                audit.add(episode_id, "the run file left it out of training, and it was trained", index)
            audit.sent[sent] += 1
            audit.trained[trained] += 1
            if self._only is not None:
                audit.page.append(AuditedTurn(turn=turn, sent=sent, trained=trained))
        audit.trained_step = line.step

    def _count(self, turn: Turn, line: _ProvedEpisode) -> None:
        self._tokens[line.step] += len(turn.output_ids)
        self._audit.trained_tokens += len(turn.output_ids)
        for span in turn.spans:
            self._version(span.version).trained_tokens += span.end - span.start

    def _check_step(self, step: int) -> None:
        line, lines = self._steps[step], self._lines[step]
        if not lines:
            is_open = step == self._last_step and not self._has_ended
            if not is_open and not self._is_pruned(step):
                self._audit.add(None, f"step {step}: episodes/trained-{step:06d}.jsonl.gz, what it trained, is missing")
            return
        expected = line.get("episodes", lines)
        if lines != expected:
            names = ", ".join(self._without_line.get(step, ())) or "none"
            self._audit.add(None, f"step {step} trained {expected:g} episodes by metrics.jsonl, and its record has {lines}; "
                            f"episodes of its groups without a line: {names}")  # fmt: skip
            return
        are_counted = self._found[step] == lines and not line.get("masked_tokens")
        if are_counted and self._tokens[step] != line.get("loss_tokens", self._tokens[step]):
            counted = f"{line['loss_tokens']:g} tokens by metrics.jsonl, and its episodes have {self._tokens[step]}"
            self._audit.add(None, f"step {step} trained {counted}")

    def _is_pruned(self, step: int) -> bool:
        keep = self._kept_steps
        return keep is not None and step <= self._last_step - keep

    def _version(self, number: int) -> VersionAudit:
        return self._audit.versions.setdefault(number, VersionAudit())

    def _read_versions(self, events: Sequence[_LoggedEvent]) -> None:
        for event in events:
            fields = event.fields
            if event.kind == "published":
                version = self._version(fields["version"])
                published: str = fields["trainer_digest"]
                version.trainer_digest, version.server_digests = published, fields["server_digests"]
                version.probe_difference = fields["probe_difference"]
                for server, digest in version.server_digests.items():
                    if _digest_kind(digest) == _digest_kind(published) and digest != published:
                        what = f"version {fields['version']}: {server} held weights of digest {digest}"
                        self._audit.add(None, f"{what}, the trainer published {published}")
            elif event.kind == "step" and fields.get("trainer.max_spot_difference") is not None:
                version = self._version(fields["policy_version"])
                spot = float(fields["trainer.max_spot_difference"])
                version.spot_difference = max(spot, version.spot_difference or 0.0)

    def _check_versions(self) -> None:
        """Check that versions between two that are recorded are recorded, too."""
        known = sorted(number for number, version in self._audit.versions.items() if version.trainer_digest is not None)
        for number, version in sorted(self._audit.versions.items()):
            if version.trainer_digest is None and version.trained_tokens and known and known[0] < number < known[-1]:
                what = f"version {number} sampled {version.trained_tokens} trained tokens"
                self._audit.add(None, f"{what}, but metrics.jsonl has no line of its publication")


def _records(path: Path, rows: Sequence[EpisodeSummary]) -> Iterator[tuple[EpisodeSummary, bytes | None]]:
    """Yield each row with its record, one file after the other; None where it is missing or cannot be read."""
    by_file: dict[str, dict[int, EpisodeSummary]] = {}
    for row in rows:
        by_file.setdefault(row.file, {})[row.line] = row
    for name, wanted in by_file.items():
        try:
            for number, line in enumerate(read_lines(path / "episodes" / f"{name}.jsonl")):
                if number in wanted:
                    yield wanted.pop(number), line
                if not wanted:
                    break
        except _UNREADABLE:
            pass  # the rest is missing
        for row in wanted.values():
            yield row, None


def _differences(row: EpisodeSummary, trajectory: Trajectory) -> Iterator[str]:
    """Yield the fields that an index line and its record do not agree on."""
    ended = EndedEpisode(trajectory, "training", row.group, row.step, row.policy_version, 0.0)
    summary = summarize(ended, file=row.file, line=row.line)
    for name in (*_INDEXED, *_VERSIONS):
        recorded, indexed = getattr(summary, name), getattr(row, name)
        if recorded != indexed:
            yield f"{name} is {recorded} in its record and {indexed} in the index"


def _verdict(recorded: str | None, digest: str | None, *, is_recorded: bool) -> Verdict:
    if not is_recorded:
        return "not recorded"
    return "equal" if recorded == digest else "differs"


def _digest_kind(digest: str) -> str:
    return digest.partition(":")[0]


def _range(versions: set[int]) -> str:
    return f"{min(versions)} to {max(versions)}" if versions else "none"
