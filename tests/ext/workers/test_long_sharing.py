"""Two chats, a script and a server on one store at once: nothing is lost, and nobody is told "in use"."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from homes import new_home

TESTS = Path(__file__).parents[2]
SHORT = ("--max-tokens", "8")


@pytest.fixture
def environment(zoo_path: Callable[[str], Path], tmp_path: Path) -> dict[str, str]:
    """The zoo's model, or the one that PERDURE_SHARED_MODEL names."""
    return {
        **os.environ,
        "PERDURE_HOME": str(new_home(tmp_path / "home")),
        "PERDURE_MODEL": os.environ.get("PERDURE_SHARED_MODEL") or str(zoo_path("llama")),
        "OMP_NUM_THREADS": "1",
    }


SCRIPT = """
import json, sys, time
import perdure
end = time.monotonic() + float(sys.argv[1])
said = []
while time.monotonic() < end or not said:
    with perdure.open(store=sys.argv[2]) as rt:
        for _ in range(5):
            text = f"script {len(said)}"
            assert rt.session("script").say(text, max_tokens=8, overflow="drop_oldest").kept
            said.append(text)
print(json.dumps(said))
"""


class Chat:
    """`perdure chat` in a pipe: a line is a message, and each is answered."""

    def __init__(self, environment: dict[str, str], session: str, seconds: float) -> None:
        self.session, self.said = session, list[str]()
        self._seconds = seconds
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "perdure.cli",
                "chat",
                "--session",
                session,
                "--overflow",
                "drop_oldest",
                *SHORT,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.outcome: tuple[int, str] | None = None
        self.thread = threading.Thread(target=self._talk)
        self.thread.start()

    def _talk(self) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        end = time.monotonic() + self._seconds
        while time.monotonic() < end or not self.said:
            text = f"{self.session} {len(self.said)}"
            process.stdin.write(f"{text}\n")
            process.stdin.flush()
            self.said.append(text)
            if not process.stdout.readline():
                break
        process.stdin.close()
        process.stdin = None
        _, told = process.communicate(timeout=120)
        self.outcome = process.returncode, told


def share(environment: dict[str, str], seconds: float) -> dict[str, list[str]]:
    """Have them all talk for so long: what each has said, after looking whether it is all there."""
    store = str(Path(environment["PERDURE_HOME"]) / "store")
    chats = [Chat(environment, name, seconds) for name in ("one", "two")]
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(seconds), store],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
    server = subprocess.Popen(
        [sys.executable, "-m", "perdure.cli", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
    asked: list[str] = []
    try:
        assert server.stdout is not None
        assert server.stderr is not None
        listening = server.stdout.readline().split()
        assert listening, server.stderr.read()
        # Read all the while: a full pipe would hold it.
        threading.Thread(target=server.stderr.read, daemon=True).start()
        address = listening[1]
        end = time.monotonic() + seconds
        with httpx.Client(base_url=address, timeout=120, trust_env=False) as client:
            while time.monotonic() < end or not asked:
                text = f"server {len(asked)}"
                told = client.post(
                    "/v1/chat/completions",
                    json={
                        "messages": [{"role": "user", "content": text}],
                        "max_tokens": 8,
                        "perdure": {"session": "server", "overflow": "drop_oldest"},
                    },
                )
                assert told.status_code == 200, told.text
                asked.append(text)
        for chat in chats:
            chat.thread.join()
        out, problems = script.communicate(timeout=120)
        assert script.returncode == 0, problems
        for chat in chats:
            assert chat.outcome is not None
            assert chat.outcome[0] == 0, chat.outcome[1]
            assert "in use" not in chat.outcome[1]
    finally:
        for process in (script, server):
            process.terminate()
            process.communicate(timeout=60)
    found = {chat.session: chat.said for chat in chats} | {"script": json.loads(out), "server": asked}
    for name, said in found.items():
        shown = subprocess.run(
            [sys.executable, "-m", "perdure.cli", "sessions", "show", name, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        turns = json.loads(shown.stdout)["history"]
        assert [turn["messages"][0]["content"] for turn in turns] == said, name
    return found


def test_two_chats_a_script_and_a_server_share_a_store(environment: dict[str, str]) -> None:
    assert all(share(environment, 5).values())


@pytest.mark.soak
def test_they_share_it_for_ten_minutes(environment: dict[str, str]) -> None:
    """`PERDURE_SHARED_MODEL=default` plays it with the default model."""
    said = share(environment, float(os.environ.get("PERDURE_SHARED_SECONDS", 600)))
    print({name: len(texts) for name, texts in said.items()})
