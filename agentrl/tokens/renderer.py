"""The renderer: messages to token ids and back, for one model directory, without transformers.

A call that extends a turn renders only its new messages: the template runs on a made-up question and answer followed by
them, and the text after the answer counts. Where the template looks at the earlier conversation (`TemplateTraits.local`
is False), it runs on the whole conversation.

Invariant: for text without control-token markup, the ids are those of `apply_chat_template` of transformers. Markup in
content is encoded as if it were ordinary words. Sampled ids are never decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from agentrl.errors import ConfigError, ContextOverflow, TokenError
from agentrl.tokens.breaks import restored
from agentrl.tokens.formats import TOOL_FORMATS
from agentrl.tokens.messages import plain_message, roles_of
from agentrl.tokens.parse import THINK_CLOSE, THINK_OPEN, ParsedMessage, ToolFormat, parse_text
from agentrl.tokens.template.model_calls import WITHOUT_CALLS, WITHOUT_TOOLS, ModelCalls
from agentrl.tokens.template.probing import QUESTION, TemplateTraits, try_out
from agentrl.tokens.template.rendering import ChatTemplate, PlainMessage, Rendered, ToolSchemas
from agentrl.tokens.template.round_trip import answer_text
from agentrl.tokens.tokenizer.codec import IncrementalDecoder, ModelFiles, TokenCodec, read_model_files
from agentrl.types import BoolArray, Int32Array, Message, ToolFormatName

_FIRST_ANSWER = "message 0 is an assistant message; put a system or user message before it"


class RenderedTokens(NamedTuple):
    """Ids that a request adds, up to the point where the model writes."""

    ids: list[int]
    thinking_open: bool
    """The prompt ends inside `<think>`, so the output begins with reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedConversation:
    """A whole conversation as supervised training data."""

    token_ids: Int32Array
    """[L] int32."""
    assistant_mask: BoolArray
    """[L] bool: True on tokens that the model would sample, end-of-turn tokens included."""


