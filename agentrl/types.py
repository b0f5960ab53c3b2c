"""The nouns of agentrl, which `agentrl.episode` declares: task, turn, trajectory, group, sample; and tool formats."""

from typing import Literal

from agentrl.episode.trajectory import (
    BoolArray,
    BranchPath,
    EpisodeFailure,
    Float32Array,
    ForkReason,
    Group,
    Int32Array,
    JsonValue,
    MemberAdvantages,
    Message,
    Sample,
    Speaker,
    StopReason,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
)

ToolFormatName = Literal[
    "auto", "hermes", "qwen_coder", "glm", "mistral", "mistral_v11", "deepseek_v3", "deepseek_v31", "deepseek_v32",
    "kimi_k2", "harmony", "minimax_m1", "minimax_m2", "phi_4", "granite_3", "nemotron_2", "seed_oss", "lfm2",
    "tool_calls", "functools", "apertus", "cohere", "functionary_v31", "functionary_v32", "xlam", "llama", "pythonic",
]  # fmt: skip
"""A form by name, or `auto`."""

__all__ = [
    "BoolArray",
    "BranchPath",
    "EpisodeFailure",
    "Float32Array",
    "ForkReason",
    "Group",
    "Int32Array",
    "JsonValue",
    "MemberAdvantages",
    "Message",
    "Sample",
    "Speaker",
    "StopReason",
    "Task",
    "ToolFormatName",
    "Trajectory",
    "Turn",
    "VersionSpan",
]
