"""The tasks of BFCL v4, from the files of the package `bfcl-eval`, which is read and not imported.

Invariant: a category that agentrl cannot play or grade is refused by name, with the reason.
"""

from __future__ import annotations

import ast
import copy
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentrl.errors import ConfigError
from agentrl.support.exact_json import decode_exact_json
from agentrl.types import Task
from agentrl_envs.bfcl.matching import calls_match
from agentrl_envs.bfcl.worker import MODULES
from agentrl_envs.data_packages import BFCL_EVAL

logger = logging.getLogger(__name__)

GRADED: Final = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
)
"""Categories of one message whose calls are compared with accepted ones."""
NO_CALL: Final = ("irrelevance", "live_irrelevance")
"""Categories in which no function fits, so that a reply without a call is right."""
ANY_CALL: Final = ("live_relevance",)
"""Categories in which any call is right."""
MULTI_TURN: Final = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
"""Categories that are played on the backends of the package."""
CATEGORIES: Final = (*GRADED, *NO_CALL, *ANY_CALL, *MULTI_TURN)
_REFUSED: Final[Mapping[str, str]] = {
    "simple_java": "its arguments are literals of Java, which agentrl does not read",
    "simple_javascript": "its arguments are literals of JavaScript, which agentrl does not read",
    "memory": "its backends write files and need embedding models that the package does not carry",
    "web_search": "it needs the web",
    "format_sensitivity": "it varies the prompt of a model without tools; agentrl offers tools",
}
NEW_FUNCTIONS: Final = "I have updated some more functions you can choose from. What about now?"
"""What the user says in a turn that only adds functions, as in the package."""
_DATA: Final = "bfcl_eval/data"
_DONE: Final = "Done."


def bfcl_tasks(
    categories: str | Sequence[str], *, wheel: str | None = None, start: int = 0, count: int | None = None
) -> list[Task]:
    """Return the tasks of categories of BFCL v4, such as `[simple_python, multi_turn_base]`, in the order of the package.

    Each has `category`, `messages` (those of the user, turn by turn), `functions`, `answers`, and `reference`, the replies
    that call what the answers accept.

    Args:
        categories: one name, or several.
        wheel: a wheel of bfcl-eval; None reads the installed package, which multi-turn tasks need to be played.
        start: the first tasks of each category are left out.
        count: number of tasks of each category; None: all that are left.

    Raises:
        ConfigError: a category does not exist, or cannot be played or graded here; the package is not there.
    """
    names = [categories] if isinstance(categories, str) else list(categories)
    if start < 0 or (count is not None and count < 1) or not names:
        raise ConfigError(f"bfcl_tasks: expected categories, start >= 0 and count >= 1, got {names}, {start} and {count}")
    tasks: list[Task] = []
    for name in names:
        if name in _REFUSED:
            raise ConfigError(f"bfcl_tasks: {name} cannot be graded here: {_REFUSED[name]}; leave it out")
        if name not in CATEGORIES:
            raise ConfigError(f"bfcl_tasks: there is no category {name!r}; there is {', '.join(CATEGORIES)}")
        kept = _category(name, wheel)[start : None if count is None else start + count]
        if not kept:
            raise ConfigError(f"bfcl_tasks: no tasks of {name} are left with start={start}")
        tasks += kept
    return tasks


def _category(name: str, wheel: str | None) -> list[Task]:
    entries = _lines(f"{_DATA}/BFCL_v4_{name}.json", wheel)
    answers: dict[str, Any] = {}
    if name not in (*NO_CALL, *ANY_CALL):
        answers = {
            each["id"]: each["ground_truth"] for each in _lines(f"{_DATA}/possible_answer/BFCL_v4_{name}.json", wheel)
        }
    if name not in MULTI_TURN:
        made = [_single(name, entry, answers.get(entry["id"], [])) for entry in entries]
        tasks = [task for task in made if task is not None]
        if left_out := len(made) - len(tasks):
            logger.warning("bfcl: left out %d of %d tasks of %s, whose answers accept no call", left_out, len(made), name)
        return tasks
    described = {backend: _lines(f"{_DATA}/multi_turn_func_doc/{file}.json", wheel) for backend, file in MODULES.items()}
    return [_multi_turn(name, entry, answers[entry["id"]], described) for entry in entries]


