"""Messages to token ids and back, and the token graph of an episode."""

from agentrl.tokens.graph import Prompt, TokenGraph
from agentrl.tokens.parse import ParsedMessage, ToolCall
from agentrl.tokens.renderer import EncodedConversation, IncrementalDecoder, Renderer
from agentrl.tokens.verify import verify

__all__ = [
    "EncodedConversation",
    "IncrementalDecoder",
    "ParsedMessage",
    "Prompt",
    "Renderer",
    "TokenGraph",
    "ToolCall",
    "verify",
]
