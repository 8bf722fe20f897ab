"""`serve --otel`: spans and metrics that a collector gets by OTLP over HTTP."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner
from websockets.sync.client import connect

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from decode.observed import open_toy, trouble
from ext.otel.collector import Collector, Span, collecting
from ext.responses.test_websocket import respond
from perdure import InvalidInputError
from perdure.cli.app import app
from perdure.events.background import FAILURES
from perdure.ext.otel import delivery, telemetry
from perdure.ext.otel.telemetry import Telemetry
from perdure.server.core.keys import Keys, new_key
from perdure.testing.toy import ToyModel
from server.live_server import PATIENCE, LiveServer, hello, live_server, opened, streamed

CHAT = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
SERVER, INTERNAL = 2, 1
"""Kinds of spans, as OTLP numbers them."""
OK, ERROR = 0, 2
"""States of spans; 0 is that nothing was said."""

PROTOCOLS: dict[str, dict[str, Any]] = {
    CHAT: hello(),
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
    "/api/chat": {
        "model": "toy",
        "messages": [{"role": "user", "content": "Hello"}],
        "options": {"num_predict": 8},
        "stream": False,
    },
}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(delivery, "_PAUSE", 0.01)
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def toy_server() -> Iterator[LiveServer]:
    with opened(ToyModel(reply_tokens=6), n_ctx=1024) as runtime, live_server(runtime) as server:
        yield server


def asked(server: LiveServer, path: str = CHAT, **more: Any) -> httpx.Response:
    with server.client() as client:
        return client.post(path, **{"json": PROTOCOLS.get(path), "headers": TRACED, **more})


def sent(server: LiveServer, collector: Collector, path: str = CHAT, **more: Any) -> httpx.Response:
    """An answer, once its spans have come."""
    with Telemetry(collector.url).follow(server.state):
        response = asked(server, path, **more)
        collector.wait("POST")
    return response


def phases(collector: Collector, chat: Span) -> list[str]:
    """Of a reply, without what depends on the requests before it."""
    return [each.name for each in collector.children(chat) if not each.name.startswith("fetch")]


def check_nested(collector: Collector, parent: Span) -> None:
    """Children are within their parent's times, and follow each other."""
    at = parent.start
    for child in collector.children(parent):
        assert at <= child.start <= child.end <= parent.end
        at = child.end
        check_nested(collector, child)


@pytest.mark.parametrize("path", PROTOCOLS)
def test_a_request_is_part_of_its_clients_trace(
    toy_server: LiveServer, collector: Collector, path: str
) -> None:
    response = sent(toy_server, collector, path)
    assert response.status_code == 200, response.text
    request, chat = collector.one("POST"), collector.one("chat")
    assert (request.name, request.kind, request.trace, request.parent) == (
        f"POST {path}",
        SERVER,
        TRACE,
        PARENT,
    )
    assert request.attributes["http.route"] == path
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["perdure.request.id"] == response.headers["x-request-id"]
    assert (chat.name, chat.kind, chat.trace, chat.parent) == ("chat toy", INTERNAL, TRACE, request.id)
    (recent,) = toy_server.state.ledger.latest("", limit=1)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "perdure",
        "gen_ai.request.model": "toy",
        "gen_ai.response.model": "toy",
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": recent.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": recent.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": recent.usage.cached_tokens,
        "gen_ai.response.finish_reasons": [recent.finish_reason],
    }
    assert {name: chat.attributes[name] for name in expected} == expected
    assert recent.usage.prompt_tokens > 0 < recent.usage.completion_tokens
    assert phases(collector, chat) == ["wait", "prefill", "decode"]
    assert {span.trace for span in collector.spans} == {TRACE}
    assert {span.status for span in collector.spans} == {OK}
    check_nested(collector, request)
    assert request.resource["service.name"] == "perdure"


def test_phases_take_as_long_as_the_answer_says(toy_server: LiveServer, collector: Collector) -> None:
    timings = sent(toy_server, collector).json()["perdure"]["timings"]
    for name, seconds in (("wait", "queued"), ("prefill", "prefill"), ("decode", "decode")):
        span = collector.one(name)
        assert (span.end - span.start) / 1e9 == pytest.approx(timings[seconds], abs=1e-5)


