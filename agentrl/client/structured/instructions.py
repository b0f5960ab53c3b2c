"""The instructions that an episode's prompts carry for calls with a demand, and where they stood.

Invariant: an answer's history is what the model saw: where a request repeats an answer that was asked for with an
instruction, the instruction stands before it again. So later turns continue earlier ones exactly and fork no more than
without demands.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.client.structured.demand import Demand, with_instruction
from agentrl.tokens.history import MessageReader, next_prefix
from agentrl.tokens.messages import message_key
from agentrl.types import Message


class Instructions:
    """The instructions of one episode."""

    def __init__(self) -> None:
        """Start with none."""
        self._reader = MessageReader()
        self._by_answer: dict[bytes, str] = {}
        """The instruction of each recorded answer, by the digest of the workflow's conversation up to that answer."""

    def applied(self, messages: Sequence[Message], demand: Demand | None) -> Sequence[Message]:
        """Return the messages that are rendered for a request of a workflow.

        Raises:
            WorkflowError, TokenError: one of them is no message.
        """
        if demand is None and not self._by_answer:
            return messages
        rendered: list[Message] = []
        for message, prefix in zip(messages, self._reader.read(messages).prefixes, strict=True):
            instruction = self._by_answer.get(prefix)
            if instruction is not None:
                rendered = with_instruction(rendered, instruction)
            rendered.append(message)
        return rendered if demand is None else with_instruction(rendered, demand.instruction)

    def remember(self, messages: Sequence[Message], demand: Demand, answer: Message) -> None:
        """Remember the instruction of the request `messages`, which was answered by `answer`."""
        request = self._reader.read(messages).prefixes[-1]
        self._by_answer[next_prefix(request, message_key(answer).digest)] = demand.instruction
