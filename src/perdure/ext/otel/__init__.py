"""OpenTelemetry: spans and metrics of a server, sent to a collector by OTLP over HTTP (`serve --otel URL`).

telemetry  from the option to what is sent, and its end
trace      spans of requests, of streams and of their phases
metrics    the metrics of the GenAI conventions, and those of `/metrics`
delivery   the queue of spans, and whether the collector takes what is sent
"""

from perdure.spi import Extension

EXTENSION = Extension(name="otel", parts={"serve --otel": "perdure.ext.otel.telemetry:Telemetry"})
