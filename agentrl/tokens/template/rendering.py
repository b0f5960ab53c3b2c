"""Chat templates: the model's own Jinja source, run in a sandbox, with a guard against control tokens in content.

`ChatTemplate` returns what `apply_chat_template(tokenize=False)` of transformers returns for the same messages. It stops a
template that writes, loops or calls beyond its limits. `agentrl.tokens.template.probing` tries it out before its use.

`GuardedTemplate` keeps content (user text, tool output, names, arguments, schemas) from posing as a control token. Before
the template runs, each control token text in content is broken with a *nonce*, random digits that no template touches
(`agentrl.tokens.breaks`); a whole control token text in the result is the template's. The nonce disappears in encoding.

A template that cuts and joins strings could rebuild a broken token. For such a template, the guard renders once more with
plain digits in place of all suspicious content, and refuses a conversation whose two renderings differ in control tokens.

Invariant: in the text that `GuardedTemplate.render` returns, a control token text stands only where the template put one.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any, NamedTuple, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.errors import ConfigError, TokenError
from agentrl.tokens.breaks import break_token, make_nonce, secret_digits
from agentrl.tokens.parse import THINK_OPEN

PlainMessage = dict[str, object]
"""A message of plain JSON values only, as `agentrl.tokens.messages.plain_message` makes it."""

Roles = tuple[str, ...]
"""The roles of messages; an assistant message with tool calls is `call`."""

ToolSchemas = Sequence[Mapping[str, Any]]
"""The tools of a request, as the OpenAI wire writes them."""

_SAFE_FILTERS = frozenset({"tojson", "trim", "length", "count", "string", "safe", "items", "default", "d", "e", "escape"})
_SAFE_METHODS = frozenset({"strip", "lstrip", "rstrip", "startswith", "endswith", "items", "keys", "values", "get"})
MAX_SOURCE_CHARS = 1_000_000
MAX_RENDERED_CHARS = 64_000_000
MAX_RENDER_SECONDS = 10.0


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}...{% endgeneration %}` and renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it as a plain class attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class SafeNamespace(jinja2.utils.Namespace):
    """A Jinja namespace without underscore names, which could reach interpreter internals."""

    def __init__(*args: object, **kwargs: object) -> None:
        self = cast("SafeNamespace", args[0])
        values: dict[str, object] = dict(*cast("Sequence[Mapping[str, object]]", args[1:]), **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _SafeDict:
    """`dict(...)` and `dict.fromkeys(...)` for templates, without the class itself."""

    def __call__(self, *args: Mapping[str, object], **kwargs: object) -> dict[str, object]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Sequence[str], value: object = None) -> dict[str, object]:
        return dict.fromkeys(keys, value)


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set the attribute {name!r}")


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class OutOfTime(Exception):
    """The template ran for longer than it may."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, with a deadline for every rendering in the variable named `DEADLINE`.

    With `changes`, a template may append to its own lists and update its own dicts, as those for llama.cpp do.
    """

    DEADLINE = "agentrl deadline"  # no template can name a variable with a space in it
    intercepted_binops = frozenset({"*", "**"})  # the others are computed without `call_binop`, constants when compiled

    def __init__(self, *, changes: bool = False) -> None:
        self._changes = changes
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters |= {"tojson": _tojson, self.DEADLINE: _timed}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _SafeDict(),
            "namespace": SafeNamespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, self.DEADLINE, [], [], None, None)
        return cast("jinja2.nodes.Template", tree.set_environment(self))

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Return whether the template may see an attribute."""
        if self._changes and attr in _CHANGING_NAMES and type(obj) in (list, dict):
            return True
        return super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: object, attribute: str) -> object:
        """Return `obj.attribute`; at once for a key of a dict, which the sandbox finds by way of an exception."""
        if type(obj) is dict and attribute not in _DICT_NAMES:
            fields = cast("dict[str, object]", obj)
            return fields[attribute] if attribute in fields else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(self, context: jinja2.runtime.Context, obj: object, /, *args: object, **kwargs: object) -> object:
        """Call `obj` if the sandbox and the deadline allow it."""
        _check_time(context)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        """Return what an operator makes, but no repetition and no power that is longer than any rendering."""
        many, times = (right, left) if operator == "*" and isinstance(left, int) else (left, right)
        size = len(many) if isinstance(many, Sized) else 0
        if operator == "**" and isinstance(left, int):
            size = left.bit_length()
        if isinstance(times, int) and size * times > MAX_RENDERED_CHARS:
            raise jinja2.TemplateRuntimeError(f"{operator} {times} makes more than {MAX_RENDERED_CHARS} characters")
        return super().call_binop(context, operator, left, right)


