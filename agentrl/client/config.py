"""Defaults of the model calls that a workflow makes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from agentrl.config.base import Config
from agentrl.inference.backend import MAX_TEMPERATURE, TEMPERATURE_RULE, is_temperature
from agentrl.types import ToolFormatName


class SamplingConfig(Config):
    """The sampling arguments of a model call that does not set its own."""

    temperature: float = Field(default=1.0, ge=0, le=MAX_TEMPERATURE)
    """Sampling temperature; training needs a positive one, of at least 1e-6."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass. Recorded log-probs are of the untruncated distribution, so below 1 the behavior weights are biased.

    The `top_k` and `min_p` of a single call bias them likewise; a run has no defaults for those.
    """
    max_tokens: int = Field(default=512, ge=1)
    """Output tokens of one model call."""
    history: Literal["keep", "as_template"] = "keep"
    """For a template that rewrites earlier turns: `keep` the sampled ids as context, or fork as the template says."""
    of_programs: Literal["run", "program"] = "run"
    """Whose temperature, top_p, top_k, min_p, penalties and seed hold in calls that programs make over HTTP.

    `run`: those of this section, in training and evaluation; what a program sends instead is counted as
    `workflow.gateway.ignored.NAME`. `program`: its own, as in workflows in Python; calls at temperature 0 are not trained.
    Of two limits of output tokens the smaller one holds with `run`.
    """
    template_options: dict[str, bool | int | str] = Field(default_factory=dict)
    """Extra variables for the chat template, such as `{enable_thinking: false}`."""
    tool_format: ToolFormatName = "auto"
    """Form of the model's tool calls; `auto` takes the one in which calls come back from the model's own chat template.

    For a template without tools, `hermes` describes them in the system message and reads calls from the answers. For one
    that shows tools and leaves calls out, `hermes`, `granite_3` and `lfm2` write calls as text of the messages.
    """
    unsupported: Literal["refuse", "prompt"] = "refuse"
    """What happens to structured output and forced tool calls, which free decoding cannot enforce.

    `refuse` raises an error. `prompt` asks for them in the prompt and counts each miss as `workflow.unsupported_misses`.
    """

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float) -> float:
        if not is_temperature(value):
            raise ValueError(f"expected {TEMPERATURE_RULE}, got {value:g}")
        return value
