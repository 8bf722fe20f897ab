"""Sinks: events as lines of JSON, and as spans."""

from __future__ import annotations

import io
import json

import pytest

import perdure
from perdure.ext.inspection.sinks import JsonLines, OpenTelemetry
from perdure.testing.toy import ToyModel


def test_json_lines_are_written_one_an_event() -> None:
    target = io.StringIO()
    with perdure.open(ToyModel(), n_ctx=256, slots=1) as rt:
        rt.observe(JsonLines(target))
        rt.generate("hello", max_tokens=3, ignore_eos=True)
    lines = [json.loads(line) for line in target.getvalue().splitlines()]
    assert lines[-1]["kind"] in ("Ended", "BlocksStored")
    assert sum(line["kind"] == "TokenDrawn" for line in lines) == 3


def test_spans_follow_the_conventions_of_open_telemetry() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with perdure.open(ToyModel(), n_ctx=256, slots=1) as rt:
        rt.observe(OpenTelemetry(provider.get_tracer("test"), model="toy"))
        rt.generate("hello", max_tokens=3, ignore_eos=True)
    (span,) = exporter.get_finished_spans()
    assert span.name == "text_completion toy"
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.input_tokens"] == 5
    assert span.attributes["gen_ai.usage.output_tokens"] == 3
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert {event.name for event in span.events} >= {"perdure.placed", "gen_ai.first_token"}
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time >= span.start_time
