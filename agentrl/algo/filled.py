"""The slots of one run, each filled, and what together they need and forbid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from agentrl.algo.advantages import ADVANTAGES
from agentrl.algo.advantages.episodes import EpisodeOptions, PassAtKOptions
from agentrl.algo.corrections import CORRECTIONS, PROXIMALS
from agentrl.algo.guard import GUARDS
from agentrl.algo.keeps import KEEPS
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.shaping import SHAPINGS
from agentrl.algo.slots import Need, Slot, SlotValue, slot_name, slot_of, valid_options
from agentrl.algo.terms import TERMS, WeightSchedule


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


def aggregate_of(given: object) -> object:
    """Return `token`, `turn`, `sequence` or `{fixed: N}`; raises ValueError for everything else."""
    fields = cast("dict[str, object]", given) if isinstance(given, dict) else {}
    length = fields.get("fixed")
    is_fixed = set(fields) == {"fixed"} and isinstance(length, int) and not isinstance(length, bool) and length > 0
    if given not in ("token", "turn", "sequence") and not is_fixed:
        raise ValueError(f"expected token, turn, sequence or {{fixed: N}} with N of at least 1, got {given!r}")
    return given


def filled(
    *,
    keep: SlotValue,
    shaping: SlotValue,
    advantage: SlotValue,
    policy_loss: SlotValue,
    correction: Mapping[str, SlotValue],
    terms: Sequence[SlotValue],
    aggregate: str | Mapping[str, int],
    guard: SlotValue,
    group_size: int,
    critic: bool = False,
    reference: bool = False,
    priced: bool = False,
) -> AlgorithmSlots:
    """Return the slots that the run file's values fill; `priced`: turns pay for their KL to the reference.

    Raises:
        ValueError: a name does not exist, options do not fit, or slots contradict each other.
    """
    keep, most = _taken(keep, "max_groups_per_step")
    policy_loss, own_dense = _own_dense(policy_loss)
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
    added = tuple(_term(value) for value in terms)
    if critic and not any("values" in term.slot.needs for term in added):
        added = (*added, _term("value"))
    estimator = _estimator(advantage, group_size)
    chosen = slot_of("algorithm.keep", keep, KEEPS)
    if chosen.name == "all" and most is not None:
        raise ValueError(
            "algorithm.keep: all keeps each group, so max_groups_per_step does nothing; remove it, or choose mixed"
        )
    every = (estimator, loss, token, sequence, *(term.slot for term in added))
    _check_needs(every, critic=critic, reference=reference, priced=priced)
    return AlgorithmSlots(
        keep=chosen,
        max_groups_per_step=_count("algorithm.keep.max_groups_per_step", most),
        shaping=slot_of("algorithm.shaping", shaping, SHAPINGS),
        advantage=estimator,
        policy_loss=loss,
        proximal=slot_of("algorithm.correction.proximal", correction.get("proximal", "forward"), PROXIMALS),
        token=token,
        sequence=sequence,
        terms=added,
        aggregate=cast("Literal['token', 'turn', 'sequence']", aggregate) if isinstance(aggregate, str) else "fixed",
        guard=slot_of("algorithm.guard", guard, GUARDS),
        fixed_length=1 if isinstance(aggregate, str) else aggregate["fixed"],
        dense=own_dense or (loss.bundled is not None and loss.bundled.dense) or any(map(_is_dense, added)),
        needs=frozenset[Need]().union(
            *(each.needs for each in (estimator, loss, token, sequence, *(t.slot for t in added)))
        ),
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


def _check_needs(slots: Sequence[Slot], *, critic: bool, reference: bool, priced: bool) -> None:
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