def test_a_stream_has_the_same_spans(toy_server: LiveServer, collector: Collector) -> None:
    with Telemetry(collector.url).follow(toy_server.state), toy_server.client() as client:
        client.headers.update(TRACED)
        streamed(client, CHAT, hello())
        collector.wait("POST")
    chat = collector.one("chat")
    assert chat.attributes["gen_ai.request.stream"]
    assert chat.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert phases(collector, chat) == ["wait", "prefill", "decode"]
    check_nested(collector, collector.one("POST"))


def test_samples_share_what_comes_before_their_first_tokens(
    toy_server: LiveServer, collector: Collector
) -> None:
    assert sent(toy_server, collector, json=hello(n=2, temperature=1)).status_code == 200
    chat = collector.one("chat")
    assert chat.attributes["gen_ai.request.choice.count"] == 2
    assert sorted(phases(collector, chat)) == ["decode", "decode", "prefill", "wait"]


def test_a_completion_is_one(toy_server: LiveServer, collector: Collector) -> None:
    sent(toy_server, collector, "/v1/completions", json={"prompt": "Once", "max_tokens": 4})
    assert collector.one("text_completion toy").attributes["gen_ai.operation.name"] == "text_completion"


def test_embeddings_say_what_was_read(toy_server: LiveServer, collector: Collector) -> None:
    answer = sent(toy_server, collector, "/v1/embeddings", json={"model": "toy", "input": ["a", "b"]}).json()
    span = collector.one("embeddings toy")
    assert span.parent == collector.one("POST").id
    assert span.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]


def test_a_response_over_a_websocket_is_part_of_the_trace_that_opened_it(
    toy_server: LiveServer, collector: Collector
) -> None:
    url = f"ws{toy_server.url.removeprefix('http')}/v1/responses"
    with (
        Telemetry(collector.url).follow(toy_server.state),
        connect(url, close_timeout=0.1, additional_headers=TRACED) as socket,
    ):
        for _ in range(2):
            assert respond(socket, input="Hello")["type"] != "error"
    assert [(span.trace, span.parent) for span in collector.named("chat toy")] == [(TRACE, PARENT)] * 2
    for chat in collector.named("chat"):
        assert phases(collector, chat) == ["wait", "prefill", "decode"]
        check_nested(collector, chat)


def test_a_request_that_the_server_makes_of_itself_has_spans(
    toy_server: LiveServer, collector: Collector, tmp_path: Path
) -> None:
    """A line of a batch."""
    line = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": hello()})
    with (
        opened(ToyModel(reply_tokens=6), n_ctx=1024, store=tmp_path) as runtime,
        live_server(runtime) as server,
        server.client() as client,
        Telemetry(collector.url).follow(server.state),
    ):
        files = {"file": ("lines.jsonl", line.encode())}
        file = client.post("/v1/files", files=files, data={"purpose": "batch"}).json()
        fields = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        client.post("/v1/batches", json=fields)
        collector.wait(f"POST {CHAT}")
    request = collector.one(f"POST {CHAT}")
    assert [each.name for each in collector.children(request)] == ["chat toy"]
    check_nested(collector, request)


def test_a_conversation_has_its_sessions_name(toy_server: LiveServer, collector: Collector) -> None:
    sent(toy_server, collector, json=hello(perdure={"session": "alice"}))
    assert collector.one("chat").attributes["gen_ai.conversation.id"] == "alice"


def test_a_model_is_named_as_asked_and_as_answered(toy_server: LiveServer, collector: Collector) -> None:
    sent(toy_server, collector, json=hello(model="default"))
    chat = collector.one("chat")
    assert chat.attributes["gen_ai.request.model"] == "default"
    assert chat.attributes["gen_ai.response.model"] == "toy"


def test_state_that_is_read_out_of_a_tier_is_a_span(collector: Collector, tmp_path: Path) -> None:
    one = hello(messages=[{"role": "user", "content": "One two three four five six seven. " * 8}])
    store = tmp_path / "store"
    with opened(ToyModel(reply_tokens=6), n_ctx=1024, store=store) as runtime, live_server(runtime) as server:
        assert asked(server, json=one).status_code == 200
    with opened(ToyModel(reply_tokens=6), n_ctx=1024, store=store) as runtime, live_server(runtime) as server:
        sent(server, collector, json=one)
    chat = collector.one("chat")
    assert [each.name for each in collector.children(chat)] == ["wait", "fetch disk", "prefill", "decode"]
    fetched = collector.one("fetch disk").attributes
    assert fetched["perdure.tier"] == "disk"
    assert fetched["perdure.tokens"] == chat.attributes["gen_ai.usage.cache_read.input_tokens"] > 0
    check_nested(collector, collector.one("POST"))


