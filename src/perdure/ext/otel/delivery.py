"""Delivery: a bounded queue of spans, a thread that sends them, and what became of them.

No request waits for it. A span that finds the queue full is dropped and counted, and so is a batch that the
collector did not take. The log has one line when the collector does not answer, and one when it does again.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SpanExportResult
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from perdure.spi.runtime import BackgroundThread

log = logging.getLogger("perdure.otel")

LIMIT = 4096
"""Spans that may wait."""
_BATCH = 512
_PAUSE = 1.0
"""Seconds for which spans gather."""


class Delivery(Collector):
    """What became of spans, as a metric, and whether the collector takes what is sent."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._is_down = False
        self.spans: Counter[str] = Counter(sent=0, dropped=0, failed=0)
        """By what became of them: `dropped` found the queue full, `failed` were not taken."""

    def count(self, outcome: str, spans: int) -> None:
        with self._lock:
            self.spans[outcome] += spans

    def report(self, *, taken: bool) -> None:
        """Something was sent."""
        with self._lock:
            changed, self._is_down = self._is_down == taken, not taken
        if changed and taken:
            log.warning("the OpenTelemetry collector at %s takes spans and metrics again", self._url)
        elif changed:
            log.warning(
                "the OpenTelemetry collector at %s takes no spans and metrics: they are dropped until it "
                "does, and perdure_otel_spans counts them. Requests are answered as ever",
                self._url,
            )

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "perdure_otel_spans", "Spans for OpenTelemetry, by what became of them", labels=["outcome"]
        )
        with self._lock:
            for outcome, count in self.spans.items():
                family.add_metric([outcome], count)
        yield family


class SpanQueue(SpanProcessor):  # type: ignore[misc]
    """Spans on their way to the collector. `on_end` never waits."""

    def __init__(self, url: str, delivery: Delivery) -> None:
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._delivery = delivery
        self._spans: deque[Any] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._gave_up = False
        self._thread = BackgroundThread(self._run, name="perdure-otel", restart=True)
        self._thread.start()

    def on_end(self, span: Any) -> None:
        if not span.context.trace_flags.sampled:
            return
        if self._is_closing or len(self._spans) >= LIMIT:
            self._delivery.count("dropped", 1)
            return
        self._spans.append(span)
        if len(self._spans) >= _BATCH:
            self._wake.set()

    def close(self, seconds: float) -> None:
        """Send what is there, for so long at most. What is left is dropped."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(seconds)
        self._gave_up = True
        # Ends the pause between two tries.
        self._exporter.shutdown()
        self._delivery.count("dropped", len(self._spans))

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(_PAUSE)
            self._wake.clear()
            while self._spans and not self._gave_up:
                self._send()

    def _send(self) -> None:
        batch = [self._spans.popleft() for _ in range(min(len(self._spans), _BATCH))]
        taken = False
        try:
            taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
        finally:
            self._delivery.count("sent" if taken else "failed", len(batch))
            self._delivery.report(taken=taken)
