"""`track: [opentelemetry]`: spans of the run, its steps with the work in them, its evaluations, and its episodes.

Invariant: spans go to the tracer provider of the program; where it has set none, to the OTLP endpoint of the environment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from agentrl.episode.summary import Purpose, is_success
from agentrl.errors import ConfigError
from agentrl.observe.timeline import Activity
from agentrl.observe.trackers.base import RunStatus, TrackedRun, Tracker
from agentrl.types import Trajectory

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class OpenTelemetryTracker(Tracker):
    """Makes spans from the records of a run, with the times of the records."""

    def __init__(self) -> None:
        """Check that there is somewhere to send spans to."""
        from opentelemetry import trace  # pyright: ignore[reportMissingImports]

        self._own = isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
        if self._own and not any(os.environ.get(name) for name in _ENDPOINTS):
            raise ConfigError(
                "track: opentelemetry has nowhere to send spans; set OTEL_EXPORTER_OTLP_ENDPOINT, such as "
                "http://127.0.0.1:4318, or a tracer provider in your program"
            )
        if self._own:
            try:
                import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401  # pyright: ignore
            except ImportError as error:
                raise ConfigError(
                    f"track: opentelemetry cannot send spans to an endpoint without its exporter ({error}); "
                    "pip install 'agentrl[opentelemetry]', or set a tracer provider in your program"
                ) from error

    def start(self, run: TrackedRun) -> None:
        """Open the span of the run."""
        from opentelemetry import trace  # pyright: ignore[reportMissingImports]

        self._trace, self._began_at = trace, run.began_at
        self._moments = time.time() - time.perf_counter()
        self._provider: Any = _make_provider(run.name) if self._own else trace.get_tracer_provider()
        self._tracer: Any = self._provider.get_tracer("agentrl")
        attributes = {"agentrl.run": run.name, "agentrl.project": run.project, "agentrl.resumed_step": run.resumed_step}
        self._run = self._open(f"run {run.name}", None, time.time(), attributes)
        self._steps: dict[int, Any] = {}
        self._done = run.resumed_step

    def activity(self, activity: Activity) -> None:
        """Make a span of an activity, inside that of its step; one of a step that is over stands beside the steps."""
        begin, end = self._began_at + activity.start_s, self._began_at + activity.end_s
        name = activity.activity.replace("_", " ")
        attributes = {"agentrl.actor": activity.actor, "agentrl.step": activity.step}
        parent = self._run if activity.step <= self._done else self._step(activity.step, begin)
        self._open(name, parent, begin, attributes).end(_nanoseconds(end))

    def episode(self, step: int, purpose: Purpose, episode: Trajectory) -> None:
        """Make a span of an episode, beside the steps, with its model calls as events."""
        if episode.started_s is None or episode.ended_s is None:
            return  # it never ran
        failed = episode.failure is not None
        attributes = {
            "agentrl.step": step,
            "agentrl.purpose": purpose,
            "agentrl.episode_id": episode.episode_id,
            "agentrl.task_id": episode.task_id,
            "agentrl.stop_reason": str(episode.stop_reason),
            **({} if failed else {"agentrl.return": episode.episode_return, "agentrl.success": is_success(episode)}),
        }
        span = self._open("episode", self._run, self._moments + episode.started_s, attributes)
        for number, turn in enumerate(episode.turns):
            if turn.started_s is None or turn.ended_s is None:
                continue
            call: dict[str, str | int | float] = {
                "agentrl.turn": number,
                "agentrl.seconds": turn.ended_s - turn.started_s,
                "agentrl.stop_reason": str(turn.stop_reason),
                "gen_ai.usage.output_tokens": len(turn.output_ids),
            }
            span.add_event("model call", call, timestamp=_nanoseconds(self._moments + turn.ended_s))
        if episode.failure is not None:
            span.set_status(self._trace.StatusCode.ERROR, f"{episode.failure.kind}: {episode.failure.message}")
        span.end(_nanoseconds(self._moments + episode.ended_s))

    def step(self, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        """Close the span of a step, with its numbers as attributes."""
        end = self._began_at + wall_s
        span = self._step(step, end)
        span.set_attributes({f"agentrl.{key}": value for key, value in numbers.items()})
        span.end(_nanoseconds(end))
        del self._steps[step]
        self._done = step

    def finish(self, status: RunStatus) -> None:
        """Close the span of the run, and send what is left."""
        for span in self._steps.values():
            span.end()
        self._run.set_attribute("agentrl.status", status)
        if status == "failed":
            self._run.set_status(self._trace.StatusCode.ERROR)
        self._run.end()
        if self._own:
            self._provider.shutdown()

    def _step(self, number: int, begin: float) -> Any:  # noqa: ANN401 - a span
        if number not in self._steps:
            self._steps[number] = self._open(f"step {number}", self._run, begin, {"agentrl.step": number})
        return self._steps[number]

    def _open(self, name: str, parent: Any, begin: float, attributes: Mapping[str, object]) -> Any:  # noqa: ANN401 - spans
        context = None if parent is None else self._trace.set_span_in_context(parent)
        return self._tracer.start_span(name, context=context, start_time=_nanoseconds(begin), attributes=attributes)


def _make_provider(run: str) -> Any:  # noqa: ANN401 - of a package that may be missing
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # pyright: ignore[reportMissingImports]
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.resources import Resource  # pyright: ignore[reportMissingImports]
    from opentelemetry.sdk.trace import TracerProvider  # pyright: ignore[reportMissingImports]
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # pyright: ignore[reportMissingImports]

    provider = TracerProvider(resource=Resource.create({"service.name": "agentrl", "service.instance.id": run}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _nanoseconds(unix_s: float) -> int:
    return round(unix_s * 1e9)
