"""Settings of the algorithm: what fills its slots, the size of a batch, and the staleness bound.

Invariant: a preset and the short fields (`clip_low` and others) only fill slots; what a run does is what its slots say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from agentrl.algo.advantages import ADVANTAGES
from agentrl.algo.corrections import CORRECTIONS, PROXIMALS
from agentrl.algo.filled import AlgorithmSlots, aggregate_of, filled
from agentrl.algo.guard import GUARDS
from agentrl.algo.keeps import KEEPS
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.presets import FORKS, OVERLONG, PRESETS, STALE
from agentrl.algo.shaping import SHAPINGS
from agentrl.algo.slots import Bundled, SlotValue, slot_name, slot_value, with_option
from agentrl.algo.terms import TERMS
from agentrl.config.base import Config

SHORT: Final = {
    "discount": ("advantage", "discount", 1.0),
    "normalize_std": ("advantage", "normalize_std", False),
    "clip_low": ("policy_loss", "clip_low", 0.2),
    "clip_high": ("policy_loss", "clip_high", 0.2),
}
"""Short fields: the slot and the option that they fill, and the value that says nothing."""
SHORT_CORRECTION: Final = ("behavior_weight_mode", "behavior_weight_cap")
PARTS: Final = {"proximal": PROXIMALS, "token": CORRECTIONS, "sequence": CORRECTIONS}
"""Parts of `correction`, each with the table of what fills it."""
LR_FACTOR: Final = 10
"""A critic's learning rate over that of the policy, where none is given: its head begins at 0."""


