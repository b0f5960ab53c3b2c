"""Servers whose log-probs are wrong are found while the trainer has the version, whatever the batches hold."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest

from agentrl.client import Client, MessageLike
from agentrl.engine.spot_check import SpotCheck
from agentrl.errors import InvariantError
from agentrl.inference.backend import GenerateRequest, Generation
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool.members import State
from agentrl.inference.pool.pool import ServerPool
from agentrl.servers.scripted.server import ScriptedServer, scripted_logprobs
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.base import StepReport, TrainBatch
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.types import Task
from agentrl.workflow import RolloutWorkflow
from tests.engine.harness import balance, coin, lines, make_engine, run


class Greedy(RolloutWorkflow):
    """Takes the most likely tokens, whose log-probs say nothing."""

    async def run(self, task: Task, client: Client) -> float:
        message: MessageLike = {"role": "user", "content": task["question"]}
        completion = await client.chat.completions.create(messages=[message], temperature=0)
        return float(completion.choices[0].message.content == task["answer"])


WRONG_FROM = 4
"""Policy version from which the faulty servers report wrong log-probs."""


class Faulty(ScriptedServer):
    """Reports other log-probs than it samples with, as a proxy or a broken kernel may, from version `WRONG_FROM` on."""

    change: Callable[[np.ndarray], np.ndarray] | None = None

    async def generate(self, request: GenerateRequest) -> Generation:
        generation = await super().generate(request)
        reported = generation.output_logprobs.copy()
        for span in generation.spans:
            if self.change is not None and span.version >= WRONG_FROM:
                reported[span.start : span.end] = self.change(reported[span.start : span.end])
        return replace(generation, output_logprobs=reported)


def servers_of(renderer: Renderer, *changes: Callable[[np.ndarray], np.ndarray] | None) -> list[Faulty]:
    """Return a server for each change; None: a server without a fault."""
    servers: list[Faulty] = []
    for number, change in enumerate(changes):
        [eos], url = renderer.eos_ids, f"scripted://{number}"
        server = Faulty(coin, vocab_size=renderer.vocab_size, encode=renderer.encode_content, eos_id=eos, url=url)
        server.change = change
        servers.append(server)
    return servers


def pool_of(*servers: ScriptedServer) -> ServerPool:
    return ServerPool(servers, InferenceConfig(health_interval_s=60))


def shifted(logprobs: np.ndarray) -> np.ndarray:
    return logprobs - 2.0


def trained_on_wrong_logprobs(trainer: ScriptedTrainer) -> int:
    """Return how many trained tokens carry another log-prob than the one of their version."""
    wrong = 0
    for batch in trainer.batches:
        for item in batch.samples:
            for at in np.flatnonzero(item.sample.loss_mask):
                pair = item.sample.token_ids[at - 1 : at + 1]
                right = scripted_logprobs(pair, int(item.sample.token_versions[at]))[0]
                wrong += abs(float(item.sample.behavior_logprobs[at] - right)) > 1e-3
    return wrong


async def test_a_server_that_is_2_nats_off_after_an_update_is_never_trained_on(tmp_path: Path, renderer: Renderer) -> None:
    trainer = ScriptedTrainer()
    async with pool_of(*servers_of(renderer, shifted)) as pool:
        engine = make_engine(tmp_path, renderer, trainer=trainer, inference=pool, steps=40, algorithm={"max_staleness": 4})
        with pytest.raises(InvariantError, match=r"scripted://0: log-probs of \d+ tokens .* differ .* by 2 nats on average"):
            await run(engine)
    assert len(trainer.batches) == WRONG_FROM - 1
    assert trained_on_wrong_logprobs(trainer) == 0


async def test_of_two_servers_the_wrong_one_is_taken_out_and_what_it_spoilt_is_dropped(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = ScriptedTrainer()
    servers = servers_of(renderer, None, shifted)
    async with pool_of(*servers) as pool:
        engine = make_engine(tmp_path, renderer, trainer=trainer, inference=pool, steps=12, algorithm={"max_staleness": 4})
        report = await run(engine)
        assert [server.state for server in pool.describe().servers] == [State.SERVING, State.WRONG]
    assert report.train_steps == 12
    assert trained_on_wrong_logprobs(trainer) == 0
    assert report.dropped_groups["unverified"] >= 1
    assert balance(report) == 0
    assert "scripted://1 is evicted from the pool" in caplog.text
    assert "groups with calls of scripted://1 since its last spot check are dropped" in caplog.text
    assert max(call.version for call in servers[1].calls) <= WRONG_FROM


async def test_a_server_that_has_finished_no_call_is_asked_for_one(tmp_path: Path, renderer: Renderer) -> None:
    servers = servers_of(renderer, None, shifted)
    async with pool_of(*servers) as pool:
        # One episode at a time, so every call of the run goes to the first server.
        engine = make_engine(tmp_path, renderer, inference=pool, steps=8, rollout={"max_concurrent_episodes": 1})
        report = await run(engine)
        assert pool.describe().servers[1].state is State.WRONG
    assert (report.train_steps, report.unchecked_steps, report.dropped_groups) == (8, 0, {})
    assert {call.episode_id for call in servers[1].calls} == {"spot check of scripted://1"}


async def test_every_step_of_a_run_compares_every_server(tmp_path: Path, renderer: Renderer) -> None:
    servers = servers_of(renderer, None, None)
    async with pool_of(*servers) as pool:
        report = await run(make_engine(tmp_path, renderer, inference=pool, steps=20, algorithm={"max_staleness": 4}))
    for line in lines(tmp_path / "metrics.jsonl", "step"):
        assert line["trainer.spot_check_tokens"] > 0
        assert line["trainer.unchecked_servers"] == 0
        assert line["trainer.max_spot_difference"] < 1e-5
    assert report.unchecked_steps == 0


async def test_a_log_prob_that_nothing_is_sampled_with_stops_the_run_at_once(tmp_path: Path, renderer: Renderer) -> None:
    trainer = ScriptedTrainer()
    servers = servers_of(renderer, None, lambda logprobs: np.full_like(logprobs, -1e30))
    async with pool_of(*servers) as pool:
        engine = make_engine(tmp_path, renderer, trainer=trainer, inference=pool, steps=40)
        with pytest.raises(InvariantError, match=r"scripted://1: reported a log-prob of -1e\+30 nats"):
            await run(engine)
    assert trained_on_wrong_logprobs(trainer) == 0


def one_shifted(logprobs: np.ndarray) -> np.ndarray:
    return logprobs - 2.0 * (np.arange(len(logprobs)) == 1)


async def test_one_token_over_the_bound_of_each_stops_the_run_whatever_the_mean_is(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with pool_of(*servers_of(renderer, one_shifted)) as pool:
        bounds = {"logprob_tolerance": 2.0, "max_logprob_difference": 1.9}
        engine = make_engine(tmp_path, renderer, inference=pool, steps=40, engine=bounds)
        with pytest.raises(InvariantError, match=r"by 2 nats at most, over 1\.9; see .* engine\.max_logprob_difference"):
            await run(engine)


async def test_a_negative_divergence_stops_the_run(tmp_path: Path, renderer: Renderer) -> None:
    class Measured(ScriptedTrainer):
        async def step(self, batch: TrainBatch) -> StepReport:
            report = await super().step(batch)
            kl = {"num_loss_tokens": 1000.0, "kl_behavior_proximal_k1": -1.0, "behavior_log_weight_mean": 1.0}
            return StepReport(metrics={**report.metrics, **kl})

    with pytest.raises(InvariantError, match=r"step 1: KL\(behavior \|\| proximal\) is -1 nats per token over 1000 tokens"):
        await run(make_engine(tmp_path, renderer, trainer=Measured()))


async def test_a_call_for_a_check_that_ends_too_late_is_named_as_the_reason(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Queueing(Faulty):
        async def generate(self, request: GenerateRequest) -> Generation:
            if request.episode_id.startswith("spot check"):
                await anyio.sleep_forever()
            return await super().generate(request)

    monkeypatch.setattr(SpotCheck, "ASK_TIMEOUT_S", 0.01)
    [first], [eos] = servers_of(renderer, None), renderer.eos_ids
    busy = Queueing(coin, vocab_size=renderer.vocab_size, encode=renderer.encode_content, eos_id=eos, url="scripted://busy")
    async with pool_of(first, busy) as pool:
        one_by_one = {"max_concurrent_episodes": 1}
        report = await run(make_engine(tmp_path, renderer, inference=pool, steps=6, rollout=one_by_one))
    assert report.unchecked_steps == 6
    assert (
        "scripted://busy: its log-probs have not been compared with the trainer's for 5 steps: it finished no call of"
        in (caplog.text)
    )


async def test_servers_that_cannot_be_compared_are_a_warning_and_in_the_report(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    async with pool_of(*servers_of(renderer, None)) as pool:
        engine = make_engine(tmp_path, renderer, inference=pool, steps=6, workflow=Greedy())
        with caplog.at_level(logging.WARNING):
            report = await run(engine)
    assert report.unchecked_steps == 6
    assert "for 5 steps: it finished no call at a temperature above 0" in caplog.text