_DICT_NAMES = frozenset(dir(dict))
_CHANGING_NAMES = frozenset({"append", "pop", "update"})
_CHANGING_CALL = re.compile(rf"\.({'|'.join(sorted(_CHANGING_NAMES))})\(")


def _check_time(context: jinja2.runtime.Context) -> None:
    if time.monotonic() > cast("float", context.get(TemplateEnvironment.DEADLINE, math.inf)):
        raise OutOfTime


@jinja2.pass_context
def _timed(context: jinja2.runtime.Context, items: Iterable[object]) -> Iterator[object]:
    """Yield the items of a loop while there is time."""
    for at, item in enumerate(items):
        if not at & 63:
            _check_time(context)
        yield item


class ChatTemplate:
    """The chat template of one model, compiled; immutable, safe to share between episodes and threads."""

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str],
        options: Mapping[str, bool | int | str],
        max_chars: int = MAX_RENDERED_CHARS,
        max_seconds: float = MAX_RENDER_SECONDS,
    ) -> None:
        """Compile the template.

        Args:
            sources: Jinja source by name; `default` is needed, `tool_use` replaces it in requests with tools.
            special_tokens: `bos_token`, `eos_token`, ... as text, visible to the template.
            options: further variables of the template, such as `enable_thinking`.
            max_chars: a rendering longer than this is refused.
            max_seconds: a rendering that takes longer is refused; checked in loops and calls.
        """
        if "default" not in sources:
            raise ConfigError(f"chat template: expected one named 'default', got {sorted(sources)}")
        self._max_chars = max_chars
        self._max_seconds = max_seconds
        self._variables: dict[str, object] = {**special_tokens, **options}
        self.source = "\n".join(sources[name] for name in sorted(sources))
        for name, source in sources.items():
            if len(source) > MAX_SOURCE_CHARS:
                raise ConfigError(f"chat template {name!r}: {len(source)} characters, at most {MAX_SOURCE_CHARS} allowed")
        self._changes = _CHANGING_CALL.search(self.source) is not None
        environment = TemplateEnvironment(changes=self._changes)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except (jinja2.TemplateError, SyntaxError, RecursionError) as error:  # the last two for blocks deep in blocks
                raise ConfigError(f"chat template {name!r} is not valid Jinja: {error}") from error

    def render(self, messages: Sequence[PlainMessage], tools: ToolSchemas | None, *, generation_prompt: bool) -> str:
        """Return the text of a conversation; with `generation_prompt`, up to where the model starts to write.

        Raises:
            TokenError: the template refused the conversation, broke on it, or went over its limits.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates["default"]
        if self._changes:
            messages, tools = _given(messages), _given(tools)
        variables: dict[str, object] = {
            TemplateEnvironment.DEADLINE: time.monotonic() + self._max_seconds,
            "messages": messages,
            "tools": tools,
            "xml_tools": tools,  # the name that SmolLM3 knows them by
            "documents": None,
            "add_generation_prompt": generation_prompt,
            **self._variables,
        }
        try:
            return self._limited(template.generate(variables))
        except TokenError:
            raise
        except OutOfTime as error:
            raise TokenError(f"the chat template ran for more than {self._max_seconds} s; it was stopped") from error
        except TypeError as error:
            if tools is None:  # a template for tools alone, which loops over them
                return self.render(messages, [], generation_prompt=generation_prompt)
            raise TokenError(f"the chat template broke on {_roles(messages)}: TypeError: {error}") from error
        except jinja2.UndefinedError as error:
            described = _with_descriptions(tools) if tools and "'description'" in str(error) else None
            if described and described != tools:
                return self.render(messages, described, generation_prompt=generation_prompt)
            raise TokenError(f"the chat template refused {_roles(messages)}: {error}") from error
        except jinja2.TemplateError as error:
            raise TokenError(f"the chat template refused {_roles(messages)}: {error}") from error
        except Exception as error:
            raise TokenError(f"the chat template broke on {_roles(messages)}: {type(error).__name__}: {error}") from error

    def _limited(self, pieces: Iterator[str]) -> str:
        parts: list[str] = []
        length = 0
        for piece in pieces:
            parts.append(piece)
            length += len(piece)
            if length > self._max_chars:
                raise TokenError(f"the chat template wrote more than {self._max_chars} characters; it was stopped")
        return "".join(parts)


class _GivenList(list[object]):
    """A list of the request, which no template changes."""


class _GivenDict(dict[str, object]):
    """A dict of the request, which no template changes."""


def _given(value: Any) -> Any:  # noqa: ANN401 - plain JSON values
    if isinstance(value, Mapping):
        return _GivenDict({key: _given(item) for key, item in cast("Mapping[str, object]", value).items()})
    return _GivenList(map(_given, cast("list[object]", value))) if isinstance(value, (list, tuple)) else value


def _with_descriptions(tools: ToolSchemas) -> ToolSchemas:
    """Return tools in which every function and argument has a description, for templates that need one."""
    described: list[Mapping[str, Any]] = []
    for tool in tools:
        function: dict[str, Any] = {"description": "", **tool.get("function", {})}
        parameters: Mapping[str, Any] = function.get("parameters") or {}
        properties = {
            name: {"description": "", **schema} if isinstance(schema, Mapping) else schema
            for name, schema in parameters.get("properties", {}).items()
        }
        if properties:
            function["parameters"] = {**parameters, "properties": properties}
        described.append({**tool, "function": function})
    return described


_Change = Callable[[str, bool], str]
"""Takes a text and whether it is a word of the message format itself."""

_TRUSTED_KEYS = frozenset({"role", "type"})
"""Templates compare the values of these keys with words of their own."""
_STRUCTURE = frozenset((
    "role", "content", "name", "type", "function", "tool_calls", "tool_call_id", "id", "arguments", "reasoning_content",
    "thinking", "description", "parameters", "properties", "required", "enum", "items", "default", "title", "anyOf", "oneOf",
    "allOf", "additionalProperties", "return", "strict", "format",
))  # fmt: skip
"""Keys of messages and schemas that templates look up by name."""


class Rendered(NamedTuple):
    """Text a template wrote, in which control tokens inside content are broken by `nonce`."""

    text: str
    nonce: str
    """Empty if nothing had to be broken."""

    @property
    def opens_thinking(self) -> bool:
        """Whether the text ends inside `<think>`."""
        return self.text.rstrip().endswith(THINK_OPEN)


class GuardedTemplate:
    """A chat template whose output tells the template's control tokens from text that looks like them."""

    def __init__(self, template: ChatTemplate, control: Sequence[str]) -> None:
        self.template = template
        self._begins = frozenset(text[:at] for text in control for at in range(1, len(text)))
        self._ends = frozenset(text[at:] for text in control for at in range(1, len(text)))
        self._pattern = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")
        self._first = re.compile("|".join(sorted({re.escape(text[0]) for text in control})) or "(?!)")
        self._longest = max(map(len, control), default=0)
        self._joined = "\0".join(control)
        self._nonce, self._sentinel = make_nonce(control), secret_digits()
        self._rewrites = _cuts_and_joins(template.source)
        self._composes = self._writes_parts(template.source)

    def render(self, messages: Sequence[PlainMessage], tools: ToolSchemas | None, *, generation_prompt: bool) -> Rendered:
        """Return the text of a conversation with control tokens inside content broken.

        Raises:
            TokenError: the template refused the conversation, or lets content change the control tokens it writes.
        """
        render = self.template.render
        if not self._suspicious(messages) and not (tools and self._suspicious(tools)):
            return Rendered(render(messages, tools, generation_prompt=generation_prompt), "")
        text = render(*_changed(messages, tools, self._break), generation_prompt=generation_prompt)
        if self._rewrites:
            reference = render(*_changed(messages, tools, self._inert()), generation_prompt=generation_prompt)
            found, expected = self._pattern.findall(text), self._pattern.findall(reference)
            if found != expected:
                raise TokenError(
                    f"the chat template writes {len(found)} control tokens for these messages but {len(expected)} if their "
                    "text is replaced by plain words: it rewrites text that looks like markup; remove it from the messages"
                )
        return Rendered(text, self._nonce)

    def _suspicious(self, value: object) -> bool:
        if isinstance(value, str):
            return self._may_pose(value)
        if isinstance(value, dict):
            for key, item in cast("dict[str, object]", value).items():
                if self._may_pose(key, key in _STRUCTURE):
                    return True
                if self._may_pose(item, key in _TRUSTED_KEYS) if isinstance(item, str) else self._suspicious(item):
                    return True
            return False
        if isinstance(value, (list, tuple)):
            return any(map(self._suspicious, cast("Sequence[object]", value)))
        return False

    def _may_pose(self, text: str, structure: bool = False) -> bool:
        """Return whether a control token could begin in `text`, or end in it after a part the template writes."""
        return self._first.search(text) is not None or (self._composes and not structure and self._may_continue(text))

    def _may_continue(self, text: str) -> bool:
        bare = text.strip()
        if not bare:
            return False
        if len(bare) < self._longest and bare in self._joined:
            return True
        return any(bare[:size] in self._ends for size in range(1, min(self._longest, len(bare)) + 1))

    def _break(self, text: str, structure: bool) -> str:
        """Return `text` with no control token in it, whole or begun at its end or continued at its start."""
        if self._composes and not structure and self._may_continue(text):
            text = self._nonce + text
        if self._first.search(text) is None:
            return text
        while True:
            broken = self._pattern.sub(lambda match: break_token(match.group(), self._nonce), text)
            if broken == text:
                break
            text = broken
        bare = text.rstrip()
        for at in range(max(0, len(bare) - self._longest), len(bare)):
            if bare[at:] in self._begins:
                return bare + self._nonce + text[len(bare) :]
        return text

    def _inert(self) -> _Change:
        """Return a change that replaces every text that could pose by digits, all different."""
        count = 0

        def change(text: str, structure: bool) -> str:
            nonlocal count
            if not text.strip() or not self._may_pose(text, structure):
                return text
            count += 1
            return f"{self._sentinel}{count}"

        return change

    def _writes_parts(self, source: str) -> bool:
        """Return whether the template writes parts of control tokens, which content beside them could complete."""
        for literal in _literals_of(source):
            sizes = range(1, min(self._longest, len(literal)) + 1)
            if any(literal[-size:] in self._begins or literal[:size] in self._ends for size in sizes):
                return True
        return False