class CriticConfig(Config):
    """A critic, which predicts the return from the tokens before a token; the term `value` trains it."""

    model: Literal["head", "trunk", "own"] = "head"
    """`head`: a linear head on the hidden states of the policy, which it leaves alone. `trunk`: its loss trains the policy's
    weights too. `own`: a second copy of `model.path` with a head."""
    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of its AdamW; none: ten times `trainer.lr`."""
    warmup_steps: int = Field(default=0, ge=0)
    """First batches of the run, from which the critic learns alone and the policy stays as it is."""


class ReferenceConfig(Config):
    """A frozen policy near which the policy stays: by the term `kl`, by the reward, or by both."""

    refresh_every: int = Field(default=0, ge=0)
    """Batches after which the weights of then take its place, again and again; 0: those that the run began with stay."""
    reward_weight: float = Field(default=0.0, ge=0)
    """Factor of each turn's KL to the reference, which is taken off the turn's reward; 0: rewards stay."""
    reward_k: Literal[1, 2, 3] = 1
    """Estimator of that KL: d, d^2 / 2, or exp(-d) - 1 + d, d = log mu - log reference; only 1 is unbiased in a reward."""


def _slot(name: str, table: Mapping[str, Bundled], main: str | None = None) -> BeforeValidator:
    return BeforeValidator(lambda given: slot_value(f"algorithm.{name}", given, table, main))


def _correction(given: object) -> dict[str, SlotValue]:
    """Return the parts that were given; a bare name or function corrects tokens."""
    fields = cast("dict[str, object]", given) if isinstance(given, dict) else {"token": given}
    if not fields.keys() <= PARTS.keys():
        fields = {"token": given}
    return {part: slot_value(f"algorithm.correction.{part}", value, PARTS[part]) for part, value in fields.items()}


def _added_terms(given: object) -> tuple[SlotValue, ...]:
    several = cast("list[object]", list(given)) if isinstance(given, list | tuple) else [given]
    return tuple(slot_value("algorithm.terms", one, TERMS, main="weight") for one in several)


class AlgorithmConfig(Config):
    """What a step trains on, and how: slots, each filled by a bundled name, `module:function`, or either with options.

    Short fields fill slots: `preset` several, `discount` and `normalize_std` `advantage`, `clip_low` and `clip_high`
    `policy_loss`, `behavior_weight_cap` and `behavior_weight_mode` `correction`.
    """

    group_size: int = Field(default=8, ge=2)
    """Episodes of one task; their mean return is the baseline."""
    groups_per_step: int = Field(default=16, ge=1)
    """Groups in one optimizer batch."""
    keep: Annotated[SlotValue, _slot("keep", KEEPS, "max_groups_per_step")] = "all"
    """Which groups are trained: `all`, `mixed` (an advantage is not 0), or a function; `max_groups_per_step` bounds how many
    are played for a batch, after which the others fill it up."""
    shaping: Annotated[SlotValue, _slot("shaping", SHAPINGS)] = "none"
    """What changes rewards, or takes turns out of the loss, before the advantages: `none`, `soft_overlong` (a punishment for
    length), `mask_truncated` (what was cut off is not trained), or a function."""
    advantage: Annotated[SlotValue, _slot("advantage", ADVANTAGES)] = "episode"
    """`episode`: return minus group mean, for every token. `turn`: return-to-go with a leave-one-out group baseline."""
    normalize: Literal["none", "group", "batch", "running"] = "none"
    """Divide advantages by their root mean square over the tokens of the `group`, the `batch`, or, `running`, all batches so
    far, the older the less; a checkpoint holds what was seen."""
    policy_loss: Annotated[SlotValue, _slot("policy_loss", POLICY_LOSSES)] = "ppo"
    """The loss of a token from its ratio and advantage, such as `ppo`, `gspo` or `cispo`."""
    correction: Annotated[dict[str, SlotValue], BeforeValidator(_correction)] = Field(default_factory=dict[str, SlotValue])
    """For tokens that another policy sampled: `{token: mask, sequence: none, proximal: forward}`. `token` and `sequence`
    multiply; `proximal` is the center of the ratio: `forward`, `behavior`, or `versions`, which needs no forward pass."""
    terms: Annotated[tuple[SlotValue, ...], BeforeValidator(_added_terms)] = ()
    """What is added to the policy loss, each times its weight, such as `[{entropy: 0.001}]`."""
    aggregate: Annotated[str | dict[str, int], BeforeValidator(aggregate_of)] = "token"
    """The mean that makes one loss of those of all tokens: over tokens, over turns or samples of their means, or
    `{fixed: N}`, the sum over samples and N."""
    critic: CriticConfig | None = None
    """The model that predicts returns, for `turn_gae` and `token_gae`; none: there is none."""
    guard: Annotated[SlotValue, _slot("guard", GUARDS)] = "none"
    """What the learning rate of a minibatch is multiplied by, from its ratio of effective samples: `none` (1),
    `effective_samples`, or a function."""
    reference: ReferenceConfig | None = None
    """The frozen policy to which a KL is computed; none: there is none."""
    max_staleness: int = Field(default=2, ge=0)
    """Published versions a trained token may be behind; 0 is synchronous RL."""
    staleness_policy: Literal["wait", "mask", "drop"] = "wait"
    """Over-age tokens: `wait` for the oldest groups before moving the version, `mask` the tokens, or `drop` the group."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            preset: str = ...,
            group_size: int = ...,
            groups_per_step: int = ...,
            keep: object = ...,
            shaping: object = ...,
            advantage: object = ...,
            discount: float = ...,
            normalize_std: bool = ...,
            normalize: Literal["none", "group", "batch", "running"] = ...,
            policy_loss: object = ...,
            clip_low: float = ...,
            clip_high: float = ...,
            correction: object = ...,
            behavior_weight_cap: float = ...,
            behavior_weight_mode: Literal["clamp", "mask"] = ...,
            terms: object = ...,
            aggregate: object = ...,
            critic: object = ...,
            guard: object = ...,
            reference: object = ...,
            max_staleness: int = ...,
            staleness_policy: Literal["wait", "mask", "drop"] = ...,
        ) -> None: ...

    _preset_name: str | None = PrivateAttr(default=None)

    @property
    def preset_name(self) -> str | None:
        """The preset that the run file named; its slots are filled like others, so a resolved run file has none."""
        return self._preset_name

    @property
    def slots(self) -> AlgorithmSlots:
        """What fills the slots, with the defaults that depend on others."""
        return filled(
            keep=self.keep,
            shaping=self.shaping,
            advantage=self.advantage,
            policy_loss=self.policy_loss,
            correction=self.correction,
            terms=self.terms,
            aggregate=self.aggregate,
            guard=self.guard,
            group_size=self.group_size,
            critic=self.critic is not None,
            reference=self.reference is not None,
            priced=self.reference is not None and self.reference.reward_weight > 0,
        )

    @property
    def advantage_name(self) -> str:
        """What fills `advantage`."""
        return slot_name(self.advantage)

    @model_validator(mode="before")
    @classmethod
    def _fill_slots(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        fields = dict(cast("dict[str, Any]", given))
        preset = fields.pop("preset", None)
        if preset is not None and preset not in PRESETS:
            raise ValueError(f"algorithm.preset: there is no {preset!r}; expected {', '.join(PRESETS)}")
        return _without_short_fields(fields, {} if preset is None else PRESETS[preset].fields)

    @model_validator(mode="wrap")
    @classmethod
    def _remember_preset(cls, given: object, handler: ModelWrapValidatorHandler[AlgorithmConfig]) -> AlgorithmConfig:
        config = handler(given)
        if isinstance(given, dict):
            config._preset_name = cast("dict[str, str | None]", given).get("preset")
        return config

    @model_validator(mode="after")
    def _check_slots(self) -> AlgorithmConfig:
        advantage, most = self.slots.advantage, self.slots.max_groups_per_step
        if most is not None and most < self.groups_per_step:
            raise ValueError(
                f"algorithm.keep.max_groups_per_step: {most} is below algorithm.groups_per_step, {self.groups_per_step}, so "
                "nothing could be left out; raise it, such as to four times groups_per_step"
            )
        if self.normalize != "none" and "batch" in advantage.needs:
            raise ValueError(
                f"algorithm.normalize: {advantage.name} normalizes over the batch itself; remove normalize, or "
                "choose another advantage"
            )
        return self


def _without_short_fields(given: Mapping[str, Any], preset: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields that slots have: those of the preset, then those that were given, short ones in their slots."""
    fields = {**preset, **given}
    tables: dict[str, Mapping[str, Bundled]] = {"advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES}
    standard = {"advantage": "episode", "policy_loss": "ppo"}
    for short, (slot, option, silent) in SHORT.items():
        if short not in fields:
            continue
        number = fields.pop(short)
        value = slot_value(f"algorithm.{slot}", fields.get(slot, standard[slot]), tables[slot])
        bundled = tables[slot].get(slot_name(value))
        if bundled is None or option not in bundled.options.model_fields:
            if number == silent:
                continue
            takers = ", ".join(name for name, each in tables[slot].items() if option in each.options.model_fields)
            raise ValueError(
                f"algorithm.{short}: {slot} {slot_name(value)} has no option {option}; remove {short}, or choose one of "
                f"{takers}"
            )
        if slot in given and not isinstance(value, str) and option in value[slot_name(value)]:
            raise ValueError(f"algorithm.{short}: {slot} {slot_name(value)} has {option} of its own; remove one of the two")
        fields[slot] = with_option(value, option, number)
    short = {name: fields.pop(name) for name in SHORT_CORRECTION if name in fields}
    if short:
        parts = _correction(fields.get("correction", {}))
        if "token" in parts and "correction" in given:
            raise ValueError(
                f"algorithm.{next(iter(short))}: correction has a part `token` of its own; remove one of the two"
            )
        mode, cap = short.get("behavior_weight_mode", "mask"), short.get("behavior_weight_cap")
        if mode not in ("clamp", "mask"):
            raise ValueError(f"algorithm.behavior_weight_mode: expected clamp or mask, got {mode!r}")
        fields["correction"] = {**parts, "token": mode if cap is None else {mode: {"cap": cap}}}
    return fields


def preset_differences(algorithm: AlgorithmConfig, minibatches: int) -> list[str]:
    """Return a line for each difference, those that fields beside the preset make included; empty without a preset."""
    if algorithm.preset_name is None:
        return []
    preset = PRESETS[algorithm.preset_name]
    pure = AlgorithmConfig.model_validate({"group_size": algorithm.group_size, **preset.fields})
    lines = [line for line in preset.differences if not _is_gone(line, algorithm)]
    if preset.minibatches not in (None, minibatches):
        lines.append(f"trainer.minibatches is {minibatches}; in the source it is {preset.minibatches}")
    for name in ("keep", "shaping", "advantage", "normalize", "policy_loss", "correction", "terms", "aggregate", "guard"):
        mine, own = getattr(algorithm, name), getattr(pure, name)
        if mine != own:
            lines.append(f"algorithm.{name} is {mine}, as the run file says; in the preset it is {own}")
    return lines


def _is_gone(line: str, algorithm: AlgorithmConfig) -> bool:
    """Return whether fields of the run file take a difference away."""
    slots = algorithm.slots
    if line == OVERLONG:
        return slots.shaping.name == "soft_overlong"
    if line == FORKS:
        return slots.aggregate != "sequence"
    if line == STALE:
        return algorithm.max_staleness == 0 or slots.recomputes_proximal
    return False
