"""Access log. One line and one count for every request, whatever happens to it."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.server.core.api_error import PROTOCOL, ClientLeft, to_api_error
from perdure.server.core.metrics import Metrics
from perdure.server.core.protocol import OPENAI, Protocol

log = logging.getLogger("perdure.server")

LEFT = 499
"""The status, in logs and metrics only, of a request whose client went away."""


def _header_text(name: str) -> str:
    """A name that comes from a client, as a header may have it: escaped as JSON does, and in quotes where it
    is empty, or begins or ends with a space."""
    escaped = json.dumps(name)[1:-1]
    return escaped if escaped and escaped == escaped.strip() else f'"{escaped}"'


class JsonLines(logging.Handler):
    """Log records as lines of JSON. A line never has a message of a conversation in it unless asked to."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        try:
            shown: dict[str, Any] = {
                "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
                "level": record.levelname.lower(),
                "event": record.getMessage(),
                **getattr(record, "fields", {}),
            }
            if record.exc_info:
                shown["error"] = logging.Formatter().formatException(record.exc_info)
            self._out.write(json.dumps(shown) + "\n")
            self._out.flush()
        except Exception:
            self.handleError(record)


class AccessLog:
    """The outermost layer: whatever happens inside, the request is answered, counted and logged once."""

    def __init__(self, app: ASGIApp, metrics: Metrics, protocols: Sequence[Protocol]) -> None:
        self._app = app
        self._metrics = metrics
        self._protocols = protocols

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        notes: dict[str, Any] = {}
        path = scope.get("path", "")
        protocol = next((each for each in self._protocols if path.startswith(each.prefix)), OPENAI)
        scope.setdefault("state", {}).update({"notes": notes, PROTOCOL: protocol})
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = uuid.uuid4().hex
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    # As Anthropic's clients look for it.
                    (b"request-id", request_id.encode()),
                ]
                if ignored := notes.get("ignored"):
                    names = ", ".join(map(_header_text, ignored))
                    message["headers"].append((b"x-perdure-ignored", names.encode("ascii")))
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except ClientLeft:
            status = LEFT
        except Exception as error:
            # The application has answered where it could, and told the log.
            if not status:
                await to_api_error(error).response()(scope, receive, noted)
        finally:
            if notes.pop("left", False):
                status = LEFT
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.request(scope["method"], route, status, seconds)
            fields = {
                "id": request_id,
                "method": scope["method"],
                "route": route,
                "status": status,
                "seconds": round(seconds, 6),
                **notes,
            }
            log.info("request", extra={"fields": fields})
