"""A search waits for the readers: an episode is not held up by it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl_viewer.view.episode_search import search_texts
from agentrl_viewer.view.turns import ReadersFirst

PATIENCE_S = 300


def test_a_search_waits_between_two_records_while_someone_reads(run_dir: Path) -> None:
    turns, stop = ReadersFirst(), threading.Event()
    asked, ended = threading.Semaphore(0), threading.Event()

    def may_go_on() -> bool:
        asked.release()
        return turns.wait_until_free(stop)

    def search() -> None:
        for _ in search_texts(run_dir, "no record says this", may_go_on=may_go_on):
            pass
        ended.set()

    with turns.reading():
        searcher = threading.Thread(target=search)
        searcher.start()
        assert asked.acquire(timeout=PATIENCE_S)  # it is at its first record
        assert not asked.acquire(blocking=False)
        assert not ended.is_set()
    searcher.join(PATIENCE_S)
    assert ended.is_set()


def test_a_search_that_was_stopped_ends_before_its_next_record(run_dir: Path) -> None:
    answers = iter([True, True, True])
    found = list(search_texts(run_dir, "no record says this", may_go_on=lambda: next(answers, False)))
    assert found == []
    assert next(answers, None) is None


def test_a_search_that_waits_ends_when_it_is_stopped() -> None:
    turns, stop = ReadersFirst(), threading.Event()
    with turns.reading():
        stop.set()
        assert not turns.wait_until_free(stop)


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    before = set(threading.enumerate())  # a thread of an earlier test may end meanwhile
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(300)
        assert not thread.is_alive(), thread.name
