"""Version-exactness: through hundreds of weight updates in the middle of running episodes, each trained token's recorded
log-prob is the one its recorded version gives it.

The verdict is Hugging Face's float32 forward pass on the CPU, under weights read from the published files. That the verdict
can be "no" is tested as well: on doctored episodes, and on servers that keep keys and values of former weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch

from agentrl.algo.config import AlgorithmConfig
from agentrl.engine.batch import VerifiedGroups, prepare_batch
from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.servers.embedded.faults import SGLangFault
from agentrl.servers.serve import serving
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.policy import PolicyTrainer
from agentrl.types import Group, Task, Trajectory, Turn, VersionSpan
from tests.support.accounts import check_accounts
from tests.support.interruption import Plan
from tests.support.judge import TOLERANCE, Judge
from tests.support.servers import RunningServer
from tests.support.version_run import Outcome, version_run

INTERRUPTIONS = {"embedded": 12, "sglang": 200}
"""Updates that must come while a completion is half-way."""
SPARE = 4
"""Updates more than that: a completion may end between the driver's look at it and the pause of a busy server."""
TOKENS_AFTER_A_BORDER = 10
"""Fewest that follow the first border of a cut completion on average: the verdict is on more than a token of each."""
LONG_TOKENS = 800
"""Output limit of the completions that an update waits for: it comes in the first quarter of one of them."""
SHORT_INTERRUPTIONS = 8
SHORT = Plan(updates=SHORT_INTERRUPTIONS + SPARE, episodes_in_flight=8, turns=(2, 3), long_tokens=LONG_TOKENS, seed=1)


async def _outcome(server: RunningServer, plan: Plan, folder: Path, *, pause: str = "exact") -> Outcome:
    return await version_run(server.url, server.kind, server.checkpoints[0], plan, folder=folder, pause=pause)


@pytest.mark.starts
async def test_every_token_of_interrupted_episodes_has_the_log_prob_of_its_recorded_version(
    server: RunningServer, tmp_path: Path
) -> None:
    wanted = INTERRUPTIONS[server.kind]
    outcome = await _outcome(server, Plan(updates=wanted + SPARE, long_tokens=LONG_TOKENS), tmp_path)
    judged = outcome.judged
    assert judged.complaints() == [], "\n".join(judged.complaints())
    assert outcome.interruptions >= wanted
    assert outcome.split_turns >= wanted
    # A wrong label would show: almost every token tells its version from the one before.
    assert judged.power > 0.99
    assert not judged.mislabelled.any()
    # A border falls anywhere in a completion, so half of its tokens follow, on a fast server as on a slow one.
    assert judged.interrupted.sum() >= TOKENS_AFTER_A_BORDER * outcome.split_turns
    assert all(one.probe_difference is not None and one.probe_difference < TOLERANCE for one in outcome.run.updates)


@pytest.mark.starts
async def test_tokens_are_as_exact_when_the_trainer_sends_the_weights_through_a_process_group(
    server: RunningServer, tmp_path: Path
) -> None:
    wanted = 12
    plan = Plan(updates=wanted + SPARE, long_tokens=LONG_TOKENS, seed=2)
    outcome = await version_run(server.url, server.kind, server.checkpoints[0], plan, folder=tmp_path, sync="distributed")
    judged = outcome.judged
    assert judged.complaints() == [], "\n".join(judged.complaints())
    assert outcome.interruptions >= wanted
    assert judged.power > 0.99


@pytest.mark.starts
async def test_the_verdict_catches_a_server_that_goes_on_with_keys_and_values_of_former_weights(
    server: RunningServer, tmp_path: Path
) -> None:
    judged = (await _outcome(server, SHORT, tmp_path, pause="fast")).judged
    complaints = judged.complaints()
    assert complaints
    assert float(np.median(judged.difference[judged.interrupted])) > 1e-3
    first = int(np.argmax(judged.difference))
    assert f"episode {judged.episodes[judged.episode[first]]}, turn {judged.turn[first]}, " in complaints[1]
    assert f"recorded version {judged.version[first]}: log-prob {judged.recorded[first]:.7f}" in complaints[1]


async def test_the_verdict_catches_prefixes_of_former_weights_that_reach_new_requests(
    checkpoints: dict[int, Path], tmp_path: Path
) -> None:
    """On a server as SGLang is, the salt alone keeps whole calls exact in the fast mode: without it they are not."""
    shares: list[float] = []
    for number, drop_salt in enumerate((False, True)):
        options = EngineOptions(model_path=str(checkpoints[0]), faults=frozenset({SGLangFault.STALE_PREFIX}))
        async with serving(EmbeddedEngine(options)) as url:
            outcome = await version_run(
                url,
                "embedded",
                checkpoints[0],
                SHORT,
                folder=tmp_path / str(number),
                pause="fast",
                drop_salt=drop_salt,
            )
        whole = outcome.judged.difference[~outcome.judged.interrupted]
        shares.append(float((whole > TOLERANCE).mean()))
    with_salt, without_salt = shares
    assert without_salt > 0.25
    assert with_salt < without_salt / 2


