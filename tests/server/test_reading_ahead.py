"""Y8: what is read ahead for a key is paid by it, and a key that is over its limit has nothing read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decode.observed import toy
from perdure import Runtime
from perdure.server.core.keys import Keys, new_key
from perdure.server.core.settings import ReplyDefaults
from server.live_server import live_server, opened

LONG = "Here is a letter of some length. " * 6


class Ahead:
    """What is read while the engine is idle."""

    def __init__(self, rt: Runtime, patching: pytest.MonkeyPatch) -> None:
        self._rt = rt
        self._outputs: list[Any] = []
        submit = rt.backend.submit

        def noted(request: Any) -> Any:
            output = submit(request)
            if request.idle:
                self._outputs.append(output)
            return output

        patching.setattr(rt.backend, "submit", noted)

    def computed(self) -> int:
        self._rt.chat_format.prefetcher.wait()
        return sum(reply.reuse.computed for output in self._outputs for reply in output.replies)


@pytest.mark.parametrize("limit", [None, 700, 60])
def test_y8_what_is_read_ahead_is_paid_by_its_key(
    limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Y8: by `append`, and behind a reply."""
    secret, key = new_key("ada", tokens_per_day=limit)
    keys = Keys([key])
    with (
        opened(toy(), n_ctx=4096, store=tmp_path) as rt,
        live_server(rt, keys=keys, defaults=ReplyDefaults(settle=4096)) as server,
        server.client(secret) as client,
    ):
        ahead = Ahead(rt, monkeypatch)
        client.post("/v1/sessions", json={"name": "one"}).raise_for_status()
        paid = 0
        for number in range(6):
            body = {"message": f"{number} {LONG}"}
            status = client.post("/v1/sessions/one/append", json=body).status_code
            assert status == (200 if limit is None or paid < limit else 429)
            computed = ahead.computed()
            [today] = keys.usage.days(key).values()
            paid = today.prompt_tokens
            # The last token is computed again with each reading, and nobody pays for that.
            assert 0 <= computed - paid <= 2 * 6
            assert limit is None or paid <= limit
        assert (paid > 1000) == (limit is None)
        if limit is None:
            before = ahead.computed()
            said = {"message": "And?", "max_tokens": 4, "temperature": 0}
            usage = client.post("/v1/sessions/one/turns", json=said).raise_for_status().json()["usage"]
            behind = ahead.computed() - before
            [today] = keys.usage.days(key).values()
            assert 0 <= behind - (today.tokens - paid - usage["total_tokens"]) <= 2
