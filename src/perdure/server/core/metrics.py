"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from perdure.errors import ClosedError, PerdureError

if TYPE_CHECKING:
    from perdure.chat.reply import ChatReply
    from perdure.decode.request import Reply
    from perdure.runtime import Runtime

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_SPEEDS = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000, 2000)


class Metrics:
    """Counts of one server. What the engine itself knows is asked of it when somebody looks."""

    def __init__(self, runtime: Runtime) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "perdure_requests",
            "Requests by route and status; 499 is a client that left",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._durations = Histogram(
            "perdure_request_seconds",
            "Seconds from the headers of a request to the end of its answer",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._first = Histogram(
            "perdure_first_token_seconds",
            "Seconds from submission to the first token",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._speed = Histogram(
            "perdure_tokens_per_second",
            "Tokens a second of a reply, after its first",
            buckets=_SPEEDS,
            registry=self.registry,
        )
        self._tokens = Counter(
            "perdure_tokens", "Tokens by what they were", ("kind",), registry=self.registry
        )
        self._reused = Counter(
            "perdure_reused_tokens",
            "Prompt tokens that were not computed, by tier",
            ("tier",),
            registry=self.registry,
        )
        self._finished = Counter(
            "perdure_replies", "Replies by how they ended", ("finish_reason",), registry=self.registry
        )
        self.registry.register(_Engine(runtime))

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method if method in _METHODS else "other", route, str(status)).inc()
        self._durations.labels(route).observe(seconds)

    def reply(self, reply: Reply | ChatReply) -> None:
        usage, timings = reply.usage, reply.timings
        if timings.decoded_tokens:
            self._first.observe(timings.queued + timings.prefill)
        if timings.decode_speed:
            self._speed.observe(timings.decode_speed)
        self._tokens.labels("prompt").inc(usage.prompt_tokens)
        self._tokens.labels("cached").inc(usage.cached_tokens)
        self._tokens.labels("written").inc(usage.completion_tokens)
        for tier, count in reply.reuse.tiers.items():
            self._reused.labels(tier).inc(count)
        self._finished.labels(reply.finish_reason).inc()

    def embedded(self, tokens: int) -> None:
        self._tokens.labels("embedded").inc(tokens)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format. It may wait for the engine."""
        return generate_latest(self.registry)


class _Engine(Collector):
    """What a runtime says of itself at the moment; where its engine is down, less."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        runtime = self._runtime
        health = getattr(runtime.backend, "health", None)
        told = health() if health is not None else None
        yield CounterMetricFamily(
            "perdure_engine_restarts",
            "How often the engine was started anew",
            value=told.restarts if told is not None else 0,
        )
        yield GaugeMetricFamily("perdure_slots", "Requests that can be served at once", value=runtime.slots)
        try:
            # A call would wait for an engine that is being started.
            if told is not None and told.state != "ready":
                raise ClosedError(f"the engine is {told.state}")
            waiting, served = runtime.load
            stats = runtime.cache.stats()
        except PerdureError:
            yield GaugeMetricFamily("perdure_engine_up", "Whether the engine answers", value=0)
            return
        yield GaugeMetricFamily("perdure_engine_up", "Whether the engine answers", value=1)
        yield GaugeMetricFamily("perdure_queue_length", "Requests that wait for a slot", value=waiting)
        yield GaugeMetricFamily("perdure_slots_busy", "Requests that are being served", value=served)
        kept = GaugeMetricFamily("perdure_kept_bytes", "State that is kept, by tier", labels=["tier"])
        kept.add_metric(["memory"], stats.nbytes)
        for tier, nbytes in stats.tier_bytes.items():
            kept.add_metric([tier], nbytes)
        yield kept
        yield CounterMetricFamily(
            "perdure_computed_tokens", "Prompt tokens that had to be computed", value=stats.computed_tokens
        )
        yield CounterMetricFamily("perdure_evicted_blocks", "Blocks that had to go", value=stats.evicted)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
