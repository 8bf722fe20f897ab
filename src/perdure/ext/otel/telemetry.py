"""Telemetry: what `serve --otel URL` sends, from its option to its end."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import perdure
from perdure import InvalidInputError

if TYPE_CHECKING:
    from perdure.spi.server import ServerState

FLUSH = 3.0
"""Seconds that a server which ends waits for the collector, at most."""
_PACKAGE = "opentelemetry"


class Telemetry:
    """Where spans and metrics go: a collector that speaks OTLP over HTTP, such as http://127.0.0.1:4318."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        _check(url)
        try:
            from perdure.ext.otel import delivery, metrics, trace
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith((_PACKAGE, "google", "requests")):
                raise
            raise InvalidInputError(f"--otel needs {error.name}: pip install 'perdure[otel]'") from None
        self._delivery, self._metrics, self._trace = delivery, metrics, trace

    @contextmanager
    def follow(self, server: ServerState) -> Iterator[None]:
        """Send what happens in a server until the block ends, and then for `FLUSH` seconds at most what is
        left."""
        # The exporters log each try that fails.
        logging.getLogger(_PACKAGE).setLevel(logging.CRITICAL)
        registry = server.ledger.metrics.registry
        resource = self._trace.resource(perdure.__version__, uuid.uuid4().hex)
        delivery = self._delivery.Delivery(self.url)
        spans = self._delivery.SpanQueue(f"{self.url}/v1/traces", delivery)
        meters = self._metrics.Meters(f"{self.url}/v1/metrics", delivery, resource, registry, server.started)
        registry.register(delivery)
        server.ledger.metrics.observer = self._trace.RequestTracer(spans, meters, resource)
        try:
            yield
        finally:
            server.ledger.metrics.observer = None
            end = time.monotonic() + FLUSH
            spans.close(FLUSH)
            meters.close(end - time.monotonic())
            registry.unregister(delivery)


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.path.endswith(("/v1/traces", "/v1/metrics")):
        raise InvalidInputError(
            "--otel takes the address of a collector that speaks OTLP over HTTP, such as "
            f"http://127.0.0.1:4318, got {url!r}"
        )
    if parts.username is not None or parts.password is not None:
        raise InvalidInputError(
            "--otel takes no password: the variable OTEL_EXPORTER_OTLP_HEADERS has headers for the collector"
        )
