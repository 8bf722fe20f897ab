"""The OpenAPI document names the errors of every operation, in the shape of its protocol."""

from __future__ import annotations

from typing import Any

from decode.observed import toy
from perdure.server.app import build
from perdure.server.core.server_state import ServerState
from server.live_server import opened

SHAPES = {"/v1/messages": "MessagesErrorAnswer", "/api/": "OllamaErrorAnswer", "": "ErrorAnswer"}
"""Of errors, by the protocol of a path."""


def document() -> dict[str, Any]:
    with opened(toy()) as rt:
        written: dict[str, Any] = build(ServerState(runtime=rt, name="toy")).openapi()
        return written


def test_every_operation_documents_its_errors() -> None:
    for path, methods in document()["paths"].items():
        for method, operation in methods.items():
            if path == "/health":
                continue
            assert {"400", "401", "429", "503"} <= set(operation["responses"]), (method, path)
            refused = operation["responses"]["400"]["content"]["application/json"]["schema"]
            shape = next(shape for start, shape in SHAPES.items() if path.startswith(start))
            assert refused == {"$ref": f"#/components/schemas/{shape}"}
