"""A server that is killed between two events of a response: nothing that was acknowledged is lost (H9)."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ext.responses.test_responses import PATH, events, resumed, text_of
from perdure.cache.block import BLOCK
from server.live_server import PATIENCE
from server.test_command import serving

ASKED = {"input": "Go", "temperature": 1.0, "max_output_tokens": 16, "seed": 5}


def test_killing_the_server_between_two_events_loses_nothing_h9(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """H9: the id that was told is found, its text goes on as it was, since replies are exact, and it can be
    continued."""
    model = zoo_path("llama")
    options = ("--store", str(tmp_path / "store"), "--in-process", "--threads", "1", "--exact")
    expected = ""
    unfinished: list[tuple[str, list[dict[str, Any]]]] = []
    for count in (1, 9, None):
        with serving(model, *options) as running, running.client() as client:
            for response_id, heard in unfinished:
                rest = resumed(client, response_id, heard[-1]["sequence_number"])
                assert text_of(heard + rest) == expected
                told = rest[-1]["response"]["usage"]
                goes_on = {"input": "And?", "previous_response_id": response_id, "max_output_tokens": 2}
                following = client.post(PATH, json=goes_on).json()["usage"]
                assert following["input_tokens"] > told["total_tokens"]
            unfinished.clear()
            if not expected:
                whole = client.post(PATH, json=ASKED).json()
                expected = whole["output"][-1]["content"][0]["text"]
                assert len(expected) > 8
            if count is None:
                assert client.get(f"{PATH}/{whole['id']}").json()["output"] == whole["output"]
                break
            with client.stream("POST", PATH, json={**ASKED, "stream": True}) as response:
                found = events(response)
                heard = [next(found) for _ in range(count)]
                running.process.kill()
            unfinished.append((heard[0]["response"]["id"], heard))
            running.process.wait()


def test_a_response_goes_on_from_its_state_after_a_kill_h9(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """H9: what was written behind the replies is used. A conversation is written when it has grown by 256
    tokens or an eighth; the turns themselves are always there."""
    store = tmp_path / "store"
    options = ("--store", str(store), "--in-process", "--threads", "1", "--ctx", "2048")
    asked: dict[str, Any] = {"input": "word " * 400, "temperature": 0, "max_output_tokens": 4}
    written, grown = 0, 0
    for _ in range(3):
        with serving(zoo_path("llama"), *options) as running, running.client() as client:
            answer = client.post(PATH, json=asked)
            assert answer.status_code == 200, answer.text
            response = answer.json()
            usage = response["usage"]
            assert usage["input_tokens_details"]["cached_tokens"] >= written // BLOCK * BLOCK
            assert usage["input_tokens"] > grown
            grown = usage["total_tokens"]
            if not written:
                await_blocks(store)
                # All but the last token, which nothing was computed of.
                written = grown - 1
                assert written > 256
            asked = {**asked, "input": "And?", "previous_response_id": response["id"]}
            running.process.kill()
            running.process.wait()


def await_blocks(store: Path) -> None:
    """Return when a block is in the index on the disk: all that belong together come in one transaction."""
    [index] = store.rglob("index.sqlite")
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True)) as database:
            if database.execute("SELECT count(*) FROM block").fetchone()[0]:
                return
    pytest.fail("nothing was written behind the reply")
