"""Spans of a server's requests.

    POST /v1/chat/completions          server; its parent is the client's span (`traceparent`)
      chat qwen                        one a stream, with the attributes of the GenAI conventions
        wait                           for a slot
        fetch disk                     state read out of a tier
        prefill                        to the first token
        decode                         the others

A request is noted while it runs, and its spans are made when its answer is sent. No text of a prompt or a
reply is in them, and nothing of a header but `traceparent` and `tracestate`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from perdure import ChatReply, Reply, Usage
from perdure.ext.otel.delivery import SpanQueue
from perdure.ext.otel.metrics import Meters
from perdure.spi.server import VISIT, RequestObserver, StreamEnd

log = logging.getLogger("perdure.otel")

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_PARENT = (b"traceparent", b"tracestate")
_OPERATIONS = {
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/embedding": "embeddings",
    "/embeddings": "embeddings",
}
"""By route. What streams do by others, their replies say."""
_NAME = 200
"""Characters of a model's name, as clients have it."""
_STREAMS = 64
"""Of one request, of which there are spans."""
Phase: TypeAlias = tuple[str, float, dict[str, Any]]
"""Its name, its seconds and its attributes."""


@dataclass(slots=True)
class _Traced:
    """A request that runs, or did."""

    began: int
    scope: Scope
    streams: list[tuple[StreamEnd, int]] = field(default_factory=list)
    """Those that have ended, each with when."""
    parent: Context | None = None
    """Of the spans of streams that end when the request is over. None while it runs."""


_current: ContextVar[_Traced | None] = ContextVar("perdure_otel", default=None)


def resource(version: str, instance: str) -> Any:
    """What all spans and metrics are of. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say otherwise."""
    own = {"service.name": "perdure", "service.version": version, "service.instance.id": instance}
    return Resource.create().merge(Resource(own)).merge(OTELResourceDetector().detect())


class RequestTracer(RequestObserver):
    """Makes spans and records metrics of a server's requests."""

    def __init__(self, queue: SpanQueue, meters: Meters, of: Any) -> None:
        # Which traces: the variables OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG.
        provider = TracerProvider(resource=of, shutdown_on_exit=False)
        provider.add_span_processor(queue)
        self._tracer = provider.get_tracer("perdure", of.attributes["service.version"])
        self._meters = meters
        self._parent = TraceContextTextMapPropagator().extract
        self._has_failed = False

    # As the server calls it.

    def began(self, scope: Scope) -> _Traced:
        traced = _Traced(time.time_ns(), scope)
        _current.set(traced)
        return traced

    def replied(self, end: StreamEnd) -> None:
        traced, now = _current.get(), time.time_ns()
        if traced is not None and traced.parent is None and traced.scope["type"] == "http":
            if len(traced.streams) < _STREAMS:
                traced.streams.append((end, now))
            return
        try:
            if traced is not None and traced.parent is None:
                # A WebSocket has no span: it is open for as long as its client likes.
                traced.parent = self._client(traced.scope)
            parent = Context() if traced is None or traced.parent is None else traced.parent
            self._stream(end, now, parent, 0, "", None)
        except Exception:
            self._failed()

    def ended(self, request: _Traced, fields: Mapping[str, Any]) -> None:
        try:
            self._request(request, fields, time.time_ns())
        except Exception:
            self._failed()
        finally:
            request.streams.clear()

    def _failed(self) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.exception("the spans of a request could not be made; the next failure is not logged")

    # Spans.

    def _request(self, traced: _Traced, fields: Mapping[str, Any], now: int) -> None:
        scope, route, status = traced.scope, fields["route"], fields["status"]
        parent = traced.parent = self._client(scope)
        if not traced.streams and not parent and fields["method"] in _READING:
            return
        attributes = {
            "http.request.method": fields["method"],
            "http.route": route,
            "http.response.status_code": status,
            "url.scheme": scope.get("scheme", "http"),
            "perdure.request.id": fields["id"],
        }
        if scope.get("server") is not None:
            address, port = scope["server"]
            attributes["server.address"] = address
            if port is not None:
                attributes["server.port"] = port
        if namespace := fields.get("namespace"):
            attributes["perdure.namespace"] = namespace
        error = None
        if status >= 400:
            error = attributes["error.type"] = fields.get("error") or fields.get("ended") or str(status)
        span = self._tracer.start_span(
            f"{fields['method']} {route}",
            parent,
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=traced.began,
        )
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        traced.parent = set_span_in_context(span, Context())
        for end, ended in traced.streams:
            self._stream(end, ended, traced.parent, traced.began, route, error)
        operation = _OPERATIONS.get(route)
        if operation == "embeddings" and "prompt_tokens" in fields:
            self._embedding(traced, fields, now, error)
        span.end(now)

    def _stream(
        self, end: StreamEnd, ended: int, parent: Context, earliest: int, route: str, error: str | None
    ) -> None:
        """The span of one stream. `error` is why its request failed."""
        replies, usage = end.replies, end.usage
        phases = [(reply, list(_phases_of(reply))) for reply in replies]
        # It was submitted a little before it was followed.
        longest = max((_total(each) for _, each in phases), default=0)
        began = max(earliest, min(int(end.began * 1e9), ended - longest))
        is_chat = not replies or isinstance(replies[0], ChatReply)
        operation = _OPERATIONS.get(route, "chat" if is_chat else "text_completion")
        reasons = [reply.finish_reason for reply in replies] or ["error" if error else "cancelled"]
        failure = next((each for each in map(_failure, replies) if each), None) or error
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "perdure",
            "gen_ai.request.model": (end.caller.visit.model_name or end.model)[:_NAME],
            "gen_ai.response.model": end.model,
            "gen_ai.request.stream": end.streamed,
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
        }
        if end.session:
            attributes["gen_ai.conversation.id"] = end.session
        if len(replies) > 1:
            attributes["gen_ai.request.choice.count"] = len(replies)
        if failure:
            attributes["error.type"] = failure
        if replies:
            attributes |= _of_replies(end)
        span = self._tracer.start_span(
            f"{operation} {end.model}",
            parent,
            kind=SpanKind.INTERNAL,
            attributes=attributes,
            start_time=began,
        )
        if "error" in reasons:
            span.set_status(StatusCode.ERROR)
        within = set_span_in_context(span, Context())
        # What was read besides, such as for a summary, came first.
        read = sum(each.usage.prompt_tokens for each in replies if each.index == 0)
        for reply, each in phases:
            start = max(began, ended - _total(each)) if usage.prompt_tokens > read else began
            self._phases(reply.index, each, start, ended, within)
        span.end(ended)
        self._meters.replied(end, operation, (ended - began) / 1e9, failure)

    def _phases(self, index: int, phases: Sequence[Phase], at: int, ended: int, parent: Context) -> None:
        """What a reply's time went into. How long each took is known; they follow each other."""
        for name, seconds, attributes in phases:
            until = min(ended, at + int(seconds * 1e9))
            # The samples of a prompt share what comes before their first tokens.
            if index == 0 or name == "decode":
                span = self._tracer.start_span(name, parent, attributes=attributes, start_time=at)
                span.end(until)
            at = until

    def _embedding(self, traced: _Traced, fields: Mapping[str, Any], now: int, error: str | None) -> None:
        visit = traced.scope["state"].get(VISIT)
        model = visit.model_name[:_NAME] if visit is not None else ""
        attributes = {
            "gen_ai.operation.name": "embeddings",
            "gen_ai.provider.name": "perdure",
            "gen_ai.usage.input_tokens": fields["prompt_tokens"],
        }
        if model:
            attributes["gen_ai.request.model"] = model
        if error:
            attributes["error.type"] = error
        span = self._tracer.start_span(
            f"embeddings {model}".strip(), traced.parent, attributes=attributes, start_time=traced.began
        )
        span.end(now)

    def _client(self, scope: Scope) -> Context:
        """The client's span, as its headers name it; empty where they name none."""
        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _PARENT
        }
        context: Context = self._parent(carrier, Context()) if carrier else Context()
        return context


