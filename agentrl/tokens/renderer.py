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
from agentrl.tokens.messages import plain_message, roles_of
from agentrl.tokens.parse import THINK_CLOSE, THINK_OPEN, ParsedMessage, choose_parser, parse_text
from agentrl.tokens.template.probing import QUESTION, TemplateProber, TemplateTraits, try_out, wants_text_arguments
from agentrl.tokens.template.rendering import ChatTemplate, GuardedTemplate, PlainMessage, Rendered, ToolSchemas
from agentrl.tokens.tokenizer.codec import IncrementalDecoder, ModelFiles, TokenCodec, read_model_files
from agentrl.types import BoolArray, Int32Array, Message


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

    def __init__(self, files: ModelFiles, *, template_options: Mapping[str, bool | int | str], where: str) -> None:
        tokens = dict(files.special_tokens)
        codec = TokenCodec(files.tokenizer_json, eos_ids=files.eos_ids, where=f"{where}/tokenizer.json")
        self._codec = codec
        build = partial(ChatTemplate, files.templates, special_tokens=tokens, options=template_options)
        try_out(build, where)
        template = build()
        self._template = GuardedTemplate(template, tuple(codec.control))
        source = template.source
        self._text_arguments = wants_text_arguments(self._template)
        self._knows_developer = "developer" in source
        self._split_thinking = "reasoning_content" in source or THINK_CLOSE in source
        eos = {*files.eos_ids, *_token_ids(codec, tokens.get("eos_token"))}
        ends = [text for number in eos if (text := codec.token_text(number)) is not None]
        try:
            self._prober = TemplateProber(
                self._template, text_arguments=self._text_arguments, ends=ends, controls=tuple(codec.control)
            )
        except TokenError as error:
            raise ConfigError(f"{where}: the chat template cannot render a question and an answer: {error}") from error
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
        self.call_parser = choose_parser(source) if self._prober.renders_tools else None
        """The parser of tool calls; None if the template shows no tools or no known format."""
        self.local: bool = self._prober.local()
        """Whether a turn costs only its new messages (else: one rendering of the conversation), for usual messages."""
        self.text_prefix_preserving: bool = self._prober.text_prefix_preserving()
        """Whether the template never changes what it wrote for earlier messages, for usual messages."""
        self.thinking_open: bool = self.start([{"role": "user", "content": "q"}], None).thinking_open
        """Whether the generation prompt itself opens `<think>`."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        template_options: Mapping[str, bool | int | str] | None = None,
        max_context: int | None = None,
    ) -> Renderer:
        """Return the renderer of a local model directory in Hugging Face layout.

        Args:
            path: the directory.
            template_options: further variables of the chat template, such as `{"enable_thinking": False}`.
            max_context: longest context plus output the servers take, where that is less than the model's positions.
        """
        files = read_model_files(Path(path))
        return cls(files, template_options=template_options or {}, where=str(path)).within(max_context)

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
                text_arguments=self._text_arguments,
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
        for role in sorted(set(roles_of(messages))):
            if not self._prober.shows(role):
                what = "tool calls" if role == "call" else f"{role} messages"
                raise TokenError(f"the chat template leaves out {what}; the model would not see them")
        rendered = self._template.render(messages, tools or None, generation_prompt=True)
        return RenderedTokens(self._codec.encode_rendered(rendered.text, nonce=rendered.nonce), rendered.opens_thinking)

    def traits(self, new: Sequence[PlainMessage], tools: bool) -> TemplateTraits:
        """Return what the template does with new messages of these roles."""
        return self._prober.traits(roles_of(new), tools)

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
        if not self._prober.renders_tools:
            raise TokenError("the request has tools, but this model's chat template does not show tools to the model")
        if self.call_parser is None:
            raise TokenError(
                "the request has tools, but no parser is known for the tool calls of this model's chat template; "
                "known formats are in agentrl.tokens.parse.CALL_PARSERS"
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
        tools: bool,
        stopped_on: int | str | None = None,
        thinking_open: bool | None = None,
        salt: object = None,
        is_cut: bool = False,
    ) -> ParsedMessage:
        """Return a sampled output as a message; never raises for what a model wrote.

        Args:
            ids: the sampled ids.
            tools: whether the request had tools; without them nothing is read as a tool call.
            stopped_on: the token id or stop string that ended the output.
            thinking_open: whether the prompt ended inside `<think>`; None: as this template's generation prompt does.
            salt: makes tool-call ids unique; the same salt and output give the same ids. None: the ids.
            is_cut: whether the output ends anywhere; the bytes of a character that it lacks the rest of are left out.
        """
        text = self.output_text(ids, stopped_on)
        return parse_text(
            text.rstrip("\ufffd") if is_cut else text,
            calls=self.call_parser if tools else None,
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
            if done == 0:
                context = self.start(plain[:at], tools)
            else:
                context = self.extend(plain[:done], plain[done:at], tools, last_output_id=ids[-1])
            output = self._assistant_ids(message, tools)
            ids += [*context.ids, *output]
            sampled += [False] * len(context.ids) + [True] * len(output)
            done = at + 1
        return EncodedConversation(token_ids=np.array(ids, np.int32), assistant_mask=np.array(sampled, np.bool_))

    def _assistant_ids(self, message: PlainMessage, tools: ToolSchemas | None) -> list[int]:
        """Return the ids of an assistant message as a model would sample it, up to the end-of-turn token."""
        prompt = self._template.render([QUESTION], tools or None, generation_prompt=True).text
        whole, nonce = self._template.render([QUESTION, message], tools or None, generation_prompt=False)
        opened, _, _ = prompt.rpartition(THINK_OPEN)
        if whole.startswith(prompt):
            text = whole[len(prompt) :]
        elif prompt.rstrip().endswith(THINK_OPEN) and whole.startswith(opened):
            text = f"{message.get('reasoning_content', '')}\n{THINK_CLOSE}\n\n{whole[len(opened) :]}"
        else:
            raise TokenError(
                "the chat template does not write an assistant message after its own generation prompt; "
                f"expected {prompt[-40:]!r} before it"
            )
        end = None if self.end_of_turn_id is None else self._codec.token_text(self.end_of_turn_id)
        at = text.rfind(end) if end else -1
        return self._codec.encode_rendered(text if at < 0 or not end else text[: at + len(end)], nonce=nonce, inside=True)


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
