"""Metrics of the shares: what each namespace has had of the engines, and by how much it is behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from perdure import PerdureError
from perdure.spi.server import ServerState


class ShareCollector(Collector):
    """Asks the engines when metrics are read."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        served = CounterMetricFamily(
            "perdure_key_computed_tokens",
            "Tokens of prompts and replies that were computed, by the namespace of their key",
            labels=["namespace", "model"],
        )
        lag = GaugeMetricFamily(
            "perdure_key_lag_tokens",
            "Tokens by which a namespace that waits for a slot is behind the one that is furthest ahead",
            labels=["namespace", "model"],
        )
        longest = GaugeMetricFamily(
            "perdure_key_longest_lag_tokens",
            "The longest such lag since the engine started",
            labels=["namespace", "model"],
        )
        for model in self._state.models.all():
            backend = model.runtime.backend
            # A call would wait for an engine that is being started, or start one that was let go.
            if backend.health().state != "ready":
                continue
            try:
                shares = backend.shares()
            except PerdureError:
                continue
            for namespace, share in shares.items():
                served.add_metric([namespace, model.name], share["served"])
                lag.add_metric([namespace, model.name], share["lag"])
                longest.add_metric([namespace, model.name], share["longest_lag"])
        yield from (served, lag, longest)


async def report_shares(state: ServerState) -> None:
    """Have metrics tell of the shares for as long as the server runs."""
    registry, collector = state.ledger.metrics.registry, ShareCollector(state)
    registry.register(collector)
    try:
        await asyncio.Event().wait()
    finally:
        registry.unregister(collector)
