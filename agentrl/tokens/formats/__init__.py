"""The forms in which models write tool calls, each in a file of its own.

`sampling.tool_format: auto` takes the first form in which the calls of the model's own chat template come back.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.tokens.formats.cohere import COHERE
from agentrl.tokens.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32
from agentrl.tokens.formats.functionary import FUNCTIONARY_31, FUNCTIONARY_32
from agentrl.tokens.formats.glm import GLM
from agentrl.tokens.formats.harmony import HARMONY
from agentrl.tokens.formats.hermes import HERMES
from agentrl.tokens.formats.json_lists import APERTUS, FUNCTOOLS, GRANITE_3, NEMOTRON_2, PHI_4, TOOL_CALLS, XLAM
from agentrl.tokens.formats.kimi import KIMI_K2
from agentrl.tokens.formats.llama import LLAMA
from agentrl.tokens.formats.minimax import MINIMAX_M1, MINIMAX_M2
from agentrl.tokens.formats.mistral import MISTRAL, MISTRAL_V11
from agentrl.tokens.formats.pythonic import LFM2, PYTHONIC
from agentrl.tokens.formats.qwen_coder import QWEN_CODER
from agentrl.tokens.formats.seed_oss import SEED_OSS
from agentrl.tokens.parse import ToolFormat

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    form.name: form
    for form in (
        HERMES, QWEN_CODER, GLM, MISTRAL, MISTRAL_V11, DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, KIMI_K2, HARMONY, MINIMAX_M1,
        MINIMAX_M2, GRANITE_3, PHI_4, NEMOTRON_2, SEED_OSS, LFM2, TOOL_CALLS, FUNCTOOLS, APERTUS, COHERE,
        FUNCTIONARY_31, FUNCTIONARY_32, XLAM, LLAMA, PYTHONIC,
    )
}  # fmt: skip
"""All forms by name, in the order in which they are tried."""
