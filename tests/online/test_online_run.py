"""An online run from request to training step: conversations, feedback, and what is left."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from agentrl.servers.scripted.script import Hold, ScriptedCall, ScriptedReply
from agentrl.tokens.renderer import Renderer
from agentrl_doors.gateway.sessions.session import JOINED_METRIC
from tests.engine.harness import balance, episodes, lines
from tests.online.harness import online_run
from tests.support.doors import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Doors and their clients need asyncio."""
    return "asyncio"


async def test_two_conversations_with_feedback_become_a_training_step(tmp_path: Path, renderer: Renderer) -> None:
    def script(call: ScriptedCall) -> str:
        return "good" if call.index % 2 else "bad"

    run_dir = tmp_path / "run"
    async with online_run(run_dir, renderer, script=script) as run:
        first, first_id = await run.chat("Hello.")
        again, same_id = await run.chat("Hello.", "bad", "And now?")
        assert same_id == first_id, "the history says which conversation it is"
        other, other_id = await run.chat("Hi.", key="app")
        assert other_id != first_id
        assert await run.feedback(0.25, response_id=first["id"]) == (
            200,
            {"object": "feedback", "accepted": True, "conversation_id": first_id},
        )
        assert (await run.feedback(1.0, conversation_id=first_id))[0] == 200
        assert (await run.feedback(0.0, conversation_id=other_id, key="app"))[0] == 200
        await until(lambda: run.trainer.batches)
        assert again["id"] != other["id"]
    [batch] = run.trainer.batches
    advantages = sorted({float(value) for each in batch.samples for value in each.advantages[each.sample.loss_mask]})
    # Returns 1.25 and 0 are compared with each other: half of their difference each way.
    assert np.allclose(advantages, [-0.625, 0.625])
    found = {each["episode_id"].partition(".")[2]: each for each in episodes(run_dir)}
    assert found[first_id]["final_reward"] == 1.0
    assert [turn["reward"] for turn in found[first_id]["turns"]] == [0.25, None]
    assert found[first_id]["turns"][1]["parent"] == 0, "the second turn continues the sampled ids of the first"
    assert len(lines(run_dir / "metrics.jsonl", "step")) == 1
    assert run.report is not None
    assert balance(run.report) == 0
    assert list((run_dir / "online").glob("*.jsonl")) != []


async def test_feedback_that_cannot_count_is_refused_with_a_reason(tmp_path: Path, renderer: Renderer) -> None:
    async with online_run(tmp_path / "run", renderer) as run:
        answer, conversation = await run.chat("Hello.")
        refusals = (
            (404, "no conversation of this key", run.feedback(1.0, response_id="chatcmpl-unknown")),
            (404, "no conversation of this key", run.feedback(1.0, response_id=answer["id"], key="app")),
            (404, "no conversation of this key", run.feedback(1.0, conversation_id=conversation, key="app")),
            (400, "a reward is a number", run.feedback("good", response_id=answer["id"])),
            (400, "a feedback is", run.feedback(1.0)),
            (400, "a feedback is", run.feedback(1.0, response_id=answer["id"], conversation_id=conversation)),
            (400, "is true or false", run.feedback(1.0, conversation_id=conversation, final=False)),
            (401, "requires a key", run.feedback(1.0, response_id=answer["id"], key="wrong")),
        )
        for status, words, refused in refusals:
            found, body = await refused
            assert (found, words in body["error"]["message"]) == (status, True), body
        assert (await run.feedback(0.5, response_id=answer["id"]))[0] == 200
        found, body = await run.feedback(0.5, response_id=answer["id"])
        assert (found, "has the reward 0.5 already" in body["error"]["message"]) == (409, True)
        assert (await run.feedback(1.0, response_id=answer["id"], final=True))[0] == 200
        for ids in ({"response_id": answer["id"]}, {"conversation_id": conversation}):
            found, body = await run.feedback(1.0, **ids)
            assert (found, "has ended" in body["error"]["message"]) == (409, True)


