"""The tokenizer of a demo: bytes, the integers 10 to 99 and a few phrases; and a chat template in Qwen's ChatML style.

Invariant: any text round-trips; every integer from 0 to 99 is one token; only the markup tokens are added tokens, so no
content can yield one. Nothing is trained or random: the same bytes are written each time.

The vocabulary has no merges. A regular expression cuts text into phrases, two-digit numbers and the rest, and
`ignore_merges` takes a piece that is in the vocabulary whole; the rest falls to bytes. No phrase may span a place where the
template's text and content meet, so that a conversation encoded piece by piece gives the ids of the whole.

Unlike Qwen's, the template shows the tools' names and not their schemas: in bytes a schema would cost 200 tokens in a prompt
of 20, and the warm start has already taught the model its tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agentrl.rollout.scripted_policy import MARKERS, SPECIALS

ROLE_PHRASES: Final = ("system\n", "user\n", "assistant\n")
"""Phrases that every chat needs: a demo names them among its own."""

DEMO_CHAT_TEMPLATE: Final = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- ('' if loop.first else ', ') + tool.function.name }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
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
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def write_phrase_tokenizer(path: str | Path, phrases: Sequence[str]) -> int:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja to `path`; return the vocabulary size.

    Each of the `phrases` becomes one token; where two match at a place, the longer one is taken.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [*phrases, *(str(number) for number in range(10, 100))]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(byte_level.pre_tokenize_str(word)[0][0] for word in words)]
    cut = "|".join([*(re.escape(phrase) for phrase in sorted(phrases, key=len, reverse=True)), "[1-9][0-9]"])
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], ignore_merges=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(cut), "isolated"), byte_level])  # pyright: ignore[reportAttributeAccessIssue] - typed read-only
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue] - typed read-only
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (folder / "chat_template.jinja").write_text(DEMO_CHAT_TEMPLATE)
    return tokenizer.get_vocab_size(with_added_tokens=True)