@pytest.mark.starts
@pytest.mark.parametrize(("pause", "low", "high"), [("exact", 0.0, 1e-4), ("fast", 1e-3, 10.0)])
async def test_the_trainer_reports_what_interruption_did_to_recorded_log_probs(
    server: RunningServer, tmp_path: Path, pause: str, low: float, high: float
) -> None:
    outcome = await _outcome(server, SHORT, tmp_path, pause=pause)
    last = outcome.run.first_version + SHORT.updates
    metrics = _train(outcome, last)
    assert outcome.interruptions >= SHORT_INTERRUPTIONS
    own = outcome.judged.version == last
    cut = outcome.judged.interrupted
    assert metrics["num_interrupted_tokens"] == cut.sum() > 0
    assert metrics["num_interrupted_fresh_tokens"] == (cut & own).sum() > 0
    assert low < metrics["mean_interrupted_difference"] <= metrics["max_interrupted_difference"] < high
    # The trainer's figure is the judge's, computed by another model on other kernels.
    assert metrics["max_interrupted_difference"] == pytest.approx(outcome.judged.difference[cut & own].max(), abs=1e-4)
    assert metrics["mean_logprob_difference"] == pytest.approx(outcome.judged.difference[own].mean(), abs=1e-4)


def _train(outcome: Outcome, version: int) -> dict[str, float]:
    """Return the metrics of one training step on all episodes of a run, by a trainer with the last weights served."""
    episodes = [
        replace(trajectory, final_reward=float(index % 2)) for index, trajectory in enumerate(outcome.run.trajectories)
    ]
    group = Group(index=0, task=Task(id="t", data={}), episodes=tuple(episodes), admitted_version=0)
    algorithm = AlgorithmConfig(advantage="episode", max_staleness=version)
    prepared = prepare_batch(VerifiedGroups.of([group]), version=version, algorithm=algorithm)
    model = PolicyModel(Path(outcome.versions.publication(version).path), device=torch.device("cpu"))
    report = PolicyTrainer(model, TrainerConfig(), algorithm, total_steps=1).step(prepared.batch)
    return dict(report.metrics)


@pytest.fixture(scope="module")
def short(embedded_server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A short interrupted run in good order, to be doctored; do not change it."""
    folder = tmp_path_factory.mktemp("short")
    return anyio.run(lambda: _outcome(embedded_server, SHORT, folder))


def _cut(outcome: Outcome) -> tuple[int, int]:
    """Return the episode and the turn of the first completion that an update cut, with tokens left before and after."""
    return next(
        (episode, index)
        for episode, trajectory in enumerate(outcome.run.trajectories)
        for index, turn in enumerate(trajectory.turns)
        if len(turn.spans) > 1 and all(span.end - span.start > 1 for span in turn.spans[:2])
    )


def _doctored(outcome: Outcome, change: Callable[[Turn], Turn]) -> tuple[list[Trajectory], str]:
    """Return the episodes with one cut completion changed, and how a message names it."""
    episode, index = _cut(outcome)
    trajectories = list(outcome.run.trajectories)
    turns = list(trajectories[episode].turns)
    turns[index] = change(turns[index])
    trajectories[episode] = replace(trajectories[episode], turns=tuple(turns))
    return trajectories, f"episode {trajectories[episode].episode_id}, turn {index}"


def _late(turn: Turn) -> Turn:
    """Move the first border between versions one token on."""
    first, second, *rest = turn.spans
    moved = (first._replace(end=first.end + 1), second._replace(start=second.start + 1))
    return replace(turn, spans=(*moved, *rest))


@pytest.mark.starts
def test_one_token_that_carries_the_version_before_its_own_is_named(short: Outcome) -> None:
    trajectories, name = _doctored(short, _late)
    judged = Judge(short.versions.base).judge(trajectories, short.versions.publication)
    count, line = judged.complaints()
    turn = trajectories[_cut(short)[0]].turns[_cut(short)[1]]
    assert count == f"1 of {len(judged.version)} tokens are off by more than 1e-05 nats"
    assert line.startswith(f"{name}, output token {turn.spans[0].end - 1}, recorded version {turn.spans[0].version}: ")
    with pytest.raises(AssertionError, match=rf"{name}: .*the server sampled these ids 1 times more, with spans"):
        check_accounts(trajectories, short.served)


@pytest.mark.starts
def test_log_probs_that_are_not_the_servers_are_named(short: Outcome) -> None:
    trajectories, name = _doctored(
        short, lambda turn: replace(turn, output_logprobs=turn.output_logprobs - np.float32(1e-4))
    )
    with pytest.raises(AssertionError, match=rf"{name}: .* and other log-probs"):
        check_accounts(trajectories, short.served)
    judged = Judge(short.versions.base).judge(trajectories, short.versions.publication)
    assert name in judged.complaints()[1]


@pytest.mark.starts
def test_a_lost_completion_and_an_invented_one_are_named(short: Outcome) -> None:
    with pytest.raises(AssertionError, match="completions were sampled and never recorded, such as request"):
        check_accounts(short.run.trajectories[1:], short.served)
    twice = [*short.run.trajectories, short.run.trajectories[0]]
    identity = short.run.trajectories[0].episode_id
    with pytest.raises(AssertionError, match=f"episode {identity}, turn 0: .* the server sampled these ids 0 times more"):
        check_accounts(twice, short.served)


@pytest.mark.starts
def test_spans_that_leave_a_token_out_are_named(short: Outcome) -> None:
    def gap(turn: Turn) -> Turn:
        first, *rest = turn.spans
        return replace(turn, spans=(VersionSpan(start=0, end=first.end - 1, version=first.version), *rest))

    trajectories, _ = _doctored(short, gap)
    with pytest.raises(Exception, match="span"):
        check_accounts(trajectories, short.served)