def test_a_mistake_of_the_client_is_said_and_no_failure(toy_server: LiveServer, collector: Collector) -> None:
    assert sent(toy_server, collector, json=hello(model="nobody's")).status_code == 404
    (request,) = collector.spans
    assert request.attributes["http.response.status_code"] == 404
    assert request.attributes["error.type"]
    assert request.status == OK


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_engine_is_one_of_the_spans(collector: Collector, stream: bool) -> None:
    with open_toy(slots=1, n_ctx=512) as runtime, live_server(runtime) as server:
        trouble(runtime).fail_decode(ahead=5)
        sent(server, collector, json=hello(stream=stream, max_tokens=64))
    request = collector.one("POST")
    assert request.status == ERROR
    assert request.attributes["http.response.status_code"] == 503
    assert request.attributes["error.type"]
    chat = collector.one("chat")
    assert chat.status == ERROR
    assert chat.attributes["gen_ai.response.finish_reasons"] == ["error"]
    assert chat.attributes["error.type"]


def test_a_client_that_names_no_trace_begins_one(toy_server: LiveServer, collector: Collector) -> None:
    sent(toy_server, collector, headers={"traceparent": "nonsense"})
    request = collector.one("POST")
    assert request.parent == ""
    assert {span.trace for span in collector.spans} == {request.trace}
    assert request.trace != TRACE


