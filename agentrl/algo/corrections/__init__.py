"""The bundled corrections for the policy that sampled, and the centres of the trust region, by name. No torch here.

Invariant: a correction returns weights without a gradient and a mask; those of two corrections multiply, so that a token one
of them drops is dropped. w is proximal / behavior here.
"""

from __future__ import annotations

from agentrl.algo.corrections.correction_options import (
    CapOptions,
    GeometricOptions,
    IcePopOptions,
    M2poMaskOptions,
    TruncateOptions,
)
from agentrl.algo.slots import Bundled

CORRECTIONS: dict[str, Bundled] = {
    "none": Bundled(function="agentrl.algo.corrections.tokens:none", formula="1"),
    "clamp": Bundled(function="agentrl.algo.corrections.tokens:clamp", options=CapOptions, formula="min(w, {cap})"),
    "mask": Bundled(function="agentrl.algo.corrections.tokens:mask", options=CapOptions, formula="w, 0 above {cap}"),
    "icepop": Bundled(
        function="agentrl.algo.corrections.tokens:icepop", options=IcePopOptions, formula="w, 0 outside {low} to {high}"
    ),
    "m2po_mask": Bundled(
        function="agentrl.algo.corrections.segments:m2po_mask",
        options=M2poMaskOptions,
        formula="1, 0 for the largest (log w)^2 until the mean over the {over} is {budget}",
    ),
    "sequence_truncate": Bundled(
        function="agentrl.algo.corrections.segments:sequence_truncate",
        options=TruncateOptions,
        formula="min(product of w over the {segment}, {cap})",
    ),
    "geometric_mask": Bundled(
        function="agentrl.algo.corrections.segments:geometric_mask",
        options=GeometricOptions,
        formula="1, 0 where exp(mean of log w over the {segment}) is outside {low} to {high}",
    ),
}

PROXIMALS: dict[str, Bundled] = {
    "forward": Bundled(
        function="agentrl.algo.corrections.proximal:forward", formula="log pi under the weights before the step"
    ),
    "versions": Bundled(
        function="agentrl.algo.corrections.proximal:versions", formula="log mu + a (log pi - log mu), a = age / (age + 1)"
    ),
    "behavior": Bundled(function="agentrl.algo.corrections.proximal:behavior", formula="log mu"),
}
"""Centres of the trust region. `forward` alone needs a forward pass of its own."""
