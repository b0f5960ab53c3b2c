"""The bundled policy losses, by name. No torch here: the functions are loaded in the trainer's worker.

Invariant: a function gets a `LossBatch` and its options, and returns the loss of each token before weights and aggregation.
r is current / proximal, w is current / behavior, A the advantage, sg stops the gradient.
"""

from __future__ import annotations

from agentrl.algo.losses.loss_options import (
    CispoOptions,
    DppoTvOptions,
    DualClipOptions,
    GspoOptions,
    KimiOptions,
    M2poOptions,
    PpoOptions,
    SapoOptions,
    VespoOptions,
)
from agentrl.algo.slots import Bundled

POLICY_LOSSES: dict[str, Bundled] = {
    "ppo": Bundled(
        function="agentrl.algo.losses.clipped:ppo",
        options=PpoOptions,
        formula="-min(r A, clip(r, 1 - {clip_low}, 1 + {clip_high}) A)",
    ),
    "dual_clip": Bundled(
        function="agentrl.algo.losses.clipped:dual_clip",
        options=DualClipOptions,
        formula="-min(r A, clip(r, 1 - {clip_low}, 1 + {clip_high}) A), at least {floor} A where A < 0",
    ),
    "gspo": Bundled(
        function="agentrl.algo.losses.clipped:gspo",
        options=GspoOptions,
        formula="-min(s A, clip(s, 1 - {clip_low}, 1 + {clip_high}) A), s = exp(mean of log r over the {segment})",
    ),
    "m2po": Bundled(
        function="agentrl.algo.losses.clipped:m2po",
        options=M2poOptions,
        formula="-min(r A, clip(r, exp(-t), exp(t)) A), t: mean of min((log r)^2, t^2) = {budget} over harmful tokens",
    ),
    "cispo": Bundled(
        function="agentrl.algo.losses.weighted:cispo",
        options=CispoOptions,
        formula="-A sg(min(r, 1 + {clip_high})) log pi",
    ),
    "sapo": Bundled(
        function="agentrl.algo.losses.clipped:sapo",
        options=SapoOptions,
        formula="-A (4 / t) sigmoid(t (r - 1)), t = {positive} where A > 0, else {negative}",
    ),
    "dppo_tv": Bundled(
        function="agentrl.algo.losses.weighted:dppo_tv",
        options=DppoTvOptions,
        formula="-A sg(min(w, {cap})) log pi, 0 where A > 0 and pi - mu > {high}, or A <= 0 and pi - mu < -{low}",
        corrects=True,
    ),
    "vespo": Bundled(
        function="agentrl.algo.losses.weighted:vespo",
        options=VespoOptions,
        formula="-A sg(exp(l) W^k exp(-l W)) log pi, W = product of w over the {segment}",
        corrects=True,
    ),
    "topr": Bundled(
        function="agentrl.algo.losses.weighted:topr",
        formula="-A log pi where A > 0, else -A sg(min(w, 1)) log pi",
        corrects=True,
    ),
    "kimi": Bundled(
        function="agentrl.algo.losses.weighted:kimi",
        options=KimiOptions,
        formula="-A log pi + {tau} / 2 (log w)^2",
        dense=True,
        corrects=True,
    ),
    "reinforce": Bundled(function="agentrl.algo.losses.weighted:reinforce", formula="-A log pi"),
}
