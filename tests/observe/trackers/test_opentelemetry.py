"""The real OpenTelemetry SDK gets the spans of a run."""
# The package is optional and its types are not ours: what it returns is checked at run time.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalOperand=false
# pyright: reportOperatorIssue=false, reportUnhashable=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from agentrl.errors import ConfigError
from agentrl.observe.trackers.base import TrackedRun
from agentrl.observe.trackers.feed import TrackerFeed
from agentrl.observe.trackers.to_opentelemetry import OpenTelemetryTracker
from tests.engine.harness import TASKS, make_engine, run
from tests.rollout.harness import make_renderer

pytestmark = pytest.mark.external


def test_spans_without_a_place_to_go_are_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    with pytest.raises(ConfigError, match="opentelemetry has nowhere to send spans; set OTEL_EXPORTER_OTLP_ENDPOINT"):
        OpenTelemetryTracker()


def test_a_run_has_spans_of_its_steps_their_work_and_its_episodes(tmp_path: Path) -> None:
    from opentelemetry import trace  # pyright: ignore[reportMissingImports]
    from opentelemetry.sdk.trace import TracerProvider  # pyright: ignore[reportMissingImports]
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # pyright: ignore[reportMissingImports]
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # pyright: ignore[reportMissingImports]
        InMemorySpanExporter,
    )

    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)  # after the other test: a process can set it once
    tracked = TrackedRun(name="r", run_dir=tmp_path, project="p", config={}, resumed_step=0, began_at=1_700_000_000.0)
    feed = TrackerFeed({"otel": OpenTelemetryTracker()}, tracked, samples=0, decode=str, finish_timeout_s=60)
    options = {"eval_every": 2, "eval_episodes": 2}
    engine = make_engine(tmp_path, make_renderer(tmp_path), steps=2, eval_tasks=TASKS[:2], engine=options, trackers=feed)
    anyio.run(run, engine)

    spans = memory.get_finished_spans()
    ids = {span.name: span.context.span_id for span in spans if span.name in ("run r", "step 1", "step 2")}
    parents = {span.name: span.parent and span.parent.span_id for span in spans}
    assert parents["step 1"] == parents["step 2"] == parents["evaluate"] == ids["run r"]
    trained = [span for span in spans if span.name == "train"]
    assert [span.parent.span_id for span in trained] == [ids["step 1"], ids["step 2"]]
    assert all(span.start_time < span.end_time for span in trained)
    [second] = [span for span in spans if span.name == "step 2"]
    assert second.attributes["agentrl.episodes"] == 6
    episodes = [span for span in spans if span.name == "episode"]
    assert len(episodes) == 2 * 6 + 2
    assert {span.attributes["agentrl.purpose"] for span in episodes} == {"training", "evaluation"}
    assert all([event.name for event in span.events] == ["model call"] for span in episodes)
    assert all(span.start_time <= span.events[0].timestamp <= span.end_time for span in episodes)