def _lines(path: str, wheel: str | None) -> list[dict[str, Any]]:
    content = BFCL_EVAL.read(path, wheel)
    return [cast("dict[str, Any]", decode_exact_json(line)) for line in content.splitlines() if line.strip()]


def _single(category: str, entry: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> Task | None:
    """Return a task of one message; None where no call is accepted, such as of a required parameter without values."""
    functions = [{**each, "name": wire_name(each["name"])} for each in entry["function"]]
    accepted = [{wire_name(name): values for name, values in each.items()} for each in answers]
    if category in NO_CALL:
        reference = "None of the functions can answer this."
    elif category in ANY_CALL:
        reference = _written([(functions[0]["name"], {})])
    else:
        parameters = {str(each["name"]): cast("Mapping[str, Any]", each["parameters"]) for each in functions}
        required = {each: parameters[each].get("required", ()) for each in parameters}
        calls = [(name, _first_accepted(values, required[name])) for each in accepted for name, values in each.items()]
        if not calls_match(calls, accepted, functions):
            return None
        reference = _written(calls)
    data = {"category": category, "messages": entry["question"], "functions": functions, "answers": accepted}
    return Task(id=entry["id"], data={**data, "reference": [reference]})


def wire_name(name: str) -> str:
    """Return the name of a function as the OpenAI wire takes it, which has no dots."""
    return name.replace(".", "_")


def _first_accepted(values: Mapping[str, Sequence[Any]], required: Sequence[str]) -> dict[str, Any]:
    """Return the first accepted value of each parameter that must be given."""
    given = {name: options for name, options in values.items() if options and ("" not in options or name in required)}
    return {name: _with_choices(next((one for one in options if one != ""), "")) for name, options in given.items()}


def _with_choices(option: object) -> object:
    """Return an accepted value; a mapping, or each of a list of them, has the first accepted value of each key."""
    if isinstance(option, list):
        return [_with_choices(each) if isinstance(each, Mapping) else each for each in cast("list[object]", option)]
    if not isinstance(option, Mapping):
        return option
    choices = cast("Mapping[str, object]", option).items()
    lists = [(key, cast("list[object]", some)) for key, some in choices if isinstance(some, list)]
    return {key: some[0] for key, some in lists if some and "" not in some}


def _multi_turn(
    category: str,
    entry: Mapping[str, Any],
    truth: Sequence[Sequence[str]],
    described: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Task:
    functions = [copy.deepcopy(each) for name in entry["involved_classes"] for each in described[name]]
    parameters = {each["name"]: list(each["parameters"]["properties"]) for each in functions}
    late = cast("Mapping[str, Sequence[str]]", entry.get("missed_function", {}))
    withheld = {turn: [each for each in functions if each["name"] in names] for turn, names in late.items()}
    hidden = {name for names in late.values() for name in names}
    answers = [[_call_of(text) for text in turn] for turn in truth]
    replies: list[str] = []
    for turn in answers:
        if turn:
            named = [(name, dict(zip(parameters[name], plain, strict=False)) | keywords) for name, plain, keywords in turn]
            replies.append(_written(named))
        replies.append(_DONE)
    messages = [turn or [{"role": "user", "content": NEW_FUNCTIONS}] for turn in entry["question"]]
    return Task(
        id=entry["id"],
        data={
            "category": category,
            "messages": messages,
            "functions": [each for each in functions if each["name"] not in hidden],
            "withheld": withheld,
            "answers": answers,
            "classes": entry["involved_classes"],
            "initial_config": entry["initial_config"],
            "long_context": category == "multi_turn_long_context",
            "reference": replies,
        },
    )


def _call_of(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the name, the positional arguments and the keyword arguments of a call written in Python."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError("no call of a function")
        keywords = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return call.func.id, [ast.literal_eval(each) for each in call.args], keywords
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"{BFCL_EVAL.requirement}: cannot read the call {text!r:.100}: {error}") from None


def _written(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    each = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>{call}</tool_call>" for call in each)
