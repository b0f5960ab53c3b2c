"""A tokenizer of bytes with a chat template in Qwen's style, for episodes that no model plays.

Invariant: any text round-trips, and only the markup tokens are added tokens, so no content can yield one. Nothing is read
from a disk; the same bytes are made each time.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentrl.tokens.renderer import Renderer
from agentrl.tokens.tokenizer.files import ModelFiles

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
