"""A batch whose server is killed again and again: each line is answered once, and no answer changes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ext.batches.test_batches import begin, chats, content, ended

TESTS = Path(__file__).parents[2]


@contextmanager
def served(store: Path) -> Iterator[httpx.Client]:
    """A server that is killed at the end."""
    command = [sys.executable, "-m", "ext.batches.serving", str(store)]
    with subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
                yield client
        finally:
            process.kill()


def killed(store: Path, lines: int, kills: int, seconds: float) -> dict[str, int]:
    """How many lines were answered before each kill, after a batch with that many."""
    draw = random.Random(7)
    with served(store) as client:
        batch_id = begin(client, chats(lines, max_tokens=6))["id"]
        time.sleep(draw.uniform(0, seconds))
    counts = {}
    for kill in range(1, kills):
        with served(store) as client:
            time.sleep(draw.uniform(0, seconds))
            counts[f"kill {kill}"] = client.get(f"/v1/batches/{batch_id}").json()["request_counts"][
                "completed"
            ]
    with served(store) as client:
        end = time.monotonic() + 1800
        while time.monotonic() < end:
            if client.get(f"/v1/batches/{batch_id}").json()["status"] == "completed":
                break
            time.sleep(0.2)
        done = ended(client, batch_id)
        assert done["request_counts"] == {"total": lines, "completed": lines, "failed": 0}
        assert done["error_file_id"] is None
        answers = content(client, done["output_file_id"])
        assert [each["custom_id"] for each in answers] == [f"line-{n}" for n in range(lines)]
        for number, each in enumerate(answers):
            asked = {"messages": [{"role": "user", "content": f"Number {number}?"}], "max_tokens": 6}
            if number % max(1, lines // 20) == 0:
                # As if it was asked alone.
                alone = client.post("/v1/chat/completions", json={**asked, "temperature": 0}).json()
                assert each["response"]["body"]["choices"] == alone["choices"]
    return counts


@pytest.mark.full
def test_a_few_kills(tmp_path: Path) -> None:
    killed(tmp_path, lines=60, kills=3, seconds=1.0)


@pytest.mark.soak
def test_5000_lines_and_20_kills(tmp_path: Path) -> None:
    began = time.monotonic()
    counts = killed(tmp_path, lines=5000, kills=20, seconds=8.0)
    print(json.dumps(counts), f"{time.monotonic() - began:.0f} s")
