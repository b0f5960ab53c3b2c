"""The slots of an algorithm: what fills them, by name or as `module:function`. No torch: the driver reads them too.

Invariant: the driver reads the tables of all slots, so no module with a table imports torch.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar, cast

from pydantic import BaseModel, ValidationError

from agentrl.config.base import Config
from agentrl.errors import ConfigError
from agentrl.support.user_code import import_user_object

Function = TypeVar("Function", bound=Callable[..., object])
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
Need: TypeAlias = Literal["entropy", "reference", "values", "batch", "logprobs", "advantages"]
"""A thing that is computed only where a slot needs it; `batch`: the spread of all groups of a step; `logprobs`: those of the
sampled tokens under the trainer's weights, before the advantages; `advantages`: those of one group, before it is kept."""
SlotValue: TypeAlias = str | dict[str, dict[str, object]]
"""A function, as the run file names it, or with options: `{name: {option: value}}`."""


class NoOptions(Config):
    """Options of a function that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundled:
    """A function that comes with agentrl, as the table of its slot lists it."""

    function: Callable[..., object]
    options: type[BaseModel] = NoOptions
    """Model of its options."""
    formula: str = ""
    """Formula of one token, for `--dry-run`; `{name}` is an option."""
    needs: frozenset[Need] = frozenset()
    dense: bool = False
    """Whether tokens of advantage 0 have a gradient."""
    corrects: bool = False
    """Whether a policy loss weighs tokens by current / behavior itself, so that a correction beside it counts twice."""


def row(
    table: dict[str, Bundled],
    name: str,
    formula: str,
    *,
    needs: Sequence[Need] = (),
    dense: bool = False,
    corrects: bool = False,
) -> Callable[[Function], Function]:
    """Enter the function below into the table of its slot, with what the fields of `Bundled` say of it.

    Its options are those that its second parameter is annotated with.
    """

    def enter(function: Function) -> Function:
        options = _options_model("algorithm", name, function, _parameters("algorithm", name, function))
        table[name] = Bundled(
            function=function, options=options, formula=formula, needs=frozenset(needs), dense=dense, corrects=corrects
        )
        return function

    return enter


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A filled slot; the options of a bundled function are valid, those of a user's one are checked where it is loaded."""

    field: str
    """The run file's field, for messages."""
    name: str
    """A bundled name, or `module:function`."""
    given: Mapping[str, object]
    """The options that were given."""
    bundled: Bundled | None
    """None: the function is a user's."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset() if self.bundled is None else self.bundled.needs

    @property
    def formula(self) -> str:
        """The formula of one token, with the options in force."""
        if self.bundled is None:
            return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.given.items())})"
        options = self.bundled.options.model_validate(dict(self.given))
        return (self.bundled.formula or self.name).format(**dict(options))

    def load(self, kind: type[Result]) -> Loaded[Result]:
        """Import the function, whose results are of `kind`, and make its options.

        Raises:
            ConfigError: there is no such function, or it does not take these options.
        """
        found = self._users_function() if self.bundled is None else self.bundled.function
        function = cast("Callable[..., Result]", found)
        takes = _parameters(self.field, self.name, function)
        model = self.bundled.options if self.bundled is not None else _options_model(self.field, self.name, function, takes)
        options = valid_options(self.field, self.name, model, self.given)
        return Loaded(slot=self, function=function, options=options, takes_options=len(takes) > 1, kind=kind)

    def _users_function(self) -> Callable[..., object]:
        try:
            found = import_user_object(self.name, self.field)
        except ConfigError as error:
            if not isinstance(error.__cause__, ModuleNotFoundError):
                raise
            raise ConfigError(
                f"{error}; {self.name} is imported where it runs, a loss in the process of the trainer: put its module into "
                "the directory in which the run starts, or install it there"
            ) from error
        if not callable(found):
            raise ConfigError(f"{self.field}: {self.name} is no function but a {type(found).__name__}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[Result_co]):
    """A function of a slot, ready to be called."""

    slot: Slot
    function: Callable[..., Result_co]
    options: BaseModel
    takes_options: bool
    kind: type[Result_co]

    @property
    def where(self) -> str:
        """The beginning of a message about the function."""
        return f"{self.slot.field}: {self.slot.name}"

    def __call__(self, subject: object, *more: object) -> Result_co:
        """Return the function's result for a batch or a group.

        Raises:
            ConfigError: the function raised, or returned something else than `kind`.
        """
        arguments = (subject, self.options, *more) if self.takes_options else (subject,)
        try:
            result = self.function(*arguments)
        except Exception as error:
            raise ConfigError(f"{self.where} raised {type(error).__name__}: {error}; fix the function") from error
        if not isinstance(result, self.kind):
            raise ConfigError(f"{self.where} returned a {type(result).__name__}; return a {self.kind.__name__}")
        return result


def as_loaded(field: str, function: Callable[..., Result], options: BaseModel | None, kind: type[Result]) -> Loaded[Result]:
    """Return a function that is at hand as a slot holds it; `options` of None are the defaults of its model.

    Raises:
        ConfigError: the function has no signature, or no model of its options.
    """
    slot = Slot(field=field, name=getattr(function, "__name__", type(function).__name__), given={}, bundled=None)
    takes = _parameters(field, slot.name, function)
    if options is None:
        options = valid_options(field, slot.name, _options_model(field, slot.name, function, takes), {})
    return Loaded(slot=slot, function=function, options=options, takes_options=len(takes) > 1, kind=kind)


def slot_of(field: str, value: SlotValue, table: Mapping[str, Bundled]) -> Slot:
    """Return the slot that `value` fills from `table`.

    Raises:
        ValueError: there is no such name, or the options do not fit.
    """
    name, given = (value, {}) if isinstance(value, str) else next(iter(value.items()))
    bundled = table.get(name)
    if bundled is None and ":" not in name:
        raise ValueError(f"{field}: there is no {name!r}; expected {', '.join(table)}, or module:function of your own")
    if bundled is not None:
        try:
            valid_options(field, name, bundled.options, given)
        except ConfigError as error:
            raise ValueError(str(error)) from None
    return Slot(field=field, name=name, given=given, bundled=bundled)


def slot_value(field: str, given: object, table: Mapping[str, Bundled], main: str | None = None) -> SlotValue:
    """Return what a run file gives for a slot in its one form; a bare value is the option `main`, or the first one."""
    if isinstance(given, str) and given:
        return given
    pairs = list(cast("dict[str, object]", given).items()) if isinstance(given, dict) else []
    if len(pairs) != 1:
        raise ValueError(f"{field}: expected a name, or {{name: {{option: value}}}} with one name, got {given!r}")
    [(name, options)] = pairs
    if options is None or options == {}:
        return name
    if isinstance(options, dict):
        return {name: dict(cast("dict[str, object]", options))}
    first = main or (next(iter(table[name].options.model_fields), None) if name in table else None)
    if first is None:
        raise ValueError(f"{field}: {name} has no option that {options!r} could be; give {{{name}: {{option: value}}}}")
    return {name: {first: options}}


def with_option(value: SlotValue, option: str, given: object) -> SlotValue:
    """Return `value` with one option more."""
    name, options = (value, {}) if isinstance(value, str) else next(iter(value.items()))
    return {name: {**options, option: given}}


def slot_name(value: SlotValue) -> str:
    """Return the name of the function that fills a slot."""
    return value if isinstance(value, str) else next(iter(value))


def load_without_torch(slot: Slot, kind: type[Result]) -> Loaded[Result]:
    """Load a function that runs in the driver.

    Raises:
        ConfigError: as `Slot.load`, or its module imports torch.
    """
    before = "torch" in sys.modules
    loaded = slot.load(kind)
    of_user = slot.name.partition(":")[0]
    module = sys.modules[of_user if slot.bundled is None else slot.bundled.function.__module__]
    names = [name for name, value in vars(module).items() if _is_of_torch(value)]
    if names or ("torch" in sys.modules and not before):
        raise ConfigError(
            f"{slot.field}: {slot.name} runs in the driver, which has no torch, but its module imports it"
            f"{f' ({names[0]})' if names else ''}; use numpy, and keep losses in another module"
        )
    return loaded


def _is_of_torch(value: object) -> bool:
    module = getattr(value, "__name__", "") if inspect.ismodule(value) else getattr(value, "__module__", "")
    return isinstance(module, str) and module.partition(".")[0] == "torch"


def _parameters(field: str, name: str, function: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        every = list(inspect.signature(function, eval_str=False).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{field}: {name} has no signature: {error}; give a plain function") from error
    positional = [each for each in every if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if not positional:
        raise ConfigError(f"{field}: {name} takes no argument; expected {name}(batch or group, options)")
    return positional


def _options_model(
    field: str, name: str, function: Callable[..., object], parameters: list[inspect.Parameter]
) -> type[BaseModel]:
    if len(parameters) < 2:
        return NoOptions
    try:
        model = typing.get_type_hints(function).get(parameters[1].name)
    except Exception as error:
        raise ConfigError(f"{field}: the annotations of {name} cannot be read: {error}") from error
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise ConfigError(
            f"{field}: annotate the parameter {parameters[1].name!r} of {name} with the pydantic model of its "
            f"options, got {model!r}"
        )
    return model


def valid_options(field: str, name: str, model: type[BaseModel], given: Mapping[str, object]) -> BaseModel:
    """Return the options `given` for the function `name`; raises ConfigError, which names what does not fit."""
    unknown = [key for key in given if key not in model.model_fields]
    if unknown:
        known = ", ".join(model.model_fields) or "none"
        raise ConfigError(f"{field}: {name} has no option {unknown[0]!r}; its options: {known}")
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join([name, *map(str, first["loc"])])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{field}: {where}: {message[0].lower()}{message[1:]}, got {first['input']!r}") from None
