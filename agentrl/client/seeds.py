"""The seeds of the calls of an episode: no two calls sample with the same noise.

A call with the noise of an earlier one is no sample of its own, so that both together teach something else than the policy
gradient. An agent that asks again after it gave a call up would get the same beginning again.
"""

from __future__ import annotations

import hashlib


class CallSeeds:
    """Gives each call of an episode its seed.

    Args:
        run_seed: the seed of the run; None leaves calls without a seed of their own to the server.
        episode_id: of the episode.
    """

    def __init__(self, run_seed: int | None, episode_id: str) -> None:
        self._run_seed, self._episode_id = run_seed, episode_id
        self._num_calls = 0
        self._given: set[int] = set()

    def next(self, given: int | None) -> int | None:
        """Return the seed of the next call; `given` is the one of its own, which only the first call that has it keeps."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        if given is not None and given not in self._given:
            self._given.add(given)
            return given
        base = self._run_seed if given is None else given
        return None if base is None else call_seed(base, self._episode_id, number)


def call_seed(run_seed: int, episode_id: str, call: int) -> int:
    """Return the seed of a model call, 63 bits; `call` is its number in the episode.

    Example:
        >>> call_seed(0, "0.0.0", 0) == call_seed(0, "0.0.0", 0), call_seed(0, "0.0.0", 0) == call_seed(0, "0.0.0", 1)
        (True, False)
    """
    digest = hashlib.blake2b(f"{run_seed}/{episode_id}/{call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
