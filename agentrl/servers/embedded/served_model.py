"""The seam at which models stand behind the engine: what a step asks of a model, and what an update asks of its weights.

Invariant: the hidden states of a step are those of its tokens, each after all tokens before it in its row; a model writes to
no row but those of the step. Weights never change after they are made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agentrl.servers.embedded.batching import Chunk
from agentrl.servers.embedded.cache import KVCache
from agentrl.servers.embedded.low_rank import AdapterTokens, ServedAdapter
from agentrl.servers.embedded.spec import ServedSpec


class VersionWeights(Protocol):
    """The weights of one policy version in memory."""

    def checksums(self) -> dict[str, str]:
        """Return the digest of each served tensor, by HF name."""
        ...

    def others(self, taken: Collection[str]) -> dict[str, Tensor]:
        """Return the tensors that an update of `taken` leaves as they are, in the types of their file."""
        ...


class StepInputs(Protocol):
    """The tokens of one step."""

    @property
    def ids(self) -> Tensor:
        """[N] int64."""
        ...


@dataclass(frozen=True, slots=True)
class StepWork:
    """The tokens that a step computes: one of each of `rows`, and then those of each chunk, in order."""

    rows: NDArray[np.int64]
    """[B], ascending: rows that decode."""
    last_tokens: NDArray[np.int64]
    """[B]: their tokens."""
    chunks: Sequence[Chunk]
    adapters: Sequence[AdapterTokens] = ()
    """Of the tokens that have one."""


class ServedModel(Protocol):
    """Computes steps under the weights that it is given."""

    @property
    def weights(self) -> VersionWeights: ...

    @weights.setter
    def weights(self, weights: VersionWeights) -> None: ...

    @property
    def spec(self) -> ServedSpec: ...

    def batch(self, cache: KVCache, work: StepWork) -> StepInputs:
        """Return the inputs of a step that does `work`."""
        ...

    def hidden(self, batch: StepInputs, cache: Tensor, weights: VersionWeights) -> Tensor:
        """Return the last hidden states of the step, [N, hidden]; `cache` is the `data` of the cache."""
        ...

    def logits(self, hidden: Tensor, weights: VersionWeights) -> Tensor:
        """Return float32 logits, [n, V], of hidden states, [n, hidden]."""
        ...


class ModelSource(Protocol):
    """A model directory, opened: makes weights, caches and the model that computes with them."""

    @property
    def spec(self) -> ServedSpec: ...

    @property
    def takes_adapters(self) -> bool: ...

    def read(self, path: str) -> VersionWeights:
        """Return the weights in `path`; ConfigError where they are those of another model."""
        ...

    def build(self, tensors: dict[str, Tensor]) -> VersionWeights:
        """Return weights made of `tensors`, by HF name, which are taken out of the dict."""
        ...

    def model(self, weights: VersionWeights, max_context: int) -> ServedModel: ...

    def cache(self, num_rows: int, max_context: int) -> KVCache: ...

    def adapter(self, name: str, path: Path, base: Path) -> ServedAdapter:
        """Return the adapter in `path` for the weights in `base`; ConfigError where this model takes none."""
        ...
