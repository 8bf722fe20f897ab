"""API-key middleware. Rejects requests without a key, before their bodies are read."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from perdure.server.api_error import ApiError
from perdure.server.keys import METRICS, Keys

OPEN = frozenset({"/", "/health", "/ready", "/openapi.json"})
"""What anybody may ask for: whether the server lives, and how to speak to it."""


class Auth:
    """Lets requests with a key pass, and puts the key's namespace into them."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            namespace = self._keys.namespace(_secret(scope))
            refused = self._refused(scope["path"], namespace)
            if refused is not None:
                await refused.response()(scope, receive, send)
                return
            scope["state"]["namespace"] = namespace
            if namespace:
                scope["state"]["notes"]["namespace"] = namespace
        await self._app(scope, receive, send)

    def _refused(self, path: str, namespace: str | None) -> ApiError | None:
        if namespace is None:
            return ApiError(
                401,
                "this server needs a key: send it as `Authorization: Bearer KEY`",
                kind="authentication_error",
                code="invalid_api_key",
            )
        if (path == "/metrics") is not (namespace == METRICS) and len(self._keys):
            return ApiError(
                403,
                f"the metrics are for keys of the namespace {METRICS}, and those are for nothing else",
                kind="permission_error",
                code="forbidden",
            )
        return None


def _secret(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            return str(value.decode("latin-1")).strip()
        if name == b"authorization":
            scheme, _, secret = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer":
                return str(secret).strip()
    return None
