"""Weights of many policy versions around one tiny checkpoint, published as a trainer publishes them.

Invariant: the weights of a version depend on the base, the seed and the version alone; those of two versions differ in every
tensor by about 1.4 times `scale` of what the tensor's own entries spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from agentrl.weights.disk import WEIGHTS_FILE, publish
from agentrl.weights.tensors import RawTensor, read_safetensors
from agentrl.weights.types import Publication

UNRELATED = 0.3
"""Scale at which a token's log-prob under another version is another number altogether."""
SMALL_STEP = 1e-3
"""Scale of one step of training: a thousandth of what the weights spread."""
_QUIET = 0.1
"""Factor on the rows of control tokens, so that they are sampled rarely and completions run to their limit."""


_CALM = 1 / 3
"""Factor on the matrices: with entries of 0.3 and more, rounding alone moves log-probs by 1e-5 nats."""


class Versions:
    """Publications of versions `first`, `first + 1`, ..., each written when it is first asked for."""

    def __init__(
        self, base: Path, directory: Path, *, quiet_ids: frozenset[int], scale: float = UNRELATED, seed: int = 0
    ) -> None:
        """Begin with nothing written.

        Args:
            base: HF checkpoint of a model with tied embeddings; its config and tokenizer are copied beside the weights.
            directory: where versions are written.
            quiet_ids: tokens to make improbable: those that end a turn, and markup.
            scale: standard deviation of the noise, in units of each tensor's own.
            seed: of the noise.
        """
        self.base = base
        self.scale = scale
        self._directory = directory
        self._seed = seed
        self._tensors = {name: _array(raw) for name, raw in read_safetensors(base / WEIGHTS_FILE).items()}
        for name, array in self._tensors.items():
            if array.ndim == 2:
                self._tensors[name] = array * np.float32(_CALM)
        self._quiet = sorted(quiet_ids)
        self._published: dict[int, Publication] = {}

    def publication(self, version: int) -> Publication:
        """Return the publication of `version`."""
        if version not in self._published:
            tensors = {name: RawTensor.of(array) for name, array in self.tensors(version).items()}
            self._published[version] = publish(tensors, version=version, directory=self._directory, source=self.base)
        return self._published[version]

    def tensors(self, version: int) -> Mapping[str, np.ndarray]:
        """Return the weights of `version` by HF name, float32."""
        rng = np.random.default_rng((self._seed, version))
        result: dict[str, np.ndarray] = {}
        for name, array in self._tensors.items():
            spread = float(array.std()) or 0.3  # norms begin as all ones
            result[name] = array + np.float32(self.scale * spread) * rng.standard_normal(array.shape, np.float32)
            if name == "model.embed_tokens.weight":
                result[name][self._quiet] *= np.float32(_QUIET)
        return result


def _array(raw: RawTensor) -> np.ndarray:
    if raw.dtype != "F32":
        raise ValueError(f"expected float32 weights, got {raw.dtype}")
    return np.frombuffer(raw.data, "<f4").reshape(raw.shape)
