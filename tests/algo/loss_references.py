"""The bundled losses and corrections in plain Python floats, token by token, written from the formulas of their sources."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from agentrl.algo.corrections import CapOptions, GeometricOptions, IcePopOptions, M2poMaskOptions, TruncateOptions
from agentrl.algo.loss_batch import LossBatch
from agentrl.algo.losses import (
    AnchoredOptions,
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
from agentrl.algo.slots import NoOptions
from agentrl.algo.terms import EntropyOptions, KlOptions, LogRatioOptions, ValueOptions

MAX = 60.0


@dataclass(frozen=True)
class Token:
    current: float
    proximal: float
    behavior: float
    advantage: float
    turn: int
    sample: int
    entropy: float
    reference: float
    value: float
    value_before: float
    target: float
    age: int

    @property
    def ratio(self) -> float:
        return math.exp(min(max(self.current - self.proximal, -MAX), MAX))

    @property
    def weight(self) -> float:
        return math.exp(min(max(self.current - self.behavior, -MAX), MAX))

    @property
    def correction(self) -> float:
        return math.exp(min(max(self.proximal - self.behavior, -MAX), MAX))


def tokens_of(batch: LossBatch) -> list[Token]:
    names = ("current_logprobs", "proximal_logprobs", "behavior_logprobs", "advantages", "turn", "sample")
    more = ("entropy", "reference_logprobs", "values", "proximal_values", "value_targets", "ages")
    columns = [getattr(batch, name).tolist() for name in (*names, *more)]
    return [Token(*row) for row in zip(*columns, strict=True)]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def segment(tokens: Sequence[Token], token: Token, name: str) -> list[Token]:
    return [one for one in tokens if getattr(one, name) == getattr(token, name)]


def ppo(t: Token, tokens: Sequence[Token], o: PpoOptions) -> float:
    return -clipped(t.ratio, t.advantage, o.clip_low, o.clip_high)


def dual_clip(t: Token, tokens: Sequence[Token], o: DualClipOptions) -> float:
    objective = clipped(t.ratio, t.advantage, o.clip_low, o.clip_high)
    return -max(objective, o.floor * t.advantage) if t.advantage < 0 else -objective


def gspo(t: Token, tokens: Sequence[Token], o: GspoOptions) -> float:
    members = segment(tokens, t, o.segment)
    shared = math.exp(sum(one.current - one.proximal for one in members) / len(members))
    return -clipped(shared, t.advantage, o.clip_low, o.clip_high)


def cispo(t: Token, tokens: Sequence[Token], o: CispoOptions) -> float:
    return -t.advantage * min(t.ratio, 1 + o.clip_high) * t.current


def sapo(t: Token, tokens: Sequence[Token], o: SapoOptions) -> float:
    temperature = o.positive if t.advantage > 0 else o.negative
    return -t.advantage * 4 / temperature / (1 + math.exp(-temperature * (t.ratio - 1)))


def dppo_tv(t: Token, tokens: Sequence[Token], o: DppoTvOptions) -> float:
    moved = math.exp(t.current) - math.exp(t.behavior)
    if (t.advantage > 0 and moved > o.high) or (t.advantage <= 0 and moved < -o.low):
        return 0.0
    return -t.advantage * min(t.weight, o.cap) * t.current


def anchored(t: Token, tokens: Sequence[Token], o: AnchoredOptions) -> float:
    if t.advantage >= 0:
        return ppo(t, tokens, o)
    allowed = o.low if o.low_per_version is None else min(o.low, o.low_per_version * (1 + t.age))
    left = 1 - (math.exp(t.behavior) - math.exp(t.current)) / allowed
    return -t.advantage * clip(2 * left if o.plateau else left, -1, 1) * t.ratio * t.current


def vespo(t: Token, tokens: Sequence[Token], o: VespoOptions) -> float:
    total = sum(clip(one.current - one.behavior, -20, 20) for one in segment(tokens, t, o.segment))
    product = math.exp(clip(total, math.log(1e-8), 20))
    k, decay = (o.power_positive, o.decay_positive) if t.advantage >= 0 else (o.power_negative, o.decay_negative)
    return -t.advantage * math.exp(decay) * product**k * math.exp(-decay * product) * t.current


def topr(t: Token, tokens: Sequence[Token], o: NoOptions) -> float:
    return -t.advantage * (1.0 if t.advantage > 0 else clip(t.weight, 0, 1)) * t.current


def kimi(t: Token, tokens: Sequence[Token], o: KimiOptions) -> float:
    return -t.advantage * t.current + o.tau / 2 * (t.current - t.behavior) ** 2


def reinforce(t: Token, tokens: Sequence[Token], o: NoOptions) -> float:
    return -t.advantage * t.current


def m2po(t: Token, tokens: Sequence[Token], o: M2poOptions) -> float:
    """Bisects for the threshold instead of solving for it."""
    members = segment(tokens, t, "sample") if o.over == "sample" else list(tokens)
    harmful = [one for one in members if one.advantage * (one.current - one.proximal) > 0]
    squares = [(one.current - one.proximal) ** 2 for one in harmful]
    low, high = 0.0, MAX
    if not squares or sum(squares) / len(squares) <= o.budget:
        low = MAX
    for _ in range(200):
        middle = (low + high) / 2
        inside = sum(min(square, middle**2) for square in squares) <= o.budget * len(squares)
        low, high = (middle, high) if inside else (low, middle)
    bounds = min(math.exp(-low), 1 - o.least_low), max(math.exp(low), 1 + o.least_high)
    return -min(t.ratio * t.advantage, clip(t.ratio, *bounds) * t.advantage)


def entropy(t: Token, tokens: Sequence[Token], o: EntropyOptions) -> float:
    return -t.entropy


def kl(t: Token, tokens: Sequence[Token], o: KlOptions) -> float:
    d = t.current - t.reference
    return {1: d, 2: d * d / 2, 3: math.exp(-d) - 1 + d}[o.k]


def log_ratio(t: Token, tokens: Sequence[Token], o: LogRatioOptions) -> float:
    return (t.current - t.behavior) ** 2


def value(t: Token, tokens: Sequence[Token], o: ValueOptions) -> float:
    bounded = t.value if o.clip is None else clip(t.value, t.value_before - o.clip, t.value_before + o.clip)
    return max((t.value - t.target) ** 2, (bounded - t.target) ** 2) / 2


def none(t: Token, tokens: Sequence[Token], o: NoOptions) -> float:
    return 1.0


def clamp(t: Token, tokens: Sequence[Token], o: CapOptions) -> float:
    return min(t.correction, o.cap)


def mask(t: Token, tokens: Sequence[Token], o: CapOptions) -> float:
    return t.correction if t.correction <= o.cap else 0.0


def icepop(t: Token, tokens: Sequence[Token], o: IcePopOptions) -> float:
    return t.correction if o.low <= t.correction <= o.high else 0.0


def sequence_truncate(t: Token, tokens: Sequence[Token], o: TruncateOptions) -> float:
    return min(math.prod(one.correction for one in segment(tokens, t, o.segment)), o.cap)


def geometric_mask(t: Token, tokens: Sequence[Token], o: GeometricOptions) -> float:
    members = segment(tokens, t, o.segment)
    return float(o.low <= math.prod(one.correction for one in members) ** (1 / len(members)) <= o.high)


def m2po_mask(t: Token, tokens: Sequence[Token], o: M2poMaskOptions) -> float:
    """Takes out the largest one after another, as the definition says."""
    members = segment(tokens, t, "sample") if o.over == "sample" else list(tokens)
    left = sorted(members, key=lambda one: (one.proximal - one.behavior) ** 2)
    while len(left) > 1 and sum((one.proximal - one.behavior) ** 2 for one in left) / len(left) > o.budget:
        left.pop()
    return float(any(one is t for one in left))


def values_of(function: Callable[..., float], batch: LossBatch, options: BaseModel) -> list[float]:
    tokens = tokens_of(batch)
    return [function(token, tokens, options) for token in tokens]
