"""A policy that answers from a script, so that a workflow can be played without a model.

Invariant: the workflow meets the real client. Tokens are bytes, under a chat template in Qwen's style, so only a
`max_tokens` that the workflow itself passes cuts a reply. Any text round-trips, and no content can yield an added token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, NamedTuple, TypeAlias

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentrl.client.config import SamplingConfig
from agentrl.errors import RequestRejected
from agentrl.servers.scripted.server import ScriptedCall, ScriptedReply, ScriptedServer
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.tokenizer.codec import ModelFiles

SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CHAT_TEMPLATE: Final = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for tool_call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- tool_call.function.arguments if tool_call.function.arguments is string else tool_call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class PlainTokenizer(NamedTuple):
    """The tokenizer and the renderer that belongs to it."""

    tokenizer: Tokenizer
    renderer: Renderer

    def encode_output(self, text: str) -> list[int]:
        """Return the ids that a model samples for `text`: markup such as `<tool_call>` is one id."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids


@cache
def plain_tokenizer() -> PlainTokenizer:
    """Return the tokenizer; every call returns the same one."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue] - typed read-only
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue] - typed read-only
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    files = ModelFiles(
        tokenizer_json=tokenizer.to_str(),
        templates={"default": CHAT_TEMPLATE},
        special_tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        eos_ids=frozenset(),
        vocab_size=None,
        max_context=None,
    )
    return PlainTokenizer(tokenizer, Renderer(files, template_options={}, where="the plain tokenizer"))


UNLIMITED: Final = SamplingConfig(max_tokens=2**30)
"""The defaults of model calls whose replies are not cut."""
ReplyFunction: TypeAlias = Callable[[ScriptedCall], str]
"""Returns the text of the assistant; a tool call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in it."""


class ScriptedPolicy(ScriptedServer):
    """A backend without a model, whose calls `reply` answers; every log-prob is -1."""

    renderer: Renderer
    """The chat template and tokenizer of this policy."""

    def __init__(self, reply: ReplyFunction) -> None:
        plain = plain_tokenizer()

        def script(call: ScriptedCall) -> ScriptedReply:
            ids = [*plain.encode_output(reply(call)), *([] if end is None else [end])]
            return ScriptedReply(output=ids, logprobs=[-1.0] * len(ids))

        end = plain.renderer.end_of_turn_id
        self.renderer = plain.renderer
        super().__init__(script, vocab_size=plain.renderer.vocab_size, decode=plain.tokenizer.decode, eos_id=end)


def replies_in_order(replies: Sequence[str]) -> ReplyFunction:
    """Return a function that gives `replies[n]` to call `n` of each episode; a call beyond the last is rejected."""

    def reply(call: ScriptedCall) -> str:
        if call.turn >= len(replies):
            raise RequestRejected(f"the script has {len(replies)} replies; the workflow asked for one more", status=400)
        return replies[call.turn]

    return reply