def test_a_client_that_does_not_sample_is_heeded(toy_server: LiveServer, collector: Collector) -> None:
    with Telemetry(collector.url).follow(toy_server.state):
        asked(toy_server, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        answer = asked(toy_server)
        collector.wait("POST")
    assert collector.one("POST").attributes["perdure.request.id"] == answer.headers["x-request-id"]


def test_requests_that_only_read_have_spans_where_their_client_asks(
    toy_server: LiveServer, collector: Collector
) -> None:
    with Telemetry(collector.url).follow(toy_server.state), toy_server.client() as client:
        client.get("/v1/models")
        client.get("/health")
        client.get("/v1/models", headers=TRACED)
        collector.wait("GET")
    assert [span.name for span in collector.spans] == ["GET /v1/models"]


def test_no_text_and_no_key_is_sent(collector: Collector, tmp_path: Path) -> None:
    secret, key = new_key("team")
    words = ("heliotrope", "saxophone", "marmalade")
    body = hello(
        messages=[
            {"role": "system", "content": f"You like {words[0]}."},
            {"role": "user", "content": f"Play the {words[1]}."},
        ],
        tools=[{"type": "function", "function": {"name": words[2], "parameters": {"type": "object"}}}],
    )
    model = ToyModel(reply_tokens=6)
    with (
        opened(model, n_ctx=2048, store=tmp_path) as runtime,
        live_server(runtime, keys=Keys([key]), log_text=True) as server,
    ):
        headers = {**TRACED, "authorization": f"Bearer {secret}"}
        answer = sent(server, collector, f"{CHAT}?q={words[1]}", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        sent(server, collector, json={**body, "messages": words[0]}, headers=headers)
    everything = b"".join(collector.bodies)
    assert b"team" in everything
    for text in (*words, secret, answer.json()["choices"][0]["message"]["content"]):
        assert text.encode() not in everything


def test_metrics_arrive_and_are_those_of_the_server(toy_server: LiveServer, collector: Collector) -> None:
    with Telemetry(collector.url).follow(toy_server.state):
        usage = asked(toy_server).json()["usage"]
        asked(toy_server)
        with toy_server.client() as client:
            shown = client.get("/metrics").text
        collector.wait("POST", 2)
    (tokens, _) = sorted(
        collector.metrics["gen_ai.client.token.usage"].histogram.data_points, key=lambda each: -each.sum
    )
    assert (tokens.count, tokens.sum) == (2, 2 * usage["prompt_tokens"])
    assert {each.key for each in tokens.attributes} == {
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.model",
        "gen_ai.response.model",
        "gen_ai.token.type",
    }
    for name in ("request.duration", "time_to_first_token", "time_per_output_token"):
        (point,) = collector.metrics[f"gen_ai.server.{name}"].histogram.data_points
        assert point.count == 2
        assert point.sum > 0
    (first,) = collector.metrics["perdure_first_token_seconds"].histogram.data_points
    assert f"perdure_first_token_seconds_count {first.count:.1f}" in shown
    assert sum(first.bucket_counts) == first.count
    assert len(first.bucket_counts) == len(first.explicit_bounds) + 1
    assert "perdure_slots" in collector.metrics
    assert "perdure_requests" in collector.metrics
    assert collector.resource["service.name"] == "perdure"


def counted(server: LiveServer) -> dict[str, float]:
    """Spans by what became of them, as `/metrics` has them."""
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    start = 'perdure_otel_spans_total{outcome="'
    return {
        line.removeprefix(start).partition('"')[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(start)
    }


def test_a_collector_that_is_away_costs_a_warning(
    toy_server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry, "FLUSH", 0.3)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    with caplog.at_level(logging.INFO), Telemetry("http://127.0.0.1:9").follow(toy_server.state):
        for _ in range(3):
            assert asked(toy_server).status_code == 200
    told = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert [each.name for each in told] == ["perdure.otel"]


def test_a_collector_that_hangs_delays_no_reply_and_no_end(
    toy_server: LiveServer, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the queue is bounded: what finds no room is counted."""
    monkeypatch.setattr(telemetry, "FLUSH", 0.2)
    monkeypatch.setattr(delivery, "LIMIT", 8)
    monkeypatch.setattr(delivery, "_BATCH", 4)
    collector.hold = threading.Event()
    with Telemetry(collector.url).follow(toy_server.state):
        assert asked(toy_server).status_code == 200
        assert collector.held.wait(PATIENCE)
        for _ in range(5):
            assert asked(toy_server).status_code == 200
        assert counted(toy_server)["dropped"] > 0
    assert not collector.hold.is_set()
    assert not collector.spans


def test_what_a_collector_refuses_is_counted_and_told_once(
    toy_server: LiveServer, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400
    seen = delivery.Delivery(collector.url)
    queue = delivery.SpanQueue(f"{collector.url}/v1/traces", seen)
    queue.close(60)
    with caplog.at_level(logging.INFO), Telemetry(collector.url).follow(toy_server.state):
        asked(toy_server)
    assert [each.name for each in caplog.records if each.levelno >= logging.WARNING] == ["perdure.otel"]
    seen.report(taken=False)
    caplog.clear()
    seen.report(taken=True)
    seen.report(taken=True)
    (again,) = caplog.records
    assert "again" in again.getMessage()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_spans_behind_a_batch_whose_sending_fails_are_sent(
    toy_server: LiveServer, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, send = FAILURES["perdure-otel"], delivery.SpanQueue._send

    def sending(queue: delivery.SpanQueue) -> None:
        if FAILURES["perdure-otel"] == failed:
            raise SystemExit("planted")
        send(queue)

    monkeypatch.setattr(delivery.SpanQueue, "_send", sending)
    sent(toy_server, collector)
    assert FAILURES["perdure-otel"] == failed + 1


def test_nothing_is_left_once_it_ends(toy_server: LiveServer, collector: Collector) -> None:
    sent(toy_server, collector)
    before = len(collector.spans)
    assert toy_server.state.ledger.metrics.observer is None
    assert not counted(toy_server)
    asked(toy_server)
    assert len(collector.spans) == before


@pytest.mark.parametrize(
    "url",
    ["", "collector:4318", "ftp://collector", "http://", "http://c:4318/v1/traces", "http://a:b@c:4318"],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError, match="--otel"):
        Telemetry(url)


def test_without_its_packages_it_says_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("perdure.ext.otel.")]:
        if not name.endswith("telemetry"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("perdure.ext.otel.delivery")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'perdure\[otel\]'"):
        Telemetry("http://127.0.0.1:4318")


def test_the_command_refuses_an_address_that_is_none() -> None:
    ended = CliRunner().invoke(app, ["serve", "nothing.gguf", "--otel", "collector"])
    assert ended.exit_code == 2
    assert "--otel" in ended.output
