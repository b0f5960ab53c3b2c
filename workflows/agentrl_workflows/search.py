"""A search agent: the model searches a local corpus, opens documents, and answers in a line `Answer: ...`.

The default corpus is an encyclopedia of an invented country, so everything runs offline. Needs
`pip install 'agentrl[search]'`.

    agentrl train examples/bundled/search.yaml --dry-run
    agentrl train examples/bundled/search.yaml
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

from agentrl.client import Client, MessageLike
from agentrl.client.tools import ToolError, reply_to, tool
from agentrl.errors import ConfigError, WorkflowError
from agentrl.types import Task
from agentrl.workflow import RolloutWorkflow
from agentrl_rewards.extract import after
from agentrl_rewards.match import exact_match, numeric_match, read_number
from agentrl_workflows.corpus import DocumentIndex, check_bm25, read_documents

SEARCH_SYSTEM = (
    "Answer the question from the documents that the tools `search` and `open` show you. Some questions need two documents. "
    "End with a line `Answer: ` and the answer alone, as short as possible."
)


class SearchAgent(RolloutWorkflow):
    """Searches and opens documents until the model answers; pays 1.0 for one of the answers in `task["answer"]`.

    An answer is right without regard to case, punctuation and the way a number is written. Records `correct`, `searches`,
    `opened`, and `answered` (0: no line `Answer:` within `max_turns`).

    Args:
        corpus: JSONL files with `title` and `text` in each line; None: the bundled articles of Velmara.
        num_results: of one search.
        max_turns: model calls of one episode.
        max_document_chars: characters of a document that the model reads.
        system: the system message.
    """

    def __init__(
        self,
        *,
        corpus: str | Sequence[str] | None = None,
        num_results: int = 5,
        max_turns: int = 8,
        max_document_chars: int = 8_000,
        system: str = SEARCH_SYSTEM,
    ) -> None:
        if min(num_results, max_turns, max_document_chars) < 1:
            raise ConfigError("num_results, max_turns and max_document_chars must be at least 1")
        check_bm25()
        self._corpus, self._num_results, self._max_turns = corpus, num_results, max_turns
        self._max_document_chars, self._system = max_document_chars, system
        self._index: DocumentIndex | None = None
        self._one_search = anyio.CapacityLimiter(1)

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Read and index the corpus, in a thread.

        Raises:
            ConfigError: a file or line of the corpus cannot be used.

        Cancellation: the index is dropped.
        """
        self._index = await anyio.to_thread.run_sync(lambda: DocumentIndex(read_documents(self._corpus)))
        try:
            yield
        finally:
            self._index = None

    async def run(self, task: Task, client: Client) -> float:
        """Return 1.0 for a right answer, else 0.0.

        Cancellation: leaves nothing behind.
        """
        index = self._index
        if index is None:
            raise WorkflowError("the corpus is not indexed; run episodes inside `async with workflow.opened():`")
        searches, titles = 0, set[str]()

        @tool
        async def search(query: str) -> str:
            """Return the titles and beginnings of the documents that fit some words best."""
            nonlocal searches
            searches += 1
            limiter = self._one_search
            passages = await anyio.to_thread.run_sync(index.search, query, self._num_results, limiter=limiter)
            return "\n".join(f"{each.title}: {each.text[:100]}..." for each in passages) or "No document fits."

        @tool(name="open")
        async def open_document(title: str) -> str:
            """Return the text of the document with this title."""
            document = index.find(title)
            if document is None:
                raise ToolError(f"there is no document {title[:100]!r}; take a title from `search`")
            titles.add(document.title)
            return document.text[: self._max_document_chars]

        tools = [search, open_document]
        messages: list[MessageLike] = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": task["question"]},
        ]
        answer = None
        for _ in range(self._max_turns):
            completion = await client.chat.completions.create(messages=messages, tools=[each.schema for each in tools])
            message = completion.choices[0].message
            if not message.tool_calls:
                answer = after("Answer:")(message.content or "")
                break
            messages += [message, *[await reply_to(call, tools) for call in message.tool_calls]]
        reward = float(any(_is_right(answer, right) for right in _right_answers(task)))
        client.record(correct=reward, answered=answer is not None, searches=searches, opened=len(titles))
        return reward


def _right_answers(task: Task) -> list[str]:
    answer = task["answer"]
    return [str(each) for each in answer] if isinstance(answer, (list, tuple)) else [str(answer)]


def _is_right(answer: str | None, right: str) -> bool:
    return exact_match(answer, right) or (read_number(right) is not None and numeric_match(answer, right))
