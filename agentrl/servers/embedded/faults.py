"""Where SGLang 0.5.23 misleads, hangs or loses: what the embedded server does instead, and how to make it do the same.

Invariant: without faults the embedded server loses no token, leaves no call without an answer, and never refuses a call
that it carried out. `agentrl serve --fault NAME` switches one fault on, `--fault sglang` all of them, so that the guards of
a client can be tested without the real server. tests/conformance/test_faults.py shows that each fault misleads a naive
client and does not mislead agentrl's.

Off by default, switchable:

- `abort-deadlock`: a pause of mode abort after one of mode in_place waits for ever, `/continue_generation` with it; only a
  restart helps. Here it ends the requests. Guard: agentrl pauses by retract or in_place, and aborts nothing while paused.
- `lost-aborts`: a request that came during a pause cannot be aborted: 200, and it runs to its end; later aborts by its id
  are ignored too. Here it ends at once. Guard: nothing is sent while paused; calls wait at the client.
- `late-aborts`: an abort under an in_place pause is delivered after continue. Here at once. Guard: aborts wait too.
- `coarse-aborts`: an unstreamed request that is aborted after a retract loses up to 49 tokens. Here none. Guard: as before.
- `applied-refusal`: an update with flush_cache under an in_place pause answers 400, but weights and spans are the new ones,
  while `/model_info` keeps the former version. Here nothing changes. Guard: flush_cache goes with retract only, and the
  version is read back.
- `blocking-health`: `/health` takes a second, and while paused blocks for 20 s and answers 503. Here 200 at once. Guard:
  `/model_info` is the sign of life.
- `update-race`: an update sent before the pause waits, through the pause, for the running requests to end. Here it is
  applied as soon as the pause holds. Guard: agentrl pauses first, and refuses to update otherwise.
- `stale-prefix`: after an update without flush, prefixes computed by the former weights are used again. Here never. Guard:
  in in_place mode the cache salt of each request carries the version and checksum of the weights.
- `update-collision`: two updates from disk at once during a pause end SGLang's whole server, also where the client of the
  first has given up, which ends no update. With the fault control calls are never answered again, and as at SGLang
  `/server_info` answers after the update that is under way. Here the second waits for the first. Guard: after an update
  that was given up, agentrl waits for two answers of `/server_info` before it asks for another.

Always, as SGLang: an abort ends every request whose id begins with the given one (guard: ids of one length; at SGLang a
disconnect does so too, here it ends its own request only); a waiting or retracted request that is aborted gets a short
`meta_info` (guard: nothing more of it is read); `/update_weight_version` aborts everything unless told not to (guard: never
sent, the version travels in the update); `/ready` is 503 in a pause.

Neither copied nor switchable. With overlap scheduling SGLang counts tokens for penalties one late, with the last of the
prompt before the first sampled one, and forgets them and `min_new_tokens` when a request is retracted; seeds of requests
are ignored without deterministic inference; a stop string sampled as more tokens than its own encoding has is not seen;
`/v1/loads` stands still in a pause. Here penalties are exact, seeds repeat, stop strings are always seen, loads are live.
An id outside the vocabulary, an empty text, a `logprob_start_len` below -1 or an unknown `load_format` ends SGLang's whole
server; here each is a 400.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from agentrl.errors import ConfigError

ALL = "sglang"
"""The name that stands for every hazard."""


class SGLangFault(StrEnum):
    """A way of SGLang's to mislead a client; the module says of each what it does."""

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
    """Return the hazards to switch on.

    Raises:
        ConfigError: for an unknown name; lists the known ones.

    Example:
        >>> parse_faults(["update-race"])
        frozenset({<SGLangFault.UPDATE_RACE: 'update-race'>})
        >>> parse_faults(["sglang"]) == frozenset(SGLangFault)
        True
    """
    chosen: set[SGLangFault] = set()
    known = {hazard.value: hazard for hazard in SGLangFault}
    for name in names:
        if name == ALL:
            chosen.update(SGLangFault)
        elif name in known:
            chosen.add(known[name])
        else:
            raise ConfigError(f"--fault {name}: expected one of {', '.join([*sorted(known), ALL])}")
    return frozenset(chosen)
