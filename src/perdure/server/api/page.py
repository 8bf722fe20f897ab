"""`/`: the page, and the files that it is made of. They came with the package; none has anybody's data."""

from __future__ import annotations

import functools
import mimetypes
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from perdure.inspection.page import report_script_hash, script_hash
from perdure.server.core.api_error import ApiError
from perdure.server.core.middleware import ASSETS
from perdure.server.protocols.ollama.routes import running


def as_policy(rules: Mapping[str, str]) -> str:
    return "; ".join(f"{name} {value}" for name, value in rules.items())


_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
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
_FRAME_SCRIPT = """
"use strict";
addEventListener("message", function show(event) {
  if (event.source !== parent || typeof event.data !== "string") return;
  removeEventListener("message", show);
  document.open();
  document.write(event.data);
  document.close();
});
parent.postMessage("ready", "*");
"""
"""Shows the one text that the page sends."""
_FRAME = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Analysis</title></head>
<body><script>{_FRAME_SCRIPT}</script></body>
</html>
"""
_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def index(request: Request) -> Response:
    """The page for browsers; for Ollama's clients, which ask here whether somebody is there, their answer."""
    if "text/html" not in request.headers.get("accept", ""):
        return await running()
    page_files = _files()
    if "index.html" not in page_files:
        raise ApiError(404, "this build has no page; the API is at /v1", code="no_page")
    return _answer("index.html", page_files["index.html"], "no-cache")


@router.get(ASSETS + "analysis")
async def analysis_frame() -> Response:
    """A document for the analysis of a reply, which has a script of its own: it has no origin, reaches
    nothing, and runs that script and no other, whatever the text is. The page sends it what to show."""
    policy = {
        "sandbox": "allow-scripts",
        "default-src": "'none'",
        "script-src": f"'{script_hash(_FRAME_SCRIPT)}' '{report_script_hash()}'",
        "style-src": "'unsafe-inline'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'self'",
    }
    headers = {**HEADERS, "content-security-policy": as_policy(policy), "x-frame-options": "SAMEORIGIN"}
    return Response(_FRAME, media_type="text/html", headers={**headers, "cache-control": "no-cache"})


@router.get(ASSETS + "{name}")
async def asset(name: str) -> Response:
    content = _files().get(f"page/{name}")
    if content is None:
        raise ApiError(404, f"there is no file {name[:100]!r} of the page", code="not_found")
    # Another content has another name.
    return _answer(name, content, "public, max-age=31536000, immutable")


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
