"""Host and origin check. Refuses requests that a web page of another site makes.

A server without keys trusts whoever reaches it, and a browser on this machine reaches it for any page it
shows: by a name that the page's owner points at 127.0.0.1 (DNS rebinding), or by a plain cross-site request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from perdure.errors import InvalidInputError
from perdure.server.core.api_error import ApiError, refuse

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_OWN = (b"same-origin", b"none")


class AllowedHosts:
    """The names under which a server may be asked: this machine's, where it listens, and further ones."""

    def __init__(
        self, bound: str = "127.0.0.1", further: Iterable[str] = (), origins: Iterable[str] = ()
    ) -> None:
        """`origins` are pages of other sites that may use the server, as CORS tells browsers."""
        self._origins = frozenset(origins)
        self._further = frozenset(_checked(host) for host in further)
        self._names = frozenset((*LOOPBACK, bound.lower())) | self._further

    def __contains__(self, host: str) -> bool:
        return host in self._names

    def trusts_page(self, origin: str, host: str) -> bool:
        """Whether a page of `origin` may ask the server at `host`: its own, and those of further names."""
        if origin in self._origins:
            return True
        parts = _split(origin)
        if parts is None:
            return False
        scheme, place = parts
        name = host_name(place)
        return (scheme in ("http", "https") and place == host.lower()) or name in self._further


class HostCheck:
    """Lets a request pass if its Host is one of the server's, and no foreign page of a browser makes it."""

    def __init__(self, app: ASGIApp, hosts: Callable[[], AllowedHosts | None]) -> None:
        """`hosts` gives those of this moment: they can change while the server runs. None lets all pass."""
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hosts = self._hosts() if scope["type"] in ("http", "websocket") else None
        if hosts is not None and (refused := _refused(hosts, scope)) is not None:
            await refuse(refused, scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refused(hosts: AllowedHosts, scope: Scope) -> ApiError | None:
    headers = dict(scope["headers"])
    # HTTP/1.0 has no Host; every browser sends one.
    host = headers.get(b"host", b"localhost").decode("latin-1")
    if host_name(host) not in hosts:
        return _forbidden(
            f"this server is not called {host[:100]!r}; `perdure serve --allow-host NAME` lets a name in",
            code="host_not_allowed",
        )
    origin = headers.get(b"origin")
    if origin is not None:
        if hosts.trusts_page(origin.decode("latin-1"), host):
            return None
        return _forbidden(
            f"pages of {origin.decode('latin-1')[:100]!r} may not use this server; "
            "`perdure serve --allow-host NAME` lets those of a host in",
            code="origin_not_allowed",
        )
    if headers.get(b"sec-fetch-site", b"none").lower() not in _OWN:
        return _forbidden("a page of another site may not use this server", code="origin_not_allowed")
    return None


def host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _split(origin: str) -> tuple[str, str] | None:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return (parts.scheme.lower(), parts.netloc.lower()) if parts.netloc else None


def _checked(host: str) -> str:
    name = host_name(host)
    if not name or name != host.strip().lower().strip("[]") or "/" in name or "*" in name:
        raise InvalidInputError(
            f"--allow-host takes the name of a host, such as chat.example.org, got {host!r}"
        )
    return name


def check_origins(origins: Iterable[str], *, keys: int) -> tuple[str, ...]:
    """Pages of other sites that may use a server: `https://chat.example.org`, or `*` for any."""
    found = tuple(origins)
    for origin in found:
        parts = _split(origin)
        if origin == "*":
            if not keys:
                raise InvalidInputError(
                    "--cors '*' lets every page that is open in a browser here use the server: give --keys "
                    "too, or name the pages"
                )
        elif parts is None or origin != f"{parts[0]}://{parts[1]}":
            raise InvalidInputError(
                f"--cors takes an origin such as https://chat.example.org, or *, got {origin!r}"
            )
    return found


def _forbidden(message: str, *, code: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code=code)


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
