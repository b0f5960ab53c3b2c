"""The search agent: tools, grading, own corpora, and an encyclopedia in which every question can be answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.tokens.verify import verify
from agentrl.types import Task
from agentrl_rewards.match import exact_match, normal_text
from agentrl_workflows.corpus import DocumentIndex, read_documents
from agentrl_workflows.search import SearchAgent
from agentrl_workflows.velmara import velmara_questions, velmara_tasks
from tests.support.player import Player, tool_call

PIRATE = Task(id="p", data={"question": "Who built the ship that caught Corin Vash?", "answer": ["Tamsin Quill"]})


async def test_the_agent_searches_opens_and_is_paid_for_the_right_answer(play: Player) -> None:
    right = [
        tool_call("search", query="pirate Corin Vash captured by"),
        tool_call("open", title="brenna holt"),
        tool_call("open", title="Patient Heron") + "\n" + tool_call("search", query="first ship with two hulls"),
        "Her grandmother built it.\nAnswer: tamsin quill.",
    ]
    clumsy = [
        tool_call("open", title="The Kraken"),
        tool_call("search", query="zzzz qqqq"),
        tool_call("search", query=""),
        tool_call("browse", url="http://example.com"),
        tool_call("search", question="who?"),
        "Answer: Brenna Holt",
    ]
    no_line = ["Tamsin Quill"]
    endless = [tool_call("search", query="ship")] * 8
    solved, failed, unmarked, unanswered = await play.all(SearchAgent(), PIRATE, right, clumsy, no_line, endless)

    assert (solved.final_reward, solved.failure) == (1.0, None)
    assert solved.metrics == {"correct": 1.0, "answered": 1.0, "searches": 2.0, "opened": 2.0}
    _, found, opened, both = play.read(solved)
    assert "Corin Vash: " in found
    assert "which her grandmother had built" in opened
    assert "launched in 231" in both
    assert "Tamsin Quill" in both
    verify(solved)

    assert (failed.final_reward, failed.metrics["answered"]) == (0.0, 1.0)
    _, missing, nothing, empty, unknown, wrong = play.read(failed)
    assert "Error: there is no document 'The Kraken'" in missing
    assert "No document fits." in nothing
    assert "No document fits." in empty
    assert "Error: there is no tool 'browse'" in unknown
    assert "Error: wrong arguments for search" in wrong
    for episode in (unmarked, unanswered):
        assert (episode.final_reward, episode.metrics["answered"], episode.failure) == (0.0, 0.0, None)


async def test_a_corpus_and_answers_of_one_s_own(play: Player, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"title": "Kettle", "text": "The kettle holds 1,200 millilitres. " * 50}, {"title": "Cup", "text": "A cup."}]
    corpus.write_text("\n".join(map(json.dumps, rows)))
    task = Task(id="k", data={"question": "How much does the kettle hold?", "answer": "1200"})
    workflow = SearchAgent(corpus=str(corpus), max_document_chars=30)
    episode = await play(workflow, task, tool_call("open", title="Kettle"), "Answer: 1,200.0")
    assert episode.final_reward == 1.0
    assert "holds 1,200 mil" in play.read(episode)[1]
    assert "millilitres. The" not in play.read(episode)[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"title": "a"}', "corpus.jsonl:1: expected text in the field 'text' or 'contents'"),
        ('{"title": "A b", "text": "x"}\n{"title": "a B", "text": "y"}', "corpus.jsonl:2: 'title': another document"),
        ("", "no records are left"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_named_by_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "corpus.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_documents(str(tmp_path / "corpus.jsonl"))


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        SearchAgent(num_results=0)
    with pytest.raises(ConfigError, match="expected a split"):
        velmara_tasks("test")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="no documents"):
        DocumentIndex([])


def test_every_question_about_velmara_is_answered_by_its_last_document_and_by_no_other_of_its_documents() -> None:
    texts = {document.title: normal_text(document.title + document.text) for document in read_documents(None)}
    questions = velmara_questions()
    assert len(questions) >= 40
    assert len({each.question for each in questions}) == len(questions)
    assert sum(len(each.documents) == 2 for each in questions) >= 15
    for each in questions:
        answers = [normal_text(answer) for answer in (each.answer, *each.also)]
        *before, last = (texts[title] for title in each.documents)
        assert any(answer in last for answer in answers), each.question
        assert not [text for text in before if normal_text(each.answer) in text], each.question
        assert normal_text(each.answer) not in normal_text(each.question), each.question


def test_a_search_for_the_question_finds_its_first_document_among_five() -> None:
    index = DocumentIndex(read_documents(None))
    missed = [
        each.question
        for each in velmara_questions()
        if not {document.title for document in index.search(each.question, 5)}.intersection(each.documents)
    ]
    assert missed == []


def test_the_splits_are_disjoint_and_every_reference_is_right() -> None:
    train, held_out = velmara_tasks(), velmara_tasks("held_out")
    assert len(train) + len(held_out) == len(velmara_questions())
    assert {task.id for task in train}.isdisjoint(task.id for task in held_out)
    assert all(exact_match(task["reference"].removeprefix("Answer: "), task["answer"][0]) for task in train)
