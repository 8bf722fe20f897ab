"""`/`: the page, and the files that it is made of. They came with the package; none has anybody's data."""

from __future__ import annotations

import functools
import mimetypes
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from perdure.server.core.api_error import ApiError
from perdure.server.core.middleware import ASSETS


def as_policy(rules: Mapping[str, str]) -> str:
    return "; ".join(f"{name} {value}" for name, value in rules.items())


_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    # Pictures and sounds of a conversation are fetched with its key, and shown out of the page's memory.
    "img-src": "'self' blob:",
    "media-src": "'self' blob:",
    "connect-src": "'self'",
    # For the frame below alone: the page itself is framed by nobody.
    "frame-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # No text becomes markup or script, whatever is in it.
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS = {
    "content-security-policy": as_policy(_POLICY),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
}
_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

router = APIRouter(include_in_schema=False)


class _BrowserRoute(APIRoute):
    """A route for what asks for HTML. Clients of a protocol may find another answer at the same path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if "text/html" not in Headers(scope=scope).get("accept", ""):
            return Match.NONE, {}
        return super().matches(scope)


async def index() -> Response:
    """The page."""
    page_files = _files()
    if "index.html" not in page_files:
        raise ApiError(404, "this build has no page; the API is at /v1", code="no_page")
    return _answer("index.html", page_files["index.html"], "no-cache")


@router.get(ASSETS + "{name}")
async def asset(name: str) -> Response:
    content = _files().get(f"page/{name}")
    if content is None:
        raise ApiError(404, f"there is no file {name[:100]!r} of the page", code="not_found")
    # Another content has another name.
    return _answer(name, content, "public, max-age=31536000, immutable")


router.add_api_route("/", index, methods=["GET"], route_class_override=_BrowserRoute)


def _answer(name: str, content: bytes, cache: str) -> Response:
    suffix = name[name.rfind(".") :]
    kind = _KINDS.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(content, media_type=kind, headers={**HEADERS, "cache-control": cache})


@functools.cache
def _files() -> dict[str, bytes]:
    """All files of the page by their paths: few, and read once."""
    contents: dict[str, bytes] = {}

    def walk(folder: Traversable, path: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                walk(entry, f"{path}{entry.name}/")
            else:
                contents[path + entry.name] = entry.read_bytes()

    root = files("perdure.server") / "page"
    if root.is_dir():
        walk(root, "")
    return contents
