"""Chat templates: the model's own Jinja source, run in a sandbox that behaves like the one of transformers.

Invariant: `ChatTemplate.render` returns the text that transformers' `apply_chat_template(tokenize=False)` returns for the
same messages, or raises `TokenError`; it never returns more than `max_chars` characters, and a template that loops or calls
for longer than `max_seconds`, or repeats a text into more than any rendering holds, is stopped.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from typing import cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.errors import ConfigError, TokenError

PlainMessage = dict[str, object]
"""A message of plain JSON values only, as `agentrl.tokens.messages.plain_message` makes it."""

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
    """The sandbox of transformers, with a deadline for every rendering in the variable named `DEADLINE`."""

    DEADLINE = "agentrl deadline"  # no template can name a variable with a space in it
    intercepted_binops = frozenset({"*", "**"})  # the others are computed without `call_binop`, constants when compiled

    def __init__(self) -> None:
        """Set what transformers sets."""
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
        if operator != "%" and isinstance(times, int) and size * times > MAX_RENDERED_CHARS:
            raise jinja2.TemplateRuntimeError(f"{operator} {times} makes more than {MAX_RENDERED_CHARS} characters")
        return super().call_binop(context, operator, left, right)


_DICT_NAMES = frozenset(dir(dict))


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

        Raises:
            ConfigError: if there is no default template, or a template is too long or not valid Jinja.
        """
        if "default" not in sources:
            raise ConfigError(f"chat template: expected one named 'default', got {sorted(sources)}")
        self._max_chars = max_chars
        self._max_seconds = max_seconds
        self._variables: dict[str, object] = {**special_tokens, **options}
        self._sources = dict(sources)
        self.source = "\n".join(sources[name] for name in sorted(sources))
        for name, source in sources.items():
            if len(source) > MAX_SOURCE_CHARS:
                raise ConfigError(f"chat template {name!r}: {len(source)} characters, at most {MAX_SOURCE_CHARS} allowed")
        self._templates = self._compiled(TemplateEnvironment())

    def within(self, environment: TemplateEnvironment) -> ChatTemplate:
        """Return the same template, compiled in another environment."""
        other = copy.copy(self)
        other._templates = self._compiled(environment)
        return other

    def _compiled(self, environment: TemplateEnvironment) -> dict[str, jinja2.Template]:
        templates: dict[str, jinja2.Template] = {}
        for name, source in self._sources.items():
            try:
                templates[name] = environment.from_string(source)
            except (jinja2.TemplateError, SyntaxError, RecursionError) as error:  # the last two for blocks deep in blocks
                raise ConfigError(f"chat template {name!r} is not valid Jinja: {error}") from error
        return templates

    def render(
        self, messages: Sequence[PlainMessage], tools: Sequence[Mapping[str, object]] | None, *, generation_prompt: bool
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: plain messages.
            tools: tool schemas, or None.
            generation_prompt: whether the text ends where the model starts to write.

        Raises:
            TokenError: the template refused the conversation, broke on it, or went over its limits.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates["default"]
        variables: dict[str, object] = {
            TemplateEnvironment.DEADLINE: time.monotonic() + self._max_seconds,
            "messages": messages,
            "tools": tools,
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
        except jinja2.TemplateError as error:
            raise TokenError(f"the chat template refused {_roles(messages)}: {error}") from error
        except Exception as error:
            raise TokenError(f"the chat template broke on {_roles(messages)}: {type(error).__name__}: {error}") from error

    def _limited(self, pieces: Iterator[str]) -> str:
        parts: list[str] = []
        length = 0
        for piece in pieces:
            parts.append(piece)
            length += str.__len__(piece)  # see agentrl.tokens.template.trace
            if length > self._max_chars:
                raise TokenError(f"the chat template wrote more than {self._max_chars} characters; it was stopped")
        return "".join(parts)


def _roles(messages: Sequence[PlainMessage]) -> str:
    roles = [str(message.get("role")) for message in messages]
    shown = ", ".join(roles if len(roles) <= 8 else [*roles[:3], "...", *roles[-4:]])
    return f"a conversation of {len(roles)} messages ({shown})"
