"""`perdure mcp`, by the mcp package's own client over stdio: sessions and memories; namespaces hold."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import perdure
from perdure.server.core.keys import Keys, new_key
from perdure.testing.toy import ToyModel
from server.live_server import live_server

ALL = {"list_sessions", "search_sessions", "read_session", "wake_session", "fork_session", "label_session"}
ALL |= {"list_memories", "wake_memory", "why"}


async def with_client(url: str, key: str, work: Any) -> None:
    from mcp import Client, StdioServerParameters

    command = [sys.executable, "-m", "perdure.cli", "mcp", "--url", url]
    source = str(Path(perdure.__file__).parent.parent)
    env = {"PERDURE_KEY": key, "PYTHONPATH": source}
    async with Client(StdioServerParameters(command=command[0], args=command[1:], env=env)) as client:
        await work(client)


async def called(client: Any, tool: str, **arguments: Any) -> Any:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result
    return result.structured_content


def test_an_agent_finds_its_sessions_and_nobody_elses(tmp_path: Path) -> None:
    """H5: what a key may not see over HTTP, it does not see here."""
    made = [new_key(name) for name in ("alice", "bob")]
    with (
        perdure.open(ToyModel(), n_ctx=512, slots=2, store=tmp_path) as rt,
        live_server(rt, keys=Keys([key for _, key in made])) as server,
    ):
        rt.session("work", namespace="alice", system="Be brief.").say("The codeword is heron.", max_tokens=4)
        with server.client(made[0][0]) as client:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
            client.post("/v1/chat/completions", json=body).raise_for_status()

        async def alice(client: Any) -> None:
            assert {tool.name for tool in (await client.list_tools()).tools} == ALL
            assert [each["name"] for each in (await called(client, "list_sessions"))["data"]] == ["work"]
            assert len((await called(client, "search_sessions", text="heron"))["data"]) == 1
            assert (await called(client, "search_sessions", text="bittern"))["data"] == []
            turns = (await called(client, "read_session", name="work"))["data"]
            assert "heron" in str(turns)
            assert await called(client, "wake_session", name="work")
            fork = await called(client, "fork_session", name="work", new_name="other", turn=1)
            assert fork["name"] == "other"
            await called(client, "label_session", name="work", label="codeword", note="a bird")
            [memory] = (await called(client, "list_memories", label="codeword"))["data"]
            woken = await called(client, "wake_memory", address=memory["address"], new_name="third")
            assert woken["name"] == "third"
            assert (await called(client, "why"))["reuse"]["computed"] > 0
            missing = await client.call_tool("read_session", {"name": "../work"})
            assert missing.is_error

        async def bob(client: Any) -> None:
            assert (await called(client, "list_sessions"))["data"] == []
            assert (await called(client, "search_sessions", text="heron"))["data"] == []
            assert (await called(client, "list_memories"))["data"] == []
            for name, arguments in (
                ("read_session", {"name": "work"}),
                ("wake_session", {"name": "work"}),
                ("fork_session", {"name": "work", "new_name": "mine"}),
                ("label_session", {"name": "work", "label": "mine"}),
                ("why", {}),
            ):
                result = await client.call_tool(name, arguments)
                assert result.is_error, name
                assert "heron" not in str(result)

        asyncio.run(with_client(server.url, made[0][0], alice))
        asyncio.run(with_client(server.url, made[1][0], bob))
