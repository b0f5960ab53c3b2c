"""Python functions as tools: the schema the model sees, and the reply to a call it made.

Invariant: arguments that a model writes become a validated call or an error text that the model can read. An error inside a
tool is the environment's fault, unless it is a `ToolError`.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, cast, get_args, get_type_hints, overload

import anyio
import docstring_parser
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionToolMessageParam
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import to_json

from agentrl.client.tools.errors import ToolError
from agentrl.client.tools.processes import PROCESS_TIMEOUT_S, call_by_name, importable_name
from agentrl.env import environment_boundary
from agentrl.env.threads import call_in_thread
from agentrl.episode.tape import ask, run_and_compare
from agentrl.errors import EnvironmentFault

P = ParamSpec("P")
R = TypeVar("R", covariant=True)

_MAX_ERROR_CHARS = 800


RunsIn: TypeAlias = Literal["loop", "thread", "process"]
"""The place in which a tool runs: the event loop, a thread, or a worker process."""


class Tool(Generic[P, R]):
    """A function the model can call; calling the object calls the function.

    Example:
        >>> @tool
        ... def calc(a: int, b: int = 1) -> str:
        ...     return str(a + b)
        >>> calc(2, 3), calc.schema["function"]["parameters"]["required"]
        ('5', ['a'])
    """

    __name__: str
    name: str
    schema: ChatCompletionFunctionToolParam
    run_in: RunsIn

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str | None = None,
        description: str | None = None,
        run_in: RunsIn | None = None,
        timeout: float | None = None,
    ) -> None:
        functools.update_wrapper(cast("Callable[..., Any]", self), function)
        self.name = name or function.__name__
        self._function = function
        self.run_in = _place(function, self.name, run_in, timeout)
        self._timeout = timeout
        text, notes = _read_docstring(inspect.getdoc(function) or "")
        self._arguments, self._names = _argument_model(function, self.name, notes)
        parameters = self._arguments.model_json_schema()
        parameters.pop("title", None)
        for field in parameters.get("properties", {}).values():
            field.pop("title", None)
        self.schema = {
            "type": "function",
            "function": {"name": self.name, "description": description or text, "parameters": parameters},
        }

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    async def reply(self, call: Mapping[str, object] | BaseModel) -> ChatCompletionToolMessageParam:
        """Run a tool call of a completion (object or mapping) and return the message that answers it.

        Arguments that do not fit, and `ToolError`, become a text that starts with `Error:`. A result that is not a string is
        written as JSON. Any other exception, and a timeout, is an EnvironmentFault.

        Cancellation: a worker process is killed, and a thread is left to itself, with a warning.
        """
        fields = _call_fields(call)
        if fields.name != self.name:
            return fields.answer(f"Error: there is no tool {fields.name!r}; there is {self.name}")
        asking = run_and_compare if _carries_state(self._function) else ask
        with environment_boundary(f"tool {self.name}"):
            content = await asking("tool", self.name, read_question(fields.arguments), lambda: self._run(fields.arguments))
        return fields.answer(str(content))

    def call_with_json(self, arguments: str) -> str:
        checked = self._check(arguments)
        return checked if isinstance(checked, str) else _as_text(self._function(**checked))  # pyright: ignore[reportCallIssue] - checked

    async def _run(self, arguments: object) -> str:
        checked = self._check(arguments)
        if isinstance(checked, str):
            return checked
        where = f"tool {self.name}"
        try:
            if self.run_in == "process":
                text = to_json(arguments).decode() if isinstance(arguments, Mapping) else str(arguments or "{}")
                name, timeout = importable_name(self._function), self._timeout or PROCESS_TIMEOUT_S
                return str(await call_by_name(where, "tool", name, text, timeout=timeout))
            with anyio.move_on_after(self._timeout):
                return _as_text(await self._await_result(checked))
        except ToolError as error:
            return f"Error: {error}"
        raise EnvironmentFault(f"{where}: no result within its timeout of {self._timeout:g} s")

    async def _await_result(self, values: Mapping[str, object]) -> object:
        call = partial(cast("Callable[..., object]", self._function), **values)
        result = call() if self.run_in == "loop" else await call_in_thread(call, f"tool {self.name}")
        return await result if inspect.isawaitable(result) else result

    def _check(self, arguments: object) -> dict[str, Any] | str:
        """Return the arguments by name, or a text about their faults."""
        try:
            if isinstance(arguments, Mapping):
                model = self._arguments.model_validate(arguments)
            else:
                model = self._arguments.model_validate_json(str(arguments or "{}"))
        except ValidationError as error:
            return _argument_problems(error, self.name)
        return {name: getattr(model, field) for field, name in self._names.items()}


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    run_in: RunsIn | None = None,
    timeout: float | None = None,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...


def tool(
    function: Callable[P, R] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    run_in: RunsIn | None = None,
    timeout: float | None = None,
) -> Tool[P, R] | Callable[[Callable[P, R]], Tool[P, R]]:
    """Return `function` as a `Tool`; its schema comes from the signature, its texts from the docstring.

    The docstring may be in the Google, NumPy or Sphinx style. Every parameter needs an annotation that pydantic understands,
    or it is a TypeError. A bound method works too: `tool(board.move)`.

    Args:
        function: the function.
        name: for the model; None: the function's name.
        description: for the model; None: the docstring's.
        run_in: by default `"thread"` for a plain function, `"loop"` for an async one. `"loop"` is for a plain function that
            is quick or needs the event loop's thread. `"process"` is for a function at the top of a module that cannot run
            in a thread; its arguments and result cross as JSON.
        timeout: seconds after which a call is a fault of the environment; None: 60 in a process, elsewhere no limit but the
            episode's deadline. The wait for a free thread counts, the wait for a free process does not.
    """
    if function is not None:
        return Tool(function, name=name, description=description, run_in=run_in, timeout=timeout)
    return lambda function: Tool(function, name=name, description=description, run_in=run_in, timeout=timeout)


class RepliesToCalls(Protocol):
    """A `Tool`, or another object that the model can call, such as a tool of an MCP server."""

    @property
    def name(self) -> str:
        """The name that the model calls."""
        ...

    async def reply(self, call: Mapping[str, object] | BaseModel, /) -> ChatCompletionToolMessageParam:
        """Run a call and return the message that answers it."""
        ...


async def reply_to(
    call: Mapping[str, object] | BaseModel, tools: Sequence[RepliesToCalls]
) -> ChatCompletionToolMessageParam:
    """Run a tool call with the tool that it names, as `Tool.reply` does; an unknown name is an error the model can read."""
    fields = _call_fields(call)
    for candidate in tools:
        if candidate.name == fields.name:
            return await (candidate.reply(call) if isinstance(candidate, Tool) else _foreign_reply(candidate, call, fields))
    return fields.answer(f"Error: there is no tool {fields.name!r}; there is {', '.join(each.name for each in tools)}")


async def _foreign_reply(
    candidate: RepliesToCalls, call: Mapping[str, object] | BaseModel, fields: _CallFields
) -> ChatCompletionToolMessageParam:
    """Return the reply of a tool of another package, or the recorded one."""

    async def live() -> object:
        return (await candidate.reply(call))["content"]

    content = await ask("tool", candidate.name, read_question(fields.arguments), live)
    return fields.answer(cast("str", content))


class _CallFields:
    __slots__ = ("arguments", "id", "name")

    def __init__(self, identity: str, name: str, arguments: object) -> None:
        self.id, self.name, self.arguments = identity, name, arguments

    def answer(self, content: str) -> ChatCompletionToolMessageParam:
        return {"role": "tool", "tool_call_id": self.id, "content": content}


def _call_fields(call: Mapping[str, object] | BaseModel) -> _CallFields:
    fields = call.model_dump() if isinstance(call, BaseModel) else call
    function = fields.get("function")
    if not isinstance(function, Mapping):
        raise TypeError(f"a tool call must have a function with name and arguments, got {call!r:.200}")
    named = cast("Mapping[str, object]", function)
    return _CallFields(str(fields.get("id", "")), str(named.get("name", "")), named.get("arguments"))


def _place(function: Callable[..., object], name: str, run_in: RunsIn | None, timeout: float | None) -> RunsIn:
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    place = run_in or ("loop" if is_async else "thread")
    if place not in get_args(RunsIn):
        raise TypeError(f"tool {name}: run_in is 'loop', 'thread' or 'process', got {run_in!r}")
    if is_async and place != "loop":
        raise TypeError(f"tool {name}: an async function runs in the loop, got run_in={run_in!r}; leave run_in out")
    if place == "process":
        importable_name(function)
    if timeout is not None and timeout <= 0:
        raise ValueError(f"tool {name}: timeout must be more than 0 seconds, got {timeout!r}")
    if timeout is not None and place == "loop" and not is_async:
        raise TypeError(f"tool {name}: nothing can interrupt a plain function in the loop; leave out timeout or run_in")
    return place


def _as_text(result: object) -> str:
    return result if isinstance(result, str) else to_json(result, fallback=str).decode()


def _carries_state(function: Callable[..., object]) -> bool:
    """Return whether a call may change the episode: the function is bound to an object or to variables."""
    return not inspect.isfunction(function) or bool(function.__closure__)


def read_question(arguments: object) -> object:
    """Return the arguments that a model wrote as JSON; what is not JSON as text."""
    if isinstance(arguments, Mapping):
        return cast("object", arguments)
    try:
        return json.loads(str(arguments or "{}"))
    except (ValueError, RecursionError):
        return str(arguments)


def _argument_model(
    function: Callable[..., object], name: str, notes: Mapping[str, str]
) -> tuple[type[BaseModel], dict[str, str]]:
    """Return the model of the arguments, and the parameter of each field: a parameter may be called `copy` or `schema`."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"tool {name}: parameter {parameter.name!r} is {parameter.kind.description}; name every parameter"
            )
        if parameter.name not in hints:
            raise TypeError(f"tool {name}: parameter {parameter.name!r} needs a type for the tool's schema")
        default: Any = ... if parameter.default is parameter.empty else parameter.default
        field = f"argument_{index}"
        names[field] = parameter.name
        note = notes.get(parameter.name)
        fields[field] = (hints[parameter.name], Field(default, alias=parameter.name, description=note))
    config = ConfigDict(extra="forbid", protected_namespaces=())
    return create_model(f"{name}_arguments", __config__=config, **fields), names


def _argument_problems(error: ValidationError, name: str) -> str:
    problems = [
        ": ".join(part for part in (".".join(str(step) for step in problem["loc"]), problem["msg"]) if part)
        for problem in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    return f"Error: wrong arguments for {name}: {'; '.join(problems)}"[:_MAX_ERROR_CHARS]


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description in a docstring, and those of the parameters."""
    docstring = docstring_parser.parse(text)
    notes = {each.arg_name: " ".join((each.description or "").split()) for each in docstring.params}
    return (docstring.description or "").strip(), notes