def _changed(
    messages: Sequence[PlainMessage], tools: ToolSchemas | None, change: _Change
) -> tuple[list[PlainMessage], ToolSchemas | None]:
    return cast("list[PlainMessage]", _walk(messages, change)), cast("ToolSchemas | None", _walk(tools, change))


def _walk(value: object, change: _Change) -> object:
    if isinstance(value, str):
        return change(value, False)
    if isinstance(value, dict):
        changed: dict[str, object] = {}
        for key, item in cast("dict[str, object]", value).items():
            trusted = key in _TRUSTED_KEYS
            changed[change(key, key in _STRUCTURE)] = change(item, trusted) if isinstance(item, str) else _walk(item, change)
        return changed
    if isinstance(value, (list, tuple)):
        return [_walk(item, change) for item in cast("Sequence[object]", value)]
    return value


def _roles(messages: Sequence[PlainMessage]) -> str:
    roles = [str(message.get("role")) for message in messages]
    shown = ", ".join(roles if len(roles) <= 8 else [*roles[:3], "...", *roles[-4:]])
    return f"a conversation of {len(roles)} messages ({shown})"


def _literals_of(source: str) -> set[str]:
    """Return the texts that a template writes or compares with."""
    tree = _syntax_tree(source)
    texts = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
    return texts | {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}


def _cuts_and_joins(source: str) -> bool:
    """Return whether a template may cut and join strings."""
    tree = _syntax_tree(source)
    if any(node.name not in _SAFE_FILTERS for node in tree.find_all(jinja2.nodes.Filter)):
        return True
    called = (call.node for call in tree.find_all(jinja2.nodes.Call))
    if any(isinstance(node, jinja2.nodes.Getattr) and node.attr not in _SAFE_METHODS for node in called):
        return True
    return any(isinstance(node.arg, jinja2.nodes.Slice) for node in tree.find_all(jinja2.nodes.Getitem))


def _syntax_tree(source: str) -> jinja2.nodes.Template:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    return environment.parse(re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", source))
