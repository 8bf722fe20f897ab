"""`perdure mcp`: an agent's own sessions and memories as tools of the Model Context Protocol.

    {"mcpServers": {"perdure": {"command": "perdure", "args": ["mcp"]}}}

Every tool is a request to a server, with the key that was given: what belongs to another key is not there.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

import typer

import perdure
from perdure import PerdureError
from perdure.spi.cli import Key, Url, ask, note

if TYPE_CHECKING:
    from collections.abc import Callable

    from mcp.server import MCPServer

T = TypeVar("T")

_SEARCH = 60.0
"""Seconds for what reads all that was said, or moves state."""
_ABOUT = (
    "Your conversations with the model that perdure serves: list, search and read them, wake or fork one, "
    "label a point of one as a memory, and ask why a prompt was computed again."
)


def mcp(url: Url = None, key: Key = None) -> None:
    """Offer your sessions to an agent as MCP tools.

    They come over standard input and output. They list, search, read, wake, fork and label sessions and
    memories of a running server, and say why prompts were computed again. The exit code is 1 where the
    package mcp is missing.
    """
    try:
        server = tools(url, key)
    except ModuleNotFoundError as error:
        note(f"{error.name} is not installed: pip install 'perdure[mcp]'")
        raise typer.Exit(1) from None
    server.run("stdio")


def tools(url: str | None, key: str | None) -> MCPServer:
    """An MCP server whose tools ask a server of ours."""
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    server = MCPServer("perdure", instructions=_ABOUT, version=perdure.__version__, log_level="ERROR")

    async def call(path: str, body: dict[str, Any] | None = None, **query: object) -> dict[str, Any]:
        parameters = {name: value for name, value in query.items() if value is not None}
        whole = f"{path}?{urlencode(parameters)}" if parameters else path
        return await _in_thread(lambda: ask(whole, url, key, body=body, seconds=_SEARCH))

    async def _in_thread(work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except PerdureError as error:
            raise ToolError(str(error)) from None

    @server.tool()
    async def list_sessions(limit: int = 20, after: str | None = None) -> dict[str, Any]:
        """List your sessions, the latest first; `after` is the name of the last one of the page before."""
        return await call("/v1/sessions", limit=limit, after=after)

    @server.tool()
    async def search_sessions(text: str, limit: int = 20) -> dict[str, Any]:
        """Find sessions that have a text in their names or in what was said."""
        return await call("/v1/sessions", text=text, limit=limit)

    @server.tool()
    async def read_session(name: str, after: int = 0, limit: int = 20) -> dict[str, Any]:
        """Read what was said in a session, turn by turn, behind turn number `after`."""
        return await call(f"/v1/sessions/{quote(name, safe='')}/turns", after=after, limit=limit)

    @server.tool()
    async def wake_session(name: str) -> dict[str, Any]:
        """Bring the state of a session back into memory, so that its next turn starts at once."""
        return await call(f"/v1/sessions/{quote(name, safe='')}/wake", {})

    @server.tool()
    async def fork_session(name: str, new_name: str, turn: int | None = None) -> dict[str, Any]:
        """Start a new session where another one stands, or after one of its turns. Nothing is read again."""
        body: dict[str, Any] = {"name": new_name}
        if turn is not None:
            body["turn"] = turn
        return await call(f"/v1/sessions/{quote(name, safe='')}/fork", body)

    @server.tool()
    async def label_session(name: str, label: str, note: str = "", turn: int | None = None) -> dict[str, Any]:
        """Mark where a session stands, or one of its turns, as a memory that can be woken later."""
        body: dict[str, Any] = {"label": label, "note": note}
        if turn is not None:
            body["turn"] = turn
        return await call(f"/v1/sessions/{quote(name, safe='')}/label", body)

    @server.tool()
    async def list_memories(
        label: str | None = None, text: str | None = None, session: str | None = None, limit: int = 20
    ) -> dict[str, Any]:
        """List memories by label, by session, or by a text in their notes and in what was said."""
        return await call("/v1/memories", label=label, text=text, session=session, limit=limit)

    @server.tool()
    async def wake_memory(address: str, new_name: str) -> dict[str, Any]:
        """Start a new session at a memory; its address is in the list of memories."""
        return await call("/v1/memories/wake", {"address": address, "name": new_name})

    @server.tool()
    async def why(request: int | None = None) -> dict[str, Any]:
        """Say why tokens of a request were computed again: of the latest, or of one by its number."""
        listing = await call("/v1/requests", limit=1, before=None if request is None else request + 1)
        if not listing["data"] or (request is not None and listing["data"][0]["number"] != request):
            raise ToolError("there is no such request; the latest 200 are listed")
        entry: dict[str, Any] = listing["data"][0]
        return entry

    return server
