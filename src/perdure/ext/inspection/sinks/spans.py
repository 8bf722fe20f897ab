"""Requests as spans of OpenTelemetry."""

from __future__ import annotations

from typing import Any

from perdure import Event, InvalidInputError
from perdure.spi.runtime import ChunkRead, Ended, Placed, Queued, TokenDrawn

_OPEN = 4096
"""Requests whose end was not heard of yet; of more, the oldest spans are given up."""


class OpenTelemetry:
    """A span for each sample of a request, named and described as the GenAI conventions of OpenTelemetry say.

    What happens to a request on its way becomes events of its span: placed, prompt read, first token.
    """

    def __init__(self, tracer: Any = None, *, model: str = "") -> None:
        """`tracer` is one of OpenTelemetry's, or else that of the program's tracer provider."""
        try:
            from opentelemetry import trace
        except ImportError:
            raise InvalidInputError(
                "spans need the OpenTelemetry API: pip install 'perdure[otel]', and an SDK with an exporter"
            ) from None
        self._trace = trace
        self._tracer = tracer or trace.get_tracer("perdure")
        self._model = model
        self._spans: dict[str, tuple[Any, float]] = {}
        self._surprisal: dict[str, tuple[float, int]] = {}

    def __call__(self, event: Event) -> None:
        if not event.request:
            return
        if isinstance(event, Queued):
            name = f"text_completion {self._model}".strip()
            attributes: dict[str, str | int] = {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": "perdure",
                "gen_ai.request.choice.count": event.samples,
                "gen_ai.usage.input_tokens": event.prompt_tokens,
                "perdure.request.id": event.request,
                "perdure.namespace": event.namespace,
            }
            if self._model:
                attributes["gen_ai.request.model"] = self._model
            span = self._tracer.start_span(
                name, kind=self._trace.SpanKind.CLIENT, start_time=_nanoseconds(event), attributes=attributes
            )
            self._spans[event.request] = (span, event.time)
            while len(self._spans) > _OPEN:
                old = next(iter(self._spans))
                self._spans.pop(old)[0].end()
                self._surprisal.pop(old, None)
            return
        if (span_and_start := self._spans.get(event.request)) is None:
            return
        self._add(event, *span_and_start)

    def _add(self, event: Event, span: Any, began: float) -> None:
        if isinstance(event, Placed):
            counts = {f"perdure.reused.{tier}": tokens for tier, tokens in event.tiers.items()}
            counts["perdure.computed"] = event.computed
            span.add_event(
                "perdure.placed", {**counts, "perdure.why": event.why}, timestamp=_nanoseconds(event)
            )
        elif isinstance(event, ChunkRead):
            span.add_event("perdure.prompt_read", {"perdure.read": event.read}, timestamp=_nanoseconds(event))
        elif isinstance(event, TokenDrawn):
            total, count = self._surprisal.get(event.request, (0.0, 0))
            if not count:
                span.set_attribute("gen_ai.server.time_to_first_token", event.time - began)
                span.add_event("gen_ai.first_token", timestamp=_nanoseconds(event))
            self._surprisal[event.request] = (total + event.surprisal, count + 1)
        elif isinstance(event, Ended):
            total, count = self._surprisal.get(event.request, (0.0, 0))
            span.set_attributes(
                {
                    "gen_ai.response.finish_reasons": [event.finish_reason],
                    "gen_ai.usage.output_tokens": event.completion_tokens,
                    "gen_ai.usage.cache_read.input_tokens": event.cached_tokens,
                    "perdure.surprisal": total / count if count else 0.0,
                }
            )
            if event.error is not None:
                span.set_attribute("error.type", event.error.split(":")[0])
                span.set_status(self._trace.StatusCode.ERROR, event.error)
            if event.last:
                self._surprisal.pop(event.request, None)
                self._spans.pop(event.request)
                span.end(end_time=_nanoseconds(event))


def _nanoseconds(event: Event) -> int:
    return int(event.time * 1e9)
