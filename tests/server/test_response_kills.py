"""A server that is killed between two events of a response: nothing that was acknowledged is lost (H9)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.test_command import serving
from server.test_responses import PATH, events, resumed, text_of

ASKED = {"input": "Go", "temperature": 1.0, "max_output_tokens": 16, "seed": 5}


def test_killing_the_server_between_two_events_loses_nothing_h9(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """H9: the id that was told is found, its text goes on as it was, and it can be continued."""
    model, options = zoo_path("llama"), ("--store", str(tmp_path / "store"), "--in-process", "--threads", "1")
    expected = ""
    unfinished: list[tuple[str, list[dict[str, Any]]]] = []
    for count in (1, 9, None):
        with serving(model, *options) as running, running.client() as client:
            for response_id, heard in unfinished:
                rest = resumed(client, response_id, heard[-1]["sequence_number"])
                assert text_of(heard + rest) == expected
                goes_on = {"input": "And?", "previous_response_id": response_id, "max_output_tokens": 2}
                following = client.post(PATH, json=goes_on).json()
                read = following["usage"]["input_tokens"]
                assert read > rest[-1]["response"]["usage"]["total_tokens"]
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
