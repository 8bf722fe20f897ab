"""A receiver of OTLP over HTTP, in a thread: what an OpenTelemetry collector is to a program."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from server.live_server import PATIENCE


@dataclass(frozen=True, kw_only=True)
class Span:
    name: str
    kind: int
    trace: str
    id: str
    parent: str
    start: int
    end: int
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """What came, and how it answers."""

    url: str = ""
    status: int = 200
    hold: threading.Event | None = None
    """Requests are not answered until then."""
    held: threading.Event = field(default_factory=threading.Event)
    """Set when one waits for that."""
    news: threading.Condition = field(default_factory=threading.Condition)
    """Notified when something has come."""
    bodies: list[bytes] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    """By name, as they came last."""
    resource: dict[str, Any] = field(default_factory=dict)

    def wait(self, start: str, count: int = 1) -> None:
        """Return once so many spans of that name have come."""
        with self.news:
            assert self.news.wait_for(lambda: len(self.named(start)) >= count, PATIENCE)

    def named(self, start: str) -> list[Span]:
        return [span for span in self.spans if span.name.startswith(start)]

    def one(self, start: str) -> Span:
        (span,) = self.named(start)
        return span

    def children(self, span: Span) -> list[Span]:
        """In their order."""
        return sorted((each for each in self.spans if each.parent == span.id), key=lambda each: each.start)

    def read(self, path: str, body: bytes) -> bytes:
        self.bodies.append(body)
        if path == "/v1/metrics":
            for of_resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self.resource = plain(of_resource.resource.attributes)
                for of_scope in of_resource.scope_metrics:
                    self.metrics.update({metric.name: metric for metric in of_scope.metrics})
            return bytes(ExportMetricsServiceResponse().SerializeToString())
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Span(
                            name=span.name,
                            kind=span.kind,
                            trace=span.trace_id.hex(),
                            id=span.span_id.hex(),
                            parent=span.parent_span_id.hex(),
                            start=span.start_time_unix_nano,
                            end=span.end_time_unix_nano,
                            status=span.status.code,
                            attributes=plain(span.attributes),
                            resource=plain(resource.resource.attributes),
                        )
                    )
        return bytes(ExportTraceServiceResponse().SerializeToString())


def plain(attributes: Any) -> dict[str, Any]:
    return {each.key: value_of(each.value) for each in attributes}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that is up while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if here.hold is not None:
                here.held.set()
                here.hold.wait(PATIENCE)
            with here.news:
                answer = here.read(self.path, body) if here.status == 200 else b""
                here.news.notify_all()
            try:
                self.send_response(here.status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
            except OSError:
                # A client that did not wait.
                self.close_connection = True

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

    server = Server(("127.0.0.1", 0), Handler)
    here = Collector(url=f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield here
    finally:
        if here.hold is not None:
            here.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()
