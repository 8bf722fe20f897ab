"""`perdure serve --otel`, run as people run it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from ext.otel.collector import collecting
from ext.otel.test_otel import CHAT, PARENT, TRACE, TRACED, phases
from server.live_server import PATIENCE, hello
from server.test_command import serving


def test_the_command_sends_what_is_left_at_its_end(zoo_path: Callable[[str], Path]) -> None:
    """Also of an engine in a separate process."""
    with (
        collecting() as collector,
        serving(zoo_path("llama"), "--no-store", "--otel", collector.url) as served,
        served.client() as client,
    ):
        assert client.post(CHAT, json=hello(), headers=TRACED).status_code == 200
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE) == 0
    request, chat = collector.one("POST"), collector.one("chat")
    assert (request.trace, request.parent, chat.parent) == (TRACE, PARENT, request.id)
    assert phases(collector, chat) == ["wait", "prefill", "decode"]
    assert "perdure_requests" in collector.metrics


def test_nothing_of_it_is_loaded_where_it_is_off() -> None:
    code = (
        "import sys, perdure.cli.app, perdure.server.http_server, perdure.server.app as app\n"
        "from perdure.extension import extensions; extensions(); app.protocols()\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exp'))])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
