"""The judge of recorded log-probs: Hugging Face's own float32 forward pass under the version each token says it has.

Invariant: every token of a loss mask is judged exactly once, by weights read from the published files, without anything that
the servers or the trainer compute with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.inference.backend import Probe
from agentrl.types import Int32Array, Sample, Trajectory
from agentrl.weights.types import Publication
from tests.support.accounts import positions

TOLERANCE = 1e-5
"""Nats; the largest difference of a recorded log-prob from its float32 recompute."""
POWER = 1e-3
"""Nats; a token tells two versions apart when its log-probs under them differ by more."""
_BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One entry for each trained token, [N], in the order of episodes and branches."""

    episodes: tuple[str, ...]
    """Ids; `episode` indexes them."""
    episode: NDArray[np.int64]
    turn: NDArray[np.int64]
    position: NDArray[np.int64]
    """Index in the turn's output."""
    version: NDArray[np.int64]
    interrupted: NDArray[np.bool_]
    """Whether an update came between the first token of the turn and this one."""
    recorded: NDArray[np.float64]
    """Nats."""
    recomputed: NDArray[np.float64]
    """Nats, under `version`."""
    neighbour: NDArray[np.float64]
    """Nats, under the version before (the first: after): what a mislabelled token would be held against."""

    @property
    def difference(self) -> NDArray[np.float64]:
        """Of recorded and recomputed, absolute, nats."""
        return np.abs(self.recorded - self.recomputed)

    @property
    def power(self) -> float:
        """The share of tokens whose log-prob under the neighbouring version differs by more than `POWER`."""
        return float((np.abs(self.neighbour - self.recomputed) > POWER).mean())

    @property
    def mislabelled(self) -> NDArray[np.bool_]:
        """Which tokens have exactly the log-prob of the neighbouring version instead of their own."""
        return (self.difference > TOLERANCE) & (np.abs(self.recorded - self.neighbour) <= TOLERANCE)

    def complaints(self, tolerance: float = TOLERANCE, *, limit: int = 10) -> list[str]:
        """Return how many tokens are over the tolerance, and a line for each, the worst first, `limit` at most."""
        difference = self.difference
        over = np.flatnonzero(~(difference <= tolerance))
        lines = [
            f"episode {self.episodes[self.episode[at]]}, turn {self.turn[at]}, output token {self.position[at]}, recorded "
            f"version {self.version[at]}: log-prob {self.recorded[at]:.7f}, recomputed {self.recomputed[at]:.7f} (off by "
            f"{difference[at]:.2e}; under the neighbouring version {self.neighbour[at]:.7f})"
            for at in over[np.argsort(-difference[over], kind="stable")][:limit].tolist()
        ]
        return [f"{len(over)} of {len(difference)} tokens are off by more than {tolerance:g} nats", *lines] if lines else []


@dataclass(frozen=True, slots=True)
class _Row:
    """A branch and where its trained tokens stand."""

    episode: int
    sample: Sample
    trained: NDArray[np.int64]


class Judge:
    """A Hugging Face model that takes the weights of one publication after the other."""

    def __init__(self, base: Path) -> None:
        """Build the model.

        Args:
            base: HF checkpoint of the architecture.
        """
        self._model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

    def probe(self, publication: Publication, token_ids: Int32Array) -> Probe:
        """Return the log-probs a server has to agree with once it has the weights."""
        self._load(publication)
        with torch.inference_mode():
            ids = torch.from_numpy(token_ids.astype(np.int64))
            table = torch.log_softmax(self._model(ids[None]).logits[0, :-1], -1)
            logprobs = table.gather(1, ids[1:, None])[:, 0]
        return Probe(token_ids=token_ids, logprobs=logprobs.numpy())

    def judge(self, trajectories: Sequence[Trajectory], publication: Callable[[int], Publication]) -> Judged:
        """Return every trained token with its log-prob under its own version and under a neighbouring one.

        Args:
            trajectories: finished episodes.
            publication: returns the weights of a version that was served.
        """
        rows = [
            _Row(index, sample, np.flatnonzero(sample.loss_mask))
            for index, trajectory in enumerate(trajectories)
            for sample in trajectory.branches()
        ]
        versions = np.concatenate([row.sample.token_versions[row.trained] for row in rows]).astype(np.int64)
        row_of = np.repeat(np.arange(len(rows)), [len(row.trained) for row in rows])
        place = np.concatenate([row.trained for row in rows])
        first, last = int(versions.min()), int(versions.max())
        other = np.where(versions > first, versions - 1, min(first + 1, last))
        recomputed, neighbour = np.full(len(versions), np.nan), np.full(len(versions), np.nan)
        samples = [row.sample for row in rows]
        for version in range(first, last + 1):
            own, near = versions == version, other == version
            asked = np.flatnonzero(own | near)
            if len(asked):
                self._load(publication(version))
                values = self._logprobs(samples, row_of[asked], place[asked])
                recomputed[own], neighbour[near] = values[own[asked]], values[near[asked]]
        return Judged(
            episodes=tuple(trajectory.episode_id for trajectory in trajectories),
            episode=np.array([rows[row].episode for row in row_of], np.int64),
            turn=np.concatenate([row.sample.turn_index[row.trained] for row in rows]).astype(np.int64),
            position=np.concatenate([positions(row.sample)[row.trained] for row in rows]),
            version=versions,
            interrupted=np.concatenate([interrupted(row.sample)[row.trained] for row in rows]),
            recorded=np.concatenate([row.sample.behavior_logprobs[row.trained] for row in rows]).astype(np.float64),
            recomputed=recomputed,
            neighbour=neighbour,
        )

    def _load(self, publication: Publication) -> None:
        weights = load_file(Path(publication.path) / "model.safetensors")
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:  # tied to the embeddings
            raise AssertionError(f"{publication.path}: missing {missing}, unexpected {unexpected}")

    @torch.inference_mode()
    def _logprobs(
        self, samples: Sequence[Sample], rows: NDArray[np.int64], places: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the log-probs of tokens `places[i]` of samples `rows[i]`, at the temperatures they were sampled with."""
        result = np.full(len(rows), np.nan)
        ends = {row: int(places[rows == row].max()) for row in np.unique(rows).tolist()}
        order = sorted(ends, key=lambda row: ends[row])
        for begin in range(0, len(order), _BATCH):
            some = order[begin : begin + _BATCH]
            ids = torch.zeros(len(some), max(ends[row] for row in some), dtype=torch.int64)
            for line, row in enumerate(some):
                # What stands behind the last judged token is never seen: attention is causal.
                ids[line, : ends[row]] = torch.from_numpy(samples[row].token_ids[: ends[row]].astype(np.int64))
            logits = self._model(ids).logits
            for line, row in enumerate(some):
                mine = np.flatnonzero(rows == row)
                at, sample = places[mine], samples[row]
                temperatures = torch.from_numpy(sample.temperatures[at])
                table = torch.log_softmax(logits[line, torch.from_numpy(at - 1)] / temperatures[:, None], -1)
                targets = torch.from_numpy(sample.token_ids[at].astype(np.int64))
                result[mine] = table.gather(1, targets[:, None])[:, 0].double().numpy()
        return result


def interrupted(sample: Sample) -> NDArray[np.bool_]:
    """Return, [L] bool, which tokens were sampled after weights had changed since the first token of their turn."""
    result = np.zeros(len(sample.token_ids), np.bool_)
    first: dict[int, int] = {}
    for at in np.flatnonzero(sample.token_versions >= 0).tolist():
        version = int(sample.token_versions[at])
        result[at] = version > first.setdefault(int(sample.turn_index[at]), version)
    return result