async def test_a_program_with_a_key_for_calls_alone_cannot_pay_itself(tmp_path: Path, renderer: Renderer) -> None:
    async with online_run(tmp_path / "run", renderer) as run:
        answer, conversation = await run.chat("Hello.", key="agent/calls")
        body = {"reward": 1.0, "response_id": answer["id"]}
        for path in (
            "/feedback",
            "/v1/feedback",
            f"/c/{conversation}/feedback",
            f"/c/{conversation}/v1/feedback",
            "//feedback",
        ):
            status, refusal, _ = await run.post(path, body, key="agent/calls")
            assert status in (403, 404), (path, refusal)
        found, refusal = await run.feedback(1.0, conversation_id=conversation, key="agent/calls")
        assert (found, "use the key agent/feedback" in refusal["error"]["message"]) == (403, True)
        asked = {"model": "policy", "messages": [{"role": "user", "content": "Hello."}]}
        assert (await run.post("/v1/chat/completions", asked, key="agent/feedback"))[0] == 403
        assert (await run.feedback(1.0, conversation_id=conversation, key="agent/feedback"))[0] == 200


async def test_a_conversation_is_found_by_its_id_and_by_the_response_that_it_continues(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with online_run(tmp_path / "run", renderer) as run:
        _, named = await run.chat("Hello.", headers={"x-agentrl-conversation": "ticket-7"})
        body = {"model": "policy", "messages": [{"role": "user", "content": "Something else."}]}
        _, _, by_path = await run.post("/c/ticket-7/v1/chat/completions", body)
        _, _, by_metadata = await run.post("/v1/chat/completions", {**body, "metadata": {"conversation_id": "ticket-7"}})
        _, foreign = await run.chat("Hello.", key="app", headers={"x-agentrl-conversation": "ticket-7"})
        assert {named, by_path["x-agentrl-conversation"], by_metadata["x-agentrl-conversation"], foreign} == {"ticket-7"}
        episodes = [each.episode for each in run.traffic.conversations]
        assert sorted(len(each.turns) for each in episodes) == [1, 3], "another key has conversations of its own"

        _, first, sent = await run.post("/v1/responses", {"model": "policy", "input": "Hi."})
        asked = {"model": "policy", "input": "And?", "previous_response_id": first["id"]}
        status, second, continued = await run.post("/v1/responses", asked)
        assert (status, continued["x-agentrl-conversation"]) == (200, sent["x-agentrl-conversation"])
        status, body, _ = await run.post("/v1/responses", {**asked, "previous_response_id": "resp_unknown"})
        assert (status, "resp_unknown" in body["error"]["message"], second["previous_response_id"]) == (
            400,
            True,
            first["id"],
        )

        claude: dict[str, Any] = {"model": "policy", "max_tokens": 8, "messages": [{"role": "user", "content": "Hey."}]}
        status, answer, sent = await run.post("/v1/messages", claude, key="app")
        assert (status, answer["content"][0]["text"]) == (200, "good")
        history = [
            *claude["messages"],
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": "?"},
        ]
        _, _, again = await run.post("/v1/messages", {**claude, "messages": history}, key="app")
        assert again["x-agentrl-conversation"] == sent["x-agentrl-conversation"]
        status, body, _ = await run.post("/v1/messages/count_tokens", claude, key="app")
        assert (status, body["input_tokens"] > 0) == (200, True)
        assert len(run.traffic.conversations) == 4, "counting tokens opens no conversation"


async def test_equal_first_requests_at_once_are_two_users_and_a_marked_retry_is_the_same_one(
    tmp_path: Path, renderer: Renderer
) -> None:
    holds = [Hold(), Hold()]
    names: list[str] = []
    retry = {"x-stainless-retry-count": "1"}

    def script(call: ScriptedCall) -> ScriptedReply:
        return ScriptedReply(output="good", holds=(holds[call.index],) if call.index < len(holds) else ())

    async with online_run(tmp_path / "run", renderer, script=script) as run:

        async def ask(headers: dict[str, str] | None = None) -> None:
            _, name = await run.chat("Hello.", headers=headers)
            names.append(name)

        async with anyio.create_task_group() as users:
            for hold in holds:
                users.start_soon(ask)
                await hold.reached.wait()
            users.start_soon(ask, retry)
            await until(lambda: any(JOINED_METRIC in each.episode.metrics for each in run.traffic.conversations))
            for hold in holds:
                hold.release.set()
        assert (len(names), len(set(names))) == (3, 2)
        await ask(retry)
        assert len(set(names)) == 3, "an answer that arrived may be that of another user who said the same"


async def test_a_client_beyond_its_limits_is_told_when_to_call_again(tmp_path: Path, renderer: Renderer) -> None:
    async with online_run(tmp_path / "run", renderer, requests_per_minute=2) as run:
        await run.chat("Hello.")
        await run.chat("Hi.")
        status, body, headers = await run.post("/v1/messages", {})
        assert (status, body["type"], body["error"]["type"]) == (429, "error", "rate_limit_error")
        assert 1 <= int(headers["Retry-After"]) <= 60
        assert (await run.post("/v1/messages", {}, key="app"))[0] == 400, "another client has a limit of its own"


async def test_more_calls_at_once_than_a_key_may_make_are_refused(tmp_path: Path, renderer: Renderer) -> None:
    hold = Hold()

    def script(call: ScriptedCall) -> ScriptedReply:
        return ScriptedReply(output="good", holds=(hold,))

    async with online_run(tmp_path / "run", renderer, script=script, max_calls=1) as run, anyio.create_task_group() as tasks:
        tasks.start_soon(run.chat, "Hello.")
        await hold.reached.wait()
        status, body, _ = await run.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi."}]})
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        hold.release.set()


async def test_an_idle_conversation_ends_and_only_one_with_feedback_is_trained(tmp_path: Path, renderer: Renderer) -> None:
    async with online_run(tmp_path / "run", renderer, idle_s=0.5, steps=2) as run:
        await run.chat("Nobody says anything.")
        await until(lambda: lines(tmp_path / "run" / "metrics.jsonl", "dropped_group"))
        kept: set[str] = set()
        for reward in (0.0, 1.0):
            answer, conversation = await run.chat("Tell me.")
            if (await run.feedback(reward, response_id=answer["id"]))[0] == 200:
                kept.add(conversation)
        await until(lambda: run.trainer.batches or len(kept) < 2)
    dropped = lines(tmp_path / "run" / "metrics.jsonl", "dropped_group")
    assert dropped[0]["reason"] == "no_feedback"
    assert len(run.trainer.batches) == len(kept) // 2
    assert {each["episode_id"].partition(".")[2] for each in episodes(tmp_path / "run")} == kept, (
        "what is left is in no record"
    )


async def test_a_conversation_older_than_the_bound_is_left(tmp_path: Path, renderer: Renderer) -> None:
    async with online_run(tmp_path / "run", renderer, steps=2, algorithm={"max_staleness": 0}) as run:
        _, stale = await run.chat("Hello.")
        for reward in (0.0, 1.0):
            _, fresh = await run.chat("Hi.", key="app")
            await run.feedback(reward, conversation_id=fresh, key="app")
        await until(lambda: lines(tmp_path / "run" / "metrics.jsonl", "step"))
        assert (await run.feedback(1.0, conversation_id=stale))[0] == 200
        await until(lambda: lines(tmp_path / "run" / "metrics.jsonl", "dropped_group"))
    [dropped] = lines(tmp_path / "run" / "metrics.jsonl", "dropped_group")
    assert dropped["reason"] == "over_age"


async def test_a_run_is_idle_while_it_waits_for_people_and_not_while_a_call_runs(tmp_path: Path, renderer: Renderer) -> None:
    hold = Hold()

    def script(call: ScriptedCall) -> ScriptedReply:
        return ScriptedReply(output="good", holds=(hold,))

    async with online_run(tmp_path / "run", renderer, script=script) as run, anyio.create_task_group() as tasks:
        await until(run.traffic.is_idle)
        tasks.start_soon(run.chat, "Hello.")
        await hold.reached.wait()
        assert not run.traffic.is_idle()
        hold.release.set()
        await until(run.traffic.is_idle)


async def test_no_word_of_a_conversation_and_no_key_is_logged(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    async with online_run(tmp_path / "run", renderer) as run:
        answer, _ = await run.chat("A rare word: quaxolotl.")
        await run.feedback(1.0, response_id=answer["id"])
        await run.post("/v1/chat/completions", {"messages": "quaxolotl"})
    written = caplog.text + "".join(capfd.readouterr())
    assert "quaxolotl" not in written
    assert "key-of-web" not in written + (tmp_path / "run" / "metrics.jsonl").read_text()


async def test_a_feedback_counts_whole_or_not_at_all(tmp_path: Path, renderer: Renderer) -> None:
    async with online_run(tmp_path / "run", renderer) as run:
        answer, _ = await run.chat("Hello.")
        for wrong in (None, [1], {}, {"a": {"b": 1}}, {"a": "1"}, 1e31):
            assert (await run.feedback(wrong, response_id=answer["id"]))[0] == 400
        assert (await run.feedback(True, response_id=answer["id"]))[0] == 200
        assert (await run.feedback(True, response_id=answer["id"]))[0] == 409
        [stored] = [path for path in (tmp_path / "run" / "online").glob("*.jsonl") if path.name != "taken.jsonl"]
        assert b'"reward":1.0' in stored.read_bytes()


async def test_an_unused_conversation_gives_way_and_no_key_shuts_another_one_out(tmp_path: Path, renderer: Renderer) -> None:
    run_dir = tmp_path / "run"
    async with online_run(run_dir, renderer, max_conversations=4) as run:
        names = [(await run.chat(f"Hello {number}."))[1] for number in range(4)]
        answer, _ = await run.chat("Hello 0.", "good", "And?")
        assert (await run.feedback(0.5, response_id=answer["id"]))[0] == 200
        await run.chat("Hi.", key="app")  # the oldest one without feedback of the key that holds most gives way
        await run.chat("Hi again.", key="app")
        await run.chat("Hello 5.")  # at its share, a key's own gives way
        conversations = [(each.client, each.name) for each in run.traffic.conversations]
        assert [client for client, _ in conversations].count("app") == 2
        assert ("web", names[0]) in conversations, "it has feedback"
        assert not {names[1], names[2], names[3]} & {name for _, name in conversations}
        found, body = await run.feedback(1.0, conversation_id=names[1])
        assert (found, "has ended" in body["error"]["message"]) == (409, True)
    assert run.report is not None
    assert dict(run.report.dropped_groups)["crowded_out"] == 3


async def test_new_users_are_served_while_many_silent_conversations_are_open(tmp_path: Path, renderer: Renderer) -> None:
    most, of_web, of_app = 8, 40, 12
    async with online_run(tmp_path / "run", renderer, max_conversations=most) as run:
        silent = [(await run.chat(f"Hello {number}."))[1] for number in range(of_web)]
        assert [each.name for each in run.traffic.conversations] == silent[-most:], "the longest idle ones went"
        rewarded, liked = await run.chat("Thank you.")
        assert (await run.feedback(0.5, response_id=rewarded["id"]))[0] == 200
        for number in range(of_app):
            await run.chat(f"Hi {number}.", key="app")
        held = Counter(each.client for each in run.traffic.conversations)
        assert held == {"web": most // 2, "app": most // 2}, "each key has its share"
        names = [each.name for each in run.traffic.conversations]
        assert liked in names, "it has feedback"
        assert set(silent) & set(names) == set(silent[1 - most // 2 :]), "those of web that were used last"
    assert run.report is not None
    assert dict(run.report.dropped_groups)["crowded_out"] == of_web + 1 + of_app - most


async def test_a_server_whose_conversations_are_all_busy_says_so(tmp_path: Path, renderer: Renderer) -> None:
    hold = Hold()

    def script(call: ScriptedCall) -> ScriptedReply:
        return ScriptedReply(output="good", holds=(hold,))

    async with (
        online_run(tmp_path / "run", renderer, script=script, max_conversations=1) as run,
        anyio.create_task_group() as users,
    ):
        users.start_soon(run.chat, "Hello.")
        await hold.reached.wait()
        status, body, headers = await run.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi."}]})
        assert (status, headers["Retry-After"], "conversations are open" in str(body)) == (503, "30", True)
        hold.release.set()