def _failure(reply: Reply | ChatReply) -> str | None:
    error = reply.raw.error if isinstance(reply, ChatReply) else reply.error
    return type(error).__name__ if error is not None else None


def _of_replies(end: StreamEnd) -> dict[str, Any]:
    """What replies say of their prompt's state, and of their first token."""
    first = end.replies[0]
    usages: list[Usage] = [reply.usage for reply in end.replies]
    prompts = [reply for reply in end.replies if reply.index == 0]
    attributes: dict[str, Any] = {
        "gen_ai.usage.cache_read.input_tokens": sum(reply.usage.cached_tokens for reply in prompts),
        "perdure.computed_tokens": sum(reply.reuse.computed for reply in prompts),
    }
    for tier, tokens in first.reuse.tiers.items():
        attributes[f"perdure.reused_tokens.{tier}"] = tokens
    if reasoning := sum(usage.reasoning_tokens for usage in usages):
        attributes["gen_ai.usage.reasoning.output_tokens"] = reasoning
    if first.timings.decoded_tokens:
        seconds = first.timings.queued + first.timings.prefill
        attributes["perdure.time_to_first_token"] = seconds
        if end.streamed:
            attributes["gen_ai.response.time_to_first_chunk"] = seconds
    if isinstance(first, ChatReply) and first.miss is not None:
        attributes["perdure.miss.cause"] = first.miss.cause
        attributes["perdure.miss.tokens"] = first.miss.tokens
    return attributes


def _total(phases: Sequence[Phase]) -> int:
    """In nanoseconds."""
    return int(sum(seconds for _, seconds, _ in phases) * 1e9)


def _phases_of(reply: Reply | ChatReply) -> Iterator[Phase]:
    """The phases of a reply in their order, each with its seconds. A tier is read while the request waits for
    its slot."""
    timings, reuse = reply.timings, reply.reuse
    yield "wait", max(0.0, timings.queued - sum(reuse.seconds.values())), {}
    for tier, seconds in reuse.seconds.items():
        yield f"fetch {tier}", seconds, {"perdure.tier": tier, "perdure.tokens": reuse.tiers.get(tier, 0)}
    yield "prefill", timings.prefill, {"perdure.tokens": timings.prefilled_tokens}
    decoded: dict[str, Any] = {"perdure.tokens": timings.decoded_tokens}
    if timings.drafted_tokens:
        decoded["perdure.drafted_tokens"] = timings.drafted_tokens
        decoded["perdure.accepted_tokens"] = timings.accepted_tokens
    yield "decode", timings.decode, decoded
