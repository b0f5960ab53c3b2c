"""Plays the calls of a task of tau2 on the package's own tools and databases, in a worker process.

Invariant: a state follows from the task and the calls alone, which are made again for each question. The policy
reads the error of a tool; an error of a reference action is a fault of the data.
"""

from __future__ import annotations

import copy
import functools
import gzip
import importlib
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from docstring_parser import parse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from agentrl.types import JsonValue
from agentrl_envs.data_packages import INSPECT_EVALS
from agentrl_envs.tau2.stand_ins import ToolFailure, forget_objects, kept_object, put_in_place

_TAU2: Final = "inspect_evals.tau2"


def load_tau2_player() -> Callable[..., JsonValue]:
    """Return the function that a worker runs."""
    put_in_place(INSPECT_EVALS.distribution())
    return play_domain


def play_domain(
    domain: str, task: Mapping[str, Any] | None, calls: Sequence[Sequence[Any]], said: str, is_over: bool
) -> JsonValue:
    """Return the schemas of a domain's tools; or the results of the calls and, of an episode that is over, the grade.

    Args:
        domain: a key of `DOMAINS`.
        task: `criteria` and `initial_state`; None asks for the tools.
        calls: name and arguments of the policy's calls.
        said: the texts of the policy.
        is_over: whether the grade is asked for.
    """
    world = _WORLDS[domain]()
    if task is None:
        return cast("JsonValue", [tool.schema for tool in world.tools.values()])
    world.begin(task.get("initial_state"))
    results = [world.call(name, arguments) for name, arguments in calls]
    problem = world.problem(task, calls, said) if is_over else None
    return {"results": cast("JsonValue", results), "is_right": is_over and problem is None, "problem": problem}


class _Tool:
    """A tool of the package: its schema, and calls with checked arguments."""

    def __init__(self, make: Callable[[], Callable[..., Coroutine[Any, Any, object]]], name: str) -> None:
        self._execute = make()
        written = parse(self._execute.__doc__ or "")
        texts = {each.arg_name: each.description for each in written.params}
        fields: dict[str, Any] = {}
        for each in inspect.signature(self._execute, eval_str=True).parameters.values():
            default = ... if each.default is each.empty else each.default
            fields[each.name] = (each.annotation, Field(default, description=texts.get(each.name)))
        self._arguments: type[BaseModel] = create_model("arguments", __config__=ConfigDict(extra="forbid"), **fields)
        description = "\n".join(filter(None, (written.short_description, written.long_description)))
        described = {"name": name, "description": description, "parameters": self._arguments.model_json_schema()}
        self.schema = {"type": "function", "function": described}

    def call(self, arguments: Mapping[str, JsonValue]) -> str:
        """Return what a call of the policy gives, or its error."""
        try:
            return self.run(arguments)
        except ValidationError as error:
            first = error.errors()[0]
            return f"Error: argument {'.'.join(map(str, first['loc']))}: {first['msg']}"
        except Exception as error:  # noqa: BLE001 - the policy's arguments
            return f"Error: {error}"

    def run(self, arguments: Mapping[str, JsonValue]) -> str:
        """Return what a call gives; raise what the tool or the check of its arguments raises."""
        checked = self._arguments.model_validate(arguments)
        given = {name: getattr(checked, name) for name in checked.model_fields_set}
        try:
            self._execute(**given).send(None)
        except StopIteration as end:
            return end.value if isinstance(end.value, str) else json.dumps(end.value, default=str)
        raise AssertionError("a tool of tau2 awaited something; expected none to")


class _DomainWorld:
    """A domain in the state of an episode."""

    name: str
    agent: tuple[str, str]
    """Class of the agent's tools, and the name under which they are kept."""
    user: tuple[str, str] | None = None
    tool_lists: Sequence[tuple[str, str]]
    """Modules and the lists in them."""
    prefix: str = ""
    """What stands before the names of actions in the names of tools."""

    def __init__(self) -> None:
        self.tools = _tools(tuple(self.tool_lists))

    def module(self, part: str) -> Any:  # noqa: ANN401 - of the package
        return importlib.import_module(f"{_TAU2}.{self.name}.{part}")

    def kept(self, which: tuple[str, str]) -> Any:  # noqa: ANN401 - of the package
        return kept_object(getattr(self.module(which[0]), which[0]), which[1])

    def begin(self, initial_state: Mapping[str, Any] | None) -> None:
        """Make the state at the start of an episode."""
        del initial_state
        forget_objects()
        agent = self.kept(self.agent)
        agent.db, agent.initialized = self.database().model_copy(deep=True), True

    def database(self) -> Any:  # noqa: ANN401 - of the package
        raise NotImplementedError

    def call(self, name: str, arguments: Mapping[str, JsonValue]) -> str:
        tool = self.tools.get(name)
        return f"Error: there is no tool {name!r}" if tool is None else tool.call(arguments)

    def problem(self, task: Mapping[str, Any], calls: Sequence[Sequence[Any]], said: str) -> str | None:
        """Return the first thing that is wrong at the end of an episode."""
        criteria = task["criteria"]
        basis = criteria["reward_basis"]
        if "ACTION" in basis and (missing := _missing_action(criteria["actions"], calls)):
            return f"the action {missing} is missing"
        if "ENV_ASSERTION" in basis and (failed := self.failed_assertion(criteria["env_assertions"])):
            return failed
        if "COMMUNICATE" in basis:
            heard = _plain(said)
            unsaid = [each for each in criteria["communicate_info"] if _plain(each) not in heard]
            if unsaid:
                return f"the policy did not say {unsaid[0]!r}"
        if "DB" not in basis:
            return None
        reached = self.kept(self.agent).db.get_hash()
        self.begin(task.get("initial_state"))
        for action in criteria["actions"]:
            self.perform(action)
        return None if self.kept(self.agent).db.get_hash() == reached else "the database is not as it should be"

    def perform(self, action: Mapping[str, Any]) -> None:
        """Make a reference action as the policy would, so that numbers are read alike; raise what is no refusal."""
        tool = self.tools.get(self.prefix + action["name"])
        which = self.user if self.user is not None and action.get("requestor") == "user" else self.agent
        try:
            if tool is not None:
                tool.run(action["arguments"])
            else:
                getattr(self.kept(which), action["name"])(**action["arguments"])
        except ToolFailure:
            return  # some reference actions ask for what is refused, as an agent would

    def failed_assertion(self, assertions: Sequence[Mapping[str, Any]]) -> str | None:
        raise NotImplementedError