class Renderer:
    """Renders, encodes, decodes and parses for one model; immutable, shared by all episodes of a process.

    Example: `Renderer.load("checkpoints/demo", template_options={"enable_thinking": False})`.
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        template_options: Mapping[str, bool | int | str],
        where: str,
        tool_format: ToolFormatName = "auto",
    ) -> None:
        tokens = dict(files.special_tokens)
        codec = TokenCodec(files.tokenizer_json, eos_ids=files.eos_ids, where=f"{where}/tokenizer.json")
        self._codec = codec
        self._where = where
        eos = {*files.eos_ids, *_token_ids(codec, tokens.get("eos_token"))}
        ends = [text for number in eos if (text := codec.token_text(number)) is not None]
        make = {"sources": files.templates, "special_tokens": tokens, "options": template_options}
        try_out(partial(ChatTemplate, **make), where)
        calls = ModelCalls(make, codec.control, ends, tool_format, where)
        template, self._prober = calls.template, calls.prober
        self._template = template
        source = template.template.source
        self._style = calls.style
        self._knows_developer = "developer" in source
        self._split_thinking = "reasoning_content" in source or THINK_CLOSE in source
        self.end_of_turn_id: int | None = next(iter(_token_ids(codec, self._prober.end_of_turn)), None)
        """The token the template ends an assistant message with; None if it ends them with text."""
        self.eos_ids: frozenset[int] = frozenset(eos | set(_token_ids(codec, self._prober.end_of_turn)))
        """Ids that end an output: the model's own and the template's end-of-turn token."""
        written = {number for number in self.eos_ids if (codec.token_text(number) or "\0") in source}
        self._closers = frozenset({*written, *_token_ids(codec, self._prober.end_of_turn)})
        self.vocab_size: int = files.vocab_size or codec.size
        """Rows of the model's vocabulary; ids are below it."""
        if codec.size > self.vocab_size:
            raise ConfigError(
                f"{where}: the tokenizer has ids up to {codec.size - 1}, but config.json says vocab_size {self.vocab_size}; "
                "tokenizer and model do not belong together"
            )
        self.model_positions: int | None = files.max_context
        self.max_context: int | None = files.max_context
        """Longest context in tokens; None if unknown."""
        self.control_ids: frozenset[int] = codec.control_ids
        """Ids that text of a conversation never yields."""
        self.tool_format: ToolFormat | None = calls.form
        """The form of tool calls; None if the template shows no tools, or its calls do not come back in any known form."""
        self._call_limits, self._written_call = calls.limits, calls.written_call
        self._leaves_out_calls = calls.leaves_out
        self.local: bool = self._prober.local()
        """Whether a turn costs only its new messages (else: one rendering of the conversation), for usual messages."""
        self.text_prefix_preserving: bool = self._prober.text_prefix_preserving()
        """Whether later messages of usual kinds never change the template's text for earlier messages."""
        self.thinking_open: bool = self.start([{"role": "user", "content": "q"}], None).thinking_open
        """Whether the generation prompt itself opens `<think>`."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        template_options: Mapping[str, bool | int | str] | None = None,
        max_context: int | None = None,
        tool_format: ToolFormatName = "auto",
    ) -> Renderer:
        """Return the renderer of a local model directory in Hugging Face layout.

        Args:
            path: the directory.
            template_options: further variables of the chat template, such as `{"enable_thinking": False}`.
            max_context: longest context plus output the servers take, where that is less than the model's positions.
            tool_format: form of the tool calls; `auto` takes the one in which the template's own calls come back.

        Raises:
            ConfigError: a file is missing or broken, or the template's calls do not come back in the form `tool_format`.
        """
        files = read_model_files(Path(path))
        renderer = cls(files, template_options=template_options or {}, where=str(path), tool_format=tool_format)
        return renderer.within(max_context)

    def within(self, limit: int | None) -> Renderer:
        """Return this renderer with its longest context lowered to `limit` tokens, where that is less."""
        lowered = copy(self)
        lowered.max_context = min([known for known in (limit, self.max_context) if known is not None], default=None)
        return lowered

    def check_length(self, messages: Sequence[PlainMessage], limit: int) -> None:
        """Refuse, with `ContextOverflow`, messages that cannot fit into `limit` tokens; each takes one token or more.

        Text too long to be a context would take seconds to encode, in which the event loop stands still.
        """
        least = 0
        for message in messages:
            text = message.get("content")
            least += 1 + (self._codec.min_tokens(text) if isinstance(text, str) else 0)
        if least > limit:
            raise ContextOverflow(
                f"{len(messages)} messages of at least {least} tokens do not fit into {limit} tokens; they were not encoded"
            )

    def encode_content(self, text: str) -> list[int]:
        """Return the ids of text as content: never a control token, whatever it says."""
        return self._codec.encode_content(text)

    def plain(self, messages: Sequence[Message], reasoning: Mapping[int, str] | None = None) -> list[PlainMessage]:
        """Return messages as the template takes them; `developer` is `system` to templates that do not know it.

        `reasoning` is used, by position, for assistant messages that carry none themselves.
        """
        known = reasoning or {}
        plain = [
            plain_message(
                message,
                split_inline_thinking=self._split_thinking,
                style=self._style,
                reasoning=known.get(at),
            )
            for at, message in enumerate(messages)
        ]
        for message in plain:
            if message["role"] == "developer" and not self._knows_developer:
                message["role"] = "system"
        return plain

    def render_text(
        self, messages: Sequence[PlainMessage], tools: ToolSchemas | None = None, *, generation_prompt: bool
    ) -> str:
        """Return the template's text for a whole conversation, content as it is; for display and comparison."""
        rendered = self._template.render(messages, tools or None, generation_prompt=generation_prompt)
        return restored(rendered.text, rendered.nonce) if rendered.nonce else rendered.text

    def start(self, messages: Sequence[PlainMessage], tools: ToolSchemas | None) -> RenderedTokens:
        """Return the ids of a whole conversation up to where the model writes.

        Raises:
            TokenError: if the template refuses the messages, or would leave some of them out.
        """
        roles = set(roles_of(messages))
        self._check_roles(roles)
        for role in sorted(roles):
            if not self._prober.shows(role):
                what = "tool calls" if role == "call" else f"{role} messages"
                raise TokenError(f"the chat template leaves out {what}; the model would not see them")
        rendered = self._template.render(messages, tools or None, generation_prompt=True)
        return RenderedTokens(self._codec.encode_rendered(rendered.text, nonce=rendered.nonce), rendered.opens_thinking)

    def traits(self, new: Sequence[PlainMessage], tools: bool) -> TemplateTraits:
        """Return what the template does with new messages of these roles."""
        roles = roles_of(new)
        self._check_roles(set(roles))
        return self._prober.traits(roles, tools)

    def _check_roles(self, roles: set[str]) -> None:
        """Refuse tool calls and results for a template that breaks on them, with the remedy."""
        for role in sorted(roles & {"call", "tool"}):
            if not self._prober.renders_tools and self._prober.breaks_on(role):
                what = "tool calls" if role == "call" else "tool results"
                raise TokenError(f"the messages hold {what}, but the chat template of {self._where} {WITHOUT_TOOLS}")

    def extend(
        self,
        history: Sequence[PlainMessage],
        new: Sequence[PlainMessage],
        tools: ToolSchemas | None,
        *,
        last_output_id: int | None,
    ) -> RenderedTokens:
        """Return the ids between the end of a model output and where the model writes next.

        `history` ends with that output and is read only if the template is not local. An end-of-turn token that was
        sampled as `last_output_id` is not repeated.
        """
        rendered = self._render_after_output(history, new, tools or None)
        ids = self._codec.encode_rendered(rendered.text, nonce=rendered.nonce, inside=True)
        if last_output_id in self._closers and ids and ids[0] in self._closers:
            del ids[0]
        return RenderedTokens(ids, rendered.opens_thinking)

    def _render_after_output(
        self, history: Sequence[PlainMessage], new: Sequence[PlainMessage], tools: ToolSchemas | None
    ) -> Rendered:
        """Return what the template writes after the last message of `history`, whose end is part of it."""
        traits = self.traits(new, bool(tools))
        if not traits.complete:
            raise TokenError(f"the chat template does not write new messages {roles_of(new)} after the earlier ones")
        answer = _with_call_names(traits.answer, new) if traits.num_calls else traits.answer
        before = [QUESTION, answer] if traits.local else [*history[:-1], answer]
        shown = tools if traits.uses_tools or not traits.local else None
        text, nonce = self._template.render([*before, *new], shown, generation_prompt=True)
        _, found, tail = text.partition(self._prober.mark)
        ends = [at for end in self._prober.ends if (at := tail.find(end)) >= 0]
        if ends:
            return Rendered(tail[min(ends) :], nonce)
        if not found or not tail.startswith(traits.closing):
            raise TokenError(f"the chat template mixes new messages {roles_of(new)} with the earlier ones")
        return Rendered(tail[len(traits.closing) :], nonce)

    def decode(self, ids: Sequence[int] | Int32Array, *, skip_special: bool) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD."""
        return self._codec.decode(_as_list(ids), skip_special=skip_special)

    def incremental_decoder(self) -> IncrementalDecoder:
        """Return a decoder for one streamed output; special tokens are part of its text."""
        return IncrementalDecoder(self._codec)

    def check_tools(self) -> None:
        """Refuse, with `TokenError`, tools for a model that is not shown them or whose tool calls no parser reads."""
        if self.tool_format is not None:
            return
        if not self._prober.renders_tools:
            raise TokenError(f"the request has tools, but the chat template of {self._where} {WITHOUT_TOOLS}")
        if self._leaves_out_calls:
            raise TokenError(f"the request has tools, but the chat template of {self._where} {WITHOUT_CALLS}")
        raise TokenError(
            f"the request has tools, but no known form reads the tool calls of {self._where}: its chat template writes "
            f"{self._written_call}, and the call does not come back. Known forms are {', '.join(TOOL_FORMATS)}; give the "
            "model a chat_template.jinja that writes calls in one of them"
        )

    def output_text(self, ids: Sequence[int] | Int32Array, stopped_on: int | str | None = None) -> str:
        """Return the text of an output without its end-of-turn token and without the stop string that ended it."""
        numbers = ids if type(ids) is list else _as_list(ids)
        if numbers and (numbers[-1] in self.eos_ids or numbers[-1] == stopped_on):
            numbers = numbers[:-1]
        text = self._codec.text_of(numbers)
        if isinstance(stopped_on, str) and stopped_on:
            at = text.find(stopped_on)
            text = text if at < 0 else text[:at]
        return text

    def parse(
        self,
        ids: Sequence[int] | Int32Array,
        *,
        tools: ToolSchemas | None,
        stopped_on: int | str | None = None,
        thinking_open: bool | None = None,
        salt: object = None,
        is_cut: bool = False,
    ) -> ParsedMessage:
        """Return a sampled output as a message; no output of a model makes it raise.

        Args:
            ids: the sampled ids.
            tools: those of the request, which give the types of arguments; without any nothing is read as a call.
            stopped_on: the token id or stop string that ended the output.
            thinking_open: whether the prompt ended inside `<think>`; None: as this template's generation prompt does.
            salt: makes tool-call ids unique; the same salt and output give the same ids. None: the ids.
            is_cut: whether the output ends anywhere; the bytes of a character that it lacks the rest of are left out.
        """
        text = self.output_text(ids, stopped_on)
        return parse_text(
            text.rstrip("\ufffd") if is_cut else text,
            form=self.tool_format,
            tools=tools,
            limits=self._call_limits,
            thinking_open=self.thinking_open if thinking_open is None else thinking_open,
            salt=_as_list(ids) if salt is None else salt,
        )

    def encode_conversation(self, messages: Sequence[Message], tools: ToolSchemas | None = None) -> EncodedConversation:
        """Return a conversation as ids with a mask over what the model would sample; cut where rollouts cut.

        Earlier reasoning is kept, as rollouts with `history: keep` keep it. Messages after the last assistant message
        carry no loss and are left out.
        """
        plain = self.plain(messages)
        ids: list[int] = []
        sampled: list[bool] = []
        done = 0
        for at, message in enumerate(plain):
            if message["role"] != "assistant":
                continue
            if at == 0:
                context = self._before_first_answer(message, tools)
            elif done == 0:
                context = self.start(plain[:at], tools)
            else:
                context = self.extend(plain[:done], plain[done:at], tools, last_output_id=ids[-1])
            output = self._assistant_ids(message, tools)
            ids += [*context.ids, *output]
            sampled += [False] * len(context.ids) + [True] * len(output)
            done = at + 1
        return EncodedConversation(token_ids=np.array(ids, np.int32), assistant_mask=np.array(sampled, np.bool_))

    def _before_first_answer(self, message: PlainMessage, tools: ToolSchemas | None) -> RenderedTokens:
        """Return what the template writes before an assistant message that is the first of its conversation."""
        try:
            whole, nonce = self._template.render([message], tools or None, generation_prompt=False)
            answer = answer_text(self._template, message, tools, self._prober.ends).text
        except TokenError as error:
            raise TokenError(f"{_FIRST_ANSWER}: {error}") from error
        at = whole.rfind(answer)
        if at < 0:  # a template that writes no empty reasoning there: the generation prompt is the same
            asked, shown = (self._template.render([QUESTION], tools or None, generation_prompt=new) for new in (True, False))
            opening = asked.text[len(shown.text) :]
            at = whole.find(opening) + len(opening) if opening and opening in whole else -1
        if at < 0:
            raise TokenError(f"{_FIRST_ANSWER}, whose text this chat template writes differently there")
        before = whole[:at]
        return RenderedTokens(self._codec.encode_rendered(before, nonce=nonce), before.rstrip().endswith(THINK_OPEN))

    def _assistant_ids(self, message: PlainMessage, tools: ToolSchemas | None) -> list[int]:
        """Return the ids of an assistant message as a model would sample it, up to the end-of-turn token."""
        text, nonce = answer_text(self._template, message, tools, self._prober.ends)
        return self._codec.encode_rendered(text, nonce=nonce, inside=True)


def _with_call_names(answer: PlainMessage, results: Sequence[PlainMessage]) -> PlainMessage:
    """Return an assistant message with its calls named as the tool results after it name them."""
    calls: list[PlainMessage] = []
    for call, result in zip(cast("list[PlainMessage]", answer["tool_calls"]), results, strict=False):
        function = cast("PlainMessage", call["function"])
        calls.append({
            **call,
            "id": result.get("tool_call_id", call["id"]),
            "function": {**function, "name": result.get("name", function["name"])},
        })  # fmt: skip
    return {**answer, "tool_calls": calls}


def _token_ids(codec: TokenCodec, text: str | None) -> list[int]:
    number = codec.token_id(text) if text is not None else None
    return [] if number is None else [number]


def _as_list(ids: Sequence[int] | Int32Array) -> list[int]:
    return ids if type(ids) is list else ids.tolist() if isinstance(ids, np.ndarray) else [int(number) for number in ids]
