"""The faults of SGLang 0.5.23, the embedded server's correct behaviour, and switches that reproduce each fault.

Invariant: without faults the embedded server loses no token, leaves no call without an answer, and never refuses a call
that it carried out. `agentrl serve --fault NAME` switches one fault on, `--fault sglang` all of them, so that the guards of
a client can be tested without the real server. tests/conformance/test_faults.py shows that each fault misleads a naive
client and does not mislead agentrl's.

Off by default, switchable:

- `abort-deadlock`: a pause of mode abort after a pause of mode in_place never returns, nor does `/continue_generation`; only
  a restart helps. The embedded server ends the requests. Guard: agentrl pauses with retract or in_place, and aborts nothing
  while paused.
- `lost-aborts`: an abort of a request that arrived during a pause answers 200, but the request runs to its end and ignores
  later aborts by its id. The embedded server ends it at once. Guard: agentrl sends nothing while paused; calls wait in the
  client.
- `late-aborts`: an abort during an in_place pause takes effect after the continue. On the embedded server it takes effect at
  once. Guard: agentrl sends aborts after the pause.
- `coarse-aborts`: an unstreamed request that is aborted after a retract loses up to 49 tokens. The embedded server loses
  none. Guard: agentrl sends aborts after the pause.
- `applied-refusal`: an update with flush_cache during an in_place pause answers 400, but weights and spans are the new ones,
  and `/model_info` reports the former version. The embedded server changes nothing. Guard: agentrl flushes the cache only
  after a retract, and reads the version back.
- `blocking-health`: `/health` takes a second; while paused it blocks for 20 s and answers 503. The embedded server answers
  200 at once. Guard: agentrl calls `/model_info` to see whether a server lives.
- `update-race`: an update sent before a pause waits, even during the pause, until the running requests end. The embedded
  server applies it as soon as the pause holds. Guard: agentrl pauses first, and refuses to update a server that runs.
- `stale-prefix`: after an update without a flush, SGLang reuses prefixes that the former weights computed. The embedded
  server never does. Guard: in in_place mode the cache salt of each request holds the version and checksum of the weights.
- `update-collision`: two concurrent updates from disk during a pause crash SGLang, even if the client of the first has
  disconnected, because a disconnect does not cancel an update. With this fault the embedded server stops answering control
  calls, and, as in SGLang, `/server_info` answers after the update in progress. Without it, the second update waits for the
  first. Guard: after a cancelled update, agentrl waits for two answers of `/server_info` before it sends the next.

Always as in SGLang: an abort ends every request whose id starts with the given id (guard: all ids have one length; in SGLang
a disconnect does the same, here it ends only its own request). An aborted request that waits or was retracted gets a short
`meta_info` (guard: agentrl reads nothing else from it). `/update_weight_version` aborts all requests by default (guard:
agentrl never calls it; the version is part of the update). `/ready` answers 503 during a pause.

Never as in SGLang: with overlap scheduling, SGLang counts tokens for penalties one step late, counts the last prompt token
before the first sampled one, and forgets these counts and `min_new_tokens` when it retracts a request. It ignores the
seeds of requests without deterministic inference, misses a stop string that is sampled as more tokens than its own
encoding has, and freezes `/v1/loads` during a pause. The embedded server computes exact penalties, repeats seeds, finds
every stop string and reports the current load. An id outside the vocabulary, an empty text, a `logprob_start_len` below -1
or an unknown `load_format` crashes SGLang; the embedded server answers 400.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from agentrl.errors import ConfigError

ALL = "sglang"
"""The name that stands for every fault."""


class SGLangFault(StrEnum):
    """A fault of SGLang; the module's docstring describes each."""

    ABORT_DEADLOCK = "abort-deadlock"
    LOST_ABORTS = "lost-aborts"
    LATE_ABORTS = "late-aborts"
    COARSE_ABORTS = "coarse-aborts"
    APPLIED_REFUSAL = "applied-refusal"
    BLOCKING_HEALTH = "blocking-health"
    UPDATE_RACE = "update-race"
    STALE_PREFIX = "stale-prefix"
    UPDATE_COLLISION = "update-collision"


def parse_faults(names: Iterable[str]) -> frozenset[SGLangFault]:
    """Return the faults to switch on.

    Example:
        >>> parse_faults(["update-race"])
        frozenset({<SGLangFault.UPDATE_RACE: 'update-race'>})
        >>> parse_faults(["sglang"]) == frozenset(SGLangFault)
        True
    """
    chosen: set[SGLangFault] = set()
    known = {fault.value: fault for fault in SGLangFault}
    for name in names:
        if name == ALL:
            chosen.update(SGLangFault)
        elif name in known:
            chosen.add(known[name])
        else:
            raise ConfigError(f"--fault {name}: expected one of {', '.join([*sorted(known), ALL])}")
    return frozenset(chosen)
