"""A corpus of documents and its search by BM25 (bm25s), for the search agent.

Invariant: the same documents and query give the same results, the best first; a document without a word of the query is no
result.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.data.source import read_records
from agentrl.errors import ConfigError
from agentrl_rewards.match import normal_text
from agentrl_workflows.velmara import velmara_articles

_MAX_QUERY_CHARS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text that can be found and opened."""

    title: str
    text: str


def read_documents(path: str | Sequence[str] | None) -> list[Document]:
    """Return the documents of JSONL files with `title` and `text` in each line; None: the articles of Velmara.

    Raises:
        ConfigError: a file or line cannot be used, or two documents have the same title.
    """
    if path is None:
        return [Document(title=title, text=text) for title, text in velmara_articles()]
    documents: dict[str, Document] = {}
    for record in read_records(path):
        document = Document(title=record.text("title", "id"), text=record.text("text", "contents"))
        if documents.setdefault(normal_text(document.title), document) is not document:
            raise record.error(f"'title': another document is called {document.title!r}; titles must be unique")
    return list(documents.values())


def check_bm25() -> None:
    """Check that the search library is installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("bm25s") is None:
        raise ConfigError("searching a corpus needs bm25s, which is not installed; run `pip install 'agentrl[search]'`")


class DocumentIndex:
    """The index of a corpus; building it takes about a minute for a million short documents."""

    def __init__(self, documents: Sequence[Document]) -> None:
        """Index titles and texts.

        Raises:
            ConfigError: bm25s is not installed, or there are no documents.
        """
        check_bm25()
        if not documents:
            raise ConfigError("the corpus has no documents")
        self._bm25s: Any = importlib.import_module("bm25s")
        self._documents = tuple(documents)
        self._by_title = {normal_text(document.title): document for document in documents}
        self._index = self._bm25s.BM25()
        self._index.index(self._tokens([f"{each.title} {each.text}" for each in documents]), show_progress=False)

    def search(self, query: str, num_results: int) -> list[Document]:
        """Return the documents that fit the query, at most `num_results`, the best first."""
        tokens = self._tokens([query[:_MAX_QUERY_CHARS]])
        if not any(word in self._index.vocab_dict for word in tokens[0]):
            return []
        count = min(num_results, len(self._documents))
        found, scores = self._index.retrieve(tokens, k=count, show_progress=False)
        return [self._documents[at] for at, score in zip(found[0], scores[0], strict=True) if score > 0]

    def find(self, title: str) -> Document | None:
        """Return the document of a title, whatever its case and punctuation."""
        return self._by_title.get(normal_text(title))

    def _tokens(self, texts: Sequence[str]) -> list[list[str]]:
        return self._bm25s.tokenize(list(texts), stopwords="en", return_ids=False, show_progress=False)
