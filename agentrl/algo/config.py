"""Settings of the algorithm: what fills its slots, the size of a batch, and the staleness bound.

Invariant: what a run does is what its slots say, whatever filled them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from agentrl.algo.advantages import ADVANTAGES
from agentrl.algo.advantages.episodes import EpisodeOptions, PassAtKOptions
from agentrl.algo.corrections import CORRECTIONS, PROXIMALS, correction_parts
from agentrl.algo.group_slots import KEEPS, SHAPINGS
from agentrl.algo.guard import GUARDS
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.presets import FORKS, OVERLONG, PRESETS, STALE, without_short_fields
from agentrl.algo.slots import Bundled, Need, Slot, SlotValue, slot_name, slot_of, slot_value, valid_options
from agentrl.algo.terms import TERMS, WeightSchedule
from agentrl.config.base import Config

LR_FACTOR: Final = 10
"""A critic's learning rate over that of the policy, where none is given: its head begins at 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermSlot:
    """A term and its weight, which may change over the run."""

    slot: Slot
    weight: float
    final_weight: float
    over_steps: int
    """Batches over which the weight moves from the one to the other; 0: it stays."""

    def weight_at(self, step: int) -> float:
        """Return the weight in the batch after `step` batches.

        Example:
            >>> slot = Slot(field="algorithm.terms", name="my:f", given={}, bundled=None)
            >>> term = TermSlot(slot=slot, weight=1.0, final_weight=0.0, over_steps=4)
            >>> [term.weight_at(step) for step in (0, 2, 9)]
            [1.0, 0.5, 0.0]
        """
        if not self.over_steps:
            return self.weight
        return self.weight + (self.final_weight - self.weight) * min(step / self.over_steps, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSlots:
    """What fills the slots of a run."""

    keep: Slot
    max_groups_per_step: int | None
    """Groups that are played for one batch at most, of which the last are kept whatever they are; None: not given."""
    shaping: Slot
    """What changes groups before their advantages."""
    advantage: Slot
    policy_loss: Slot
    proximal: Slot
    token: Slot
    sequence: Slot
    terms: tuple[TermSlot, ...]
    aggregate: Literal["token", "turn", "sequence", "fixed"]
    guard: Slot
    """The factor of the learning rate."""
    fixed_length: int
    """Tokens of a sample by which `fixed` divides."""
    dense: bool
    """Whether tokens of advantage 0 have a gradient."""
    needs: frozenset[Need]

    @property
    def recomputes_proximal(self) -> bool:
        """Whether the log-probs before the first optimizer step are computed by a forward pass."""
        return self.proximal.name == "forward"

    @property
    def formula(self) -> str:
        """The loss of a minibatch; u = current/proximal and w = proximal/behavior."""
        unit = {
            "token": "mean over tokens",
            "turn": "mean over turns of the mean over tokens",
            "sequence": "mean over samples of the mean over tokens",
            "fixed": f"sum over tokens / (samples * {self.fixed_length})",
        }[self.aggregate]
        weights = [f"({each.formula})" for each in (self.token, self.sequence) if each.name != "none"]
        main = " * ".join([*weights, self.policy_loss.formula])
        more = "".join(f" + {_weight_words(term)} * {term.slot.formula}" for term in self.terms)
        return f"{unit} of [{main}]{more}"


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


def aggregate_of(given: object) -> object:
    """Return `token`, `turn`, `sequence` or `{fixed: N}`; raises ValueError for everything else."""
    fields = cast("dict[str, object]", given) if isinstance(given, dict) else {}
    length = fields.get("fixed")
    is_fixed = set(fields) == {"fixed"} and isinstance(length, int) and not isinstance(length, bool) and length > 0
    if given not in ("token", "turn", "sequence") and not is_fixed:
        raise ValueError(f"expected token, turn, sequence or {{fixed: N}} with N of at least 1, got {given!r}")
    return given


def _slot(name: str, table: Mapping[str, Bundled], main: str | None = None) -> BeforeValidator:
    return BeforeValidator(lambda given: slot_value(f"algorithm.{name}", given, table, main))


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
    correction: Annotated[dict[str, SlotValue], BeforeValidator(correction_parts)] = Field(
        default_factory=dict[str, SlotValue]
    )
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
        return _filled(self)

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
        return without_short_fields(fields, {} if preset is None else PRESETS[preset].fields)

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


def _filled(config: AlgorithmConfig) -> AlgorithmSlots:
    """Return the slots that the fields fill; ValueError: options do not fit, or slots contradict each other."""
    keep, most = _taken(config.keep, "max_groups_per_step")
    policy_loss, own_dense = _own_dense(config.policy_loss)
    correction, aggregate = config.correction, config.aggregate
    loss = slot_of("algorithm.policy_loss", policy_loss, POLICY_LOSSES)
    corrects = loss.bundled is not None and loss.bundled.corrects
    token = slot_of("algorithm.correction.token", correction.get("token", "none" if corrects else "mask"), CORRECTIONS)
    sequence = slot_of("algorithm.correction.sequence", correction.get("sequence", "none"), CORRECTIONS)
    for slot in (token, sequence):
        if corrects and slot.name != "none":
            raise ValueError(
                f"{slot.field}: {loss.name} weighs tokens by current / behavior itself, so "
                f"{slot.name} would count the difference twice; set it to none, or choose another policy_loss"
            )
    added = tuple(_term(value) for value in config.terms)
    if config.critic is not None and not any("values" in term.slot.needs for term in added):
        added = (*added, _term("value"))
    estimator = _estimator(config.advantage, config.group_size)
    chosen = slot_of("algorithm.keep", keep, KEEPS)
    if chosen.name == "all" and most is not None:
        raise ValueError(
            "algorithm.keep: all keeps each group, so max_groups_per_step does nothing; remove it, or choose mixed"
        )
    every = (estimator, loss, token, sequence, *(term.slot for term in added))
    _check_needs(every, config)
    return AlgorithmSlots(
        keep=chosen,
        max_groups_per_step=_count("algorithm.keep.max_groups_per_step", most),
        shaping=slot_of("algorithm.shaping", config.shaping, SHAPINGS),
        advantage=estimator,
        policy_loss=loss,
        proximal=slot_of("algorithm.correction.proximal", correction.get("proximal", "forward"), PROXIMALS),
        token=token,
        sequence=sequence,
        terms=added,
        aggregate=cast("Literal['token', 'turn', 'sequence']", aggregate) if isinstance(aggregate, str) else "fixed",
        guard=slot_of("algorithm.guard", config.guard, GUARDS),
        fixed_length=1 if isinstance(aggregate, str) else aggregate["fixed"],
        dense=own_dense or (loss.bundled is not None and loss.bundled.dense) or any(map(_is_dense, added)),
        needs=frozenset[Need]().union(*(each.needs for each in every)),
    )


def _estimator(value: SlotValue, group_size: int) -> Slot:
    slot = slot_of("algorithm.advantage", value, ADVANTAGES)
    if slot.bundled is None:
        return slot
    options = valid_options(slot.field, slot.name, slot.bundled.options, slot.given)
    if isinstance(options, PassAtKOptions) and options.k > group_size:
        raise ValueError(
            f"{slot.field}: {slot.name} grades {options.k} attempts together, and a group has {group_size}; give a k of at "
            f"most {group_size}, or raise algorithm.group_size"
        )
    if not isinstance(options, EpisodeOptions):
        return slot
    if options.group_size not in (None, group_size):
        raise ValueError(
            f"{slot.field}: {slot.name} has a group_size of {options.group_size}, and algorithm.group_size is {group_size}; "
            "remove the first, or set it to null to scale no advantages"
        )
    return replace(slot, given={"group_size": group_size, **slot.given})


def _taken(value: SlotValue, option: str) -> tuple[SlotValue, object]:
    """Return `value` without an option that the slot itself reads, and what was given for it."""
    if isinstance(value, str):
        return value, None
    name = slot_name(value)
    rest = {key: each for key, each in value[name].items() if key != option}
    return ({name: rest} if rest else name), value[name].get(option)


def _own_dense(value: SlotValue) -> tuple[SlotValue, bool]:
    """Return a policy loss without the option `dense`, which those of users have, and what was given for it."""
    name = slot_name(value)
    if ":" not in name:
        return value, False
    value, given = _taken(value, "dense")
    if given is None or isinstance(given, bool):
        return value, bool(given)
    raise ValueError(f"algorithm.policy_loss: {name}: expected true or false for dense, got {given!r}")


def _count(field: str, given: object) -> int | None:
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    raise ValueError(f"{field}: expected a number of at least 1, got {given!r}")


def _term(value: SlotValue) -> TermSlot:
    name = slot_name(value)
    numbers: dict[str, object] = {}
    rest = value
    for option in WeightSchedule.model_fields:
        rest, given = _taken(rest, option)
        if given is None:
            continue
        if not isinstance(given, int | float) or isinstance(given, bool):
            raise ValueError(f"algorithm.terms: {name}: expected a number for {option}, got {given!r}")
        numbers[option] = given
    bundled = TERMS.get(name)
    slot = slot_of("algorithm.terms", rest if bundled is None else value, TERMS)
    if bundled is None and "weight" not in numbers:
        raise ValueError(f"algorithm.terms: {name} has no weight; give {{{name}: {{weight: 0.01}}}}")
    kind = WeightSchedule if bundled is None else bundled.options
    schedule = valid_options("algorithm.terms", name, kind, numbers)
    assert isinstance(schedule, WeightSchedule), "every term has one"
    return TermSlot(
        slot=slot,
        weight=schedule.weight,
        final_weight=schedule.weight if schedule.final_weight is None else schedule.final_weight,
        over_steps=schedule.over_steps,
    )


def _is_dense(term: TermSlot) -> bool:
    return term.slot.bundled is None or term.slot.bundled.dense


def _weight_words(term: TermSlot) -> str:
    if not term.over_steps:
        return f"{term.weight:g}"
    return f"({term.weight:g} to {term.final_weight:g} over {term.over_steps} batches)"


def _check_needs(slots: Sequence[Slot], config: AlgorithmConfig) -> None:
    critic, reference = config.critic is not None, config.reference is not None
    priced = config.reference is not None and config.reference.reward_weight > 0
    for slot in slots:
        if "values" in slot.needs and not critic:
            raise ValueError(f"{slot.field}: {slot.name} needs a critic; add algorithm.critic: {{}}, or choose another")
        if "reference" in slot.needs and not reference:
            raise ValueError(
                f"{slot.field}: {slot.name} needs a reference model; add algorithm.reference: {{}}, or choose another"
            )
    if critic and "values" not in slots[0].needs:
        raise ValueError(
            f"algorithm.critic: the advantage {slots[0].name} uses no values; set algorithm.advantage to turn_gae or "
            "token_gae, or remove the critic"
        )
    if reference and not priced and not any("reference" in slot.needs for slot in slots):
        raise ValueError(
            "algorithm.reference: nothing uses it; add the term kl, such as terms: [{kl: 0.001}], set "
            "algorithm.reference.reward_weight, or remove it"
        )


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
