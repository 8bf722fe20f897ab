"""CORS middleware. Tells browsers which pages of other sites may use the server."""

from __future__ import annotations

from collections.abc import Callable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send


class Cors:
    """Adds the headers of CORS for the origins of this moment: they can change while the server runs."""

    def __init__(self, app: ASGIApp, origins: Callable[[], tuple[str, ...]]) -> None:
        self._app = app
        self._origins = origins
        self._answered: tuple[tuple[str, ...], ASGIApp] = ((), app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = self._origins()
        if origins != self._answered[0]:
            self._answered = origins, self._with(origins)
        await self._answered[1](scope, receive, send)

    def _with(self, origins: tuple[str, ...]) -> ASGIApp:
        if not origins:
            return self._app
        return CORSMiddleware(
            self._app,
            allow_origins=origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
