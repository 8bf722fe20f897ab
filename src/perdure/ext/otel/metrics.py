"""Metrics for OpenTelemetry: those of the GenAI conventions, and the server's own as `/metrics` has them.

    gen_ai.server.time_to_first_token {gen_ai.operation.name: chat, gen_ai.response.model: qwen}    histogram
    perdure_replies                   {finish_reason: stop}                                         sum

The first are made of the same replies that the server counts, the others are read out of its registry.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    PeriodicExportingMetricReader,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

from perdure import Timings
from perdure.ext.otel.delivery import Delivery
from perdure.spi.server import StreamEnd

# As the conventions advise.
_TOKENS = tuple(float(4**power) for power in range(14))
_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

_HISTOGRAMS = {
    "gen_ai.client.token.usage": ("{token}", "Tokens read and written", _TOKENS),
    "gen_ai.server.request.duration": ("s", "From submission to the end of a reply", _SECONDS),
    "gen_ai.server.time_to_first_token": ("s", "From submission to the first token", _FIRST_TOKEN),
    "gen_ai.server.time_per_output_token": ("s", "A token after the first", _PER_TOKEN),
}
_FOR_GATEWAYS = "vllm:"
"""How names begin that say the same once more."""


class Meters:
    """Records what the conventions name, and sends all metrics now and then, in a separate thread."""

    def __init__(
        self, url: str, delivery: Delivery, resource: Any, registry: CollectorRegistry, started: float
    ) -> None:
        exporter = _Exporter(url, delivery, registry, resource, int(started * 1e9))
        # How often: the variable OTEL_METRIC_EXPORT_INTERVAL.
        self._provider = MeterProvider(
            [PeriodicExportingMetricReader(exporter)],
            resource=resource,
            shutdown_on_exit=False,
            views=[
                View(instrument_name=name, aggregation=ExplicitBucketHistogramAggregation(bounds))
                for name, (_, _, bounds) in _HISTOGRAMS.items()
            ],
        )
        meter = self._provider.get_meter("perdure.gen_ai")
        self._record = {
            name: meter.create_histogram(name, unit=unit, description=what).record
            for name, (unit, what, _) in _HISTOGRAMS.items()
        }

    def replied(self, end: StreamEnd, operation: str, seconds: float, error: str | None) -> None:
        """Record one stream. Only names of the server's own models: clients can send any."""
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "perdure",
            "gen_ai.request.model": end.model,
            "gen_ai.response.model": end.model,
        }
        for kind, tokens in (
            ("input", end.usage.prompt_tokens),
            ("output", end.usage.completion_tokens),
        ):
            self._record["gen_ai.client.token.usage"](tokens, {**attributes, "gen_ai.token.type": kind})
        failed = {"error.type": error} if error else {}
        self._record["gen_ai.server.request.duration"](seconds, attributes | failed)
        if not error:
            for reply in end.replies:
                self._timings(reply.timings, attributes)

    def _timings(self, timings: Timings, attributes: Mapping[str, str]) -> None:
        if timings.decoded_tokens:
            self._record["gen_ai.server.time_to_first_token"](timings.queued + timings.prefill, attributes)
        if timings.decode_speed:
            self._record["gen_ai.server.time_per_output_token"](1 / timings.decode_speed, attributes)

    def close(self, seconds: float) -> None:
        """Send the last figures, for so long at most."""
        # It raises where the collector is away.
        with suppress(Exception):
            self._provider.shutdown(timeout_millis=max(100.0, seconds * 1000))


class _Exporter(OTLPMetricExporter):  # type: ignore[misc]
    """Sends what the SDK has collected, and the server's registry with it."""

    def __init__(
        self, url: str, delivery: Delivery, registry: CollectorRegistry, resource: Any, started: int
    ) -> None:
        super().__init__(endpoint=url)
        self._delivery = delivery
        self._registry = registry
        self._resource = resource
        self._started = started

    def export(self, metrics_data: Any, timeout_millis: float = 10_000, **more: object) -> Any:
        own = ScopeMetrics(
            InstrumentationScope("perdure"),
            read(self._registry.collect(), self._started, time.time_ns()),
            "",
        )
        scopes = [each for group in metrics_data.resource_metrics for each in group.scope_metrics]
        data = MetricsData([ResourceMetrics(self._resource, [*scopes, own], "")])
        result = super().export(data, timeout_millis=timeout_millis, **more)
        self._delivery.report(taken=result is MetricExportResult.SUCCESS)
        return result


def read(families: Iterable[Family], started: int, now: int) -> list[Any]:
    """Metrics of Prometheus as those of OpenTelemetry, under the same names."""
    metrics = []
    for family in families:
        if family.name.startswith(_FOR_GATEWAYS):
            continue
        data: Any
        if family.type == "histogram":
            data = Histogram(_histograms(family.samples, started, now), AggregationTemporality.CUMULATIVE)
        else:
            points = [
                NumberDataPoint(dict(each.labels), started, now, each.value)
                for each in family.samples
                if not each.name.endswith("_created")
            ]
            is_sum = family.type == "counter"
            data = Sum(points, AggregationTemporality.CUMULATIVE, True) if is_sum else Gauge(points)
        if data.data_points:
            metrics.append(Metric(family.name, family.documentation, "", data))
    return metrics


def _histograms(samples: Sequence[Sample], started: int, now: int) -> list[Any]:
    """By their labels. Prometheus counts in a bucket all that is below its bound, OpenTelemetry what is
    between two bounds."""
    groups: dict[tuple[tuple[str, str], ...], tuple[dict[float, float], dict[str, float]]] = {}
    for sample in samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        buckets, rest = groups.setdefault(tuple(labels.items()), ({}, {}))
        if "le" in sample.labels:
            buckets[float(sample.labels["le"])] = sample.value
        else:
            rest[sample.name.rpartition("_")[2]] = sample.value
    points = []
    for labels_of, (buckets, rest) in groups.items():
        bounds = sorted(buckets)
        below = [int(buckets[bound]) for bound in bounds]
        counts = [count - before for count, before in zip(below, [0, *below[:-1]], strict=True)]
        points.append(
            HistogramDataPoint(
                attributes=dict(labels_of),
                start_time_unix_nano=started,
                time_unix_nano=now,
                count=int(rest["count"]),
                sum=rest["sum"],
                bucket_counts=counts,
                explicit_bounds=bounds[:-1],
                min=None,
                max=None,
            )
        )
    return points
