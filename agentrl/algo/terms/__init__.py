"""The bundled terms, which are added to a policy loss, by name. No torch here.

Invariant: a function gets a `LossBatch` and its options, and returns the loss of each token before its weight. Each is
dense: tokens of advantage 0 have a gradient.
"""

from __future__ import annotations

from agentrl.algo.slots import Bundled
from agentrl.algo.terms.term_options import EntropyOptions, KlOptions, LogRatioOptions, ValueOptions

TERMS: dict[str, Bundled] = {
    "entropy": Bundled(
        function="agentrl.algo.terms.penalties:entropy",
        options=EntropyOptions,
        formula="-H",
        needs=frozenset({"entropy"}),
        dense=True,
    ),
    "kl": Bundled(
        function="agentrl.algo.terms.penalties:kl",
        options=KlOptions,
        formula="KL(pi || reference), estimator {k}",
        needs=frozenset({"reference"}),
        dense=True,
    ),
    "log_ratio": Bundled(
        function="agentrl.algo.terms.penalties:log_ratio",
        options=LogRatioOptions,
        formula="(log pi - log mu)^2",
        dense=True,
    ),
    "value": Bundled(
        function="agentrl.algo.terms.critics:value_error",
        options=ValueOptions,
        formula="(V - target)^2 / 2, V within {clip} of its value before the batch",
        needs=frozenset({"values"}),
        dense=True,
    ),
}
