"""API-key middleware. Rejects requests without a key, before their bodies are read."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Receive, Scope, Send

from perdure.server.core.api_error import ApiError, rate_limited, refuse, unauthorised
from perdure.server.core.keys import METRICS, Key, KeyAccount, Keys

OPEN = frozenset({"/", "/health", "/ready", "/openapi.json"})
"""What anybody may ask for: whether the server lives, and how to speak to it."""
ASSETS = "/page/"
"""Where the files of the page lie, each under a name with its digest. Anybody may load the page itself: what
it asks for then needs a key."""


class Auth:
    """Lets requests with a key pass, and puts the key's namespace into them."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] not in ("http", "websocket") or path in OPEN or path.startswith(ASSETS):
            await self._app(scope, receive, send)
            return
        secret = _secret(scope)
        key = self._keys.find(secret)
        notes = scope["state"]["notes"]
        if (refused := self._refused(scope["path"], secret, key)) is not None:
            if key is not None:
                notes["namespace"] = key.namespace
            await refuse(refused, scope, receive, send)
            return
        account = KeyAccount(key, self._keys) if key is not None else None
        scope["state"].update(namespace=key.namespace if key is not None else "", account=account)
        if key is not None:
            notes["namespace"] = key.namespace
        await self._app(scope, receive, send)

    def _refused(self, path: str, secret: str | None, key: Key | None) -> ApiError | None:
        if not self._keys.required:
            return None
        if key is None:
            return unauthorised(
                "this server does not know that key: check it, or ask whoever runs the server for another"
                if secret
                else "this server needs a key: send it as `Authorization: Bearer KEY`"
            )
        now = time.time()
        if key.is_expired(now):
            return unauthorised(f"this key expired on {key.expires}: ask for a new one")
        if (over := self._keys.usage.admit(key, now, time.monotonic())) is not None:
            return rate_limited(over.why, over.retry_after)
        if (path == "/metrics") is not (key.namespace == METRICS):
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