class _Retail(_DomainWorld):
    name, agent = "retail", ("RetailAgentTools", "RetailTools")
    tool_lists = (("retail.tools", "all_retail_tools"),)

    def database(self) -> Any:  # noqa: ANN401 - of the package
        return _gzipped_database("retail", "RetailDB")


class _Airline(_DomainWorld):
    name, agent = "airline", ("AirlineAgentTools", "AirlineTools")
    tool_lists = (("airline.tools", "all_airline_tools"),)

    def database(self) -> Any:  # noqa: ANN401 - of the package
        return _gzipped_database("airline", "FlightDB")


class _Telecom(_DomainWorld):
    name, agent, user = "telecom", ("TelecomAgentTools", "TelecomAgentTools"), ("TelecomUserTools", "TelecomUserTools")
    tool_lists = (("telecom.tools", "all_telecom_agent_tools"), ("telecom.user_tools", "all_telecom_user_tools"))

    def begin(self, initial_state: Mapping[str, Any] | None) -> None:
        forget_objects()
        environment = self.module("environment").get_environment()
        for action in (initial_state or {}).get("initialization_actions") or ():
            tools = environment.user_tools if action["env_type"] == "user" else environment.tools
            getattr(tools, action["func_name"])(**action["arguments"])
            environment.sync_tools()

    def failed_assertion(self, assertions: Sequence[Mapping[str, Any]]) -> str | None:
        environment = self.module("environment").get_environment()
        for each in assertions:
            tools = environment.user_tools if each["env_type"] == "user" else environment.tools
            if getattr(tools, each["func_name"])(**each["arguments"]) != each.get("assert_value", True):
                return f"the assertion {each['func_name']} does not hold"
        return None


class _Banking(_DomainWorld):
    name, agent, user = "banking", ("BankingAgentTools", "BankingAgentTools"), ("BankingUserTools", "BankingUserTools")
    prefix = "banking_"
    tool_lists = (("banking.tools", "all_banking_agent_tools"), ("banking.user_tools", "all_banking_user_tools"))

    def __init__(self) -> None:
        super().__init__()
        self.tools = {**self.tools, "banking_grep": _Tool(self.module("tools").banking_grep, "banking_grep")}

    def begin(self, initial_state: Mapping[str, Any] | None) -> None:
        forget_objects()
        environment = self.module("environment")
        environment.initialize_environment()
        state = None
        if initial_state is not None:
            kind = importlib.import_module(f"{_TAU2}.data_model.tasks").InitialState
            state = kind.model_validate(copy.deepcopy(initial_state))  # parts of it become parts of the database
        environment.apply_initial_state(environment.get_agent_tools(), environment.get_user_tools(), state)


_WORLDS: Final[Mapping[str, type[_DomainWorld]]] = {
    "retail": _Retail,
    "airline": _Airline,
    "telecom": _Telecom,
    "banking": _Banking,
}


@functools.cache
def _tools(lists: tuple[tuple[str, str], ...]) -> dict[str, _Tool]:
    makers = [make for module, name in lists for make in getattr(importlib.import_module(f"{_TAU2}.{module}"), name)]
    return {make.__name__: _Tool(make, make.__name__) for make in makers}


@functools.cache
def _gzipped_database(domain: str, kind: str) -> Any:  # noqa: ANN401 - of the package
    model = getattr(importlib.import_module(f"{_TAU2}.{domain}.data_model"), kind)
    folder = Path(importlib.import_module(f"{_TAU2}.utils").TAU2_DATA_DIR)
    # Its own reader leaves an unpacked copy in the temporary folder each time.
    return model.model_validate_json(gzip.decompress((folder / "domains" / domain / "db.json.gz").read_bytes()))


def _plain(text: str) -> str:
    """Return a text as it is compared: numbers are said with and without commas."""
    return text.lower().replace(",", "")


def _missing_action(actions: Sequence[Mapping[str, Any]], calls: Sequence[Sequence[Any]]) -> str | None:
    equal = importlib.import_module(f"{_TAU2}.utils").deep_equal_unordered

    def is_made(action: Mapping[str, Any]) -> bool:
        for name, arguments in calls:
            if name != action["name"] and not name.endswith(f"_{action['name']}"):
                continue
            compared = action.get("compare_args")
            if compared is None:
                compared = set(arguments) | set(action["arguments"])
            both = [{key: each.get(key) for key in compared} for each in (arguments, action["arguments"])]
            if action["name"] == "transfer_to_human_agents" or equal(*both):
                return True
        return False

    return next((str(action["name"]) for action in actions if not is_made(action)), None)
