"""`perdure serve`, run as people run it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from filelock import FileLock

import perdure
from cli.pty_user import terminal
from perdure.server.core.keys import Keys
from server.live_server import PATIENCE, events, hello

CHAT = "/v1/chat/completions"


@dataclass
class Running:
    """The command, running, and what it said at its start."""

    process: subprocess.Popen[str]
    screen: dict[str, str]

    @property
    def url(self) -> str:
        # Of several, its own comes first.
        return self.screen["address"].partition(" and ")[0]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)


@contextmanager
def serving(
    model: Path, *options: str, command: str = "serve", start_new_session: bool = False, **environment: str
) -> Iterator[Running]:
    process = subprocess.Popen(
        [sys.executable, "-m", "perdure.cli", command, str(model), "--port", "0", "--threads", "1", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=start_new_session,
    )
    try:
        assert process.stdout is not None
        screen = {}
        for line in process.stdout:
            if line.startswith("Ctrl-C"):
                break
            name, _, value = line.strip().partition(" ")
            screen[name] = value.strip()
        assert "address" in screen, process.communicate()
        yield Running(process, screen)
    finally:
        process.kill()
        process.communicate()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perdure.cli", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def test_a_server_shares_the_engine_of_a_program_that_was_first(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """I1: its clients name no files there either."""
    store = tmp_path / "store"
    with (
        perdure.open(zoo_path("llama"), n_ctx=512, slots=2, threads=1, store=store) as rt,
        serving(zoo_path("llama"), "--store", str(store)) as running,
        running.client() as client,
    ):
        body = {"message": "Hello", "max_tokens": 4}
        assert client.post("/v1/sessions", json={"name": "one"}).status_code == 201
        assert client.post("/v1/sessions/one/turns", json=body).status_code == 200
        assert rt.session("one").turns == 1
        refused = client.post("/v1/sessions/one/turns", json={**body, "perdure": {"adapters": {"a.gguf": 1}}})
        assert refused.status_code == 404, refused.text


def test_it_says_what_it_serves_stops_in_order_and_goes_on_where_it_was(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """A reply in flight is finished after SIGTERM, its turn is kept, and the next server has it."""
    options = ("--store", str(tmp_path / "store"), "--store-size", "0.5", "--ctx", "1024", "--slots", "2")
    with serving(zoo_path("llama"), *options) as running, running.client() as client:
        assert running.screen["model"].startswith("llama")
        assert running.screen["context"].startswith("1024")
        assert running.screen["slots"].startswith("2")
        assert running.screen["store"] == f"{tmp_path / 'store'}, up to 536.9 MB of state"
        assert running.screen["keys"].startswith("none")
        assert client.post("/v1/sessions", json={"name": "one"}).status_code == 201
        body = {
            "message": "Hello",
            "max_tokens": 500,
            "logit_bias": {"381": -100, "383": -100},
            "stream": True,
        }
        with client.stream("POST", "/v1/sessions/one/turns", json=body) as response:
            chunks = events(response)
            next(chunks)
            running.process.send_signal(signal.SIGTERM)
            *_, last, done = chunks
        assert done == "[DONE]"
        assert isinstance(last, dict)
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["perdure"]["kept"]
        _, log = running.process.communicate(timeout=PATIENCE)
        assert running.process.returncode == 0, log
        statuses = [
            line["status"] for line in map(json.loads, log.splitlines()) if line["event"] == "request"
        ]
        assert statuses == [201, 200]
    with serving(zoo_path("llama"), *options, "--in-process") as running, running.client() as client:
        assert len(client.get("/v1/sessions/one/turns").json()["data"]) == 1
        running.process.send_signal(signal.SIGINT)
        running.process.communicate(timeout=PATIENCE)
        assert running.process.returncode == 0


def test_replies_that_take_longer_than_the_grace_end_with_an_error_h1(
    zoo_path: Callable[[str], Path],
) -> None:
    """H1."""
    options = ("--no-store", "--ctx", "16384", "--slots", "1", "--grace", "0.2")
    with serving(zoo_path("llama"), *options) as running, running.client() as client:
        body = hello(max_tokens=16000, logit_bias={"381": -100, "383": -100}, stream=True)
        with client.stream("POST", CHAT, json=body) as response:
            chunks = events(response)
            next(chunks)
            running.process.send_signal(signal.SIGTERM)
            *_, error, last, done = chunks
        assert done == "[DONE]"
        assert isinstance(error, dict)
        assert isinstance(last, dict)
        assert error["error"]["code"] == "stopping"
        assert last["choices"][0]["finish_reason"] == "length"
        running.process.communicate(timeout=PATIENCE)
        assert running.process.returncode == 0


def test_it_does_not_listen_to_others_without_keys(zoo_path: Callable[[str], Path]) -> None:
    done = run("serve", str(zoo_path("llama")), "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2
    assert "--keys" in done.stderr


def test_a_port_that_is_taken_is_told(zoo_path: Callable[[str], Path]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        done = run("serve", str(zoo_path("llama")), "--port", str(other.getsockname()[1]))
    assert done.returncode == 2
    assert "--port" in done.stderr


def test_a_new_key_opens_the_door(zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    made = run("serve", "--new-key", "team")
    assert made.returncode == 0
    secret, line = (text.split()[1] for text in made.stdout.splitlines())
    keys = tmp_path / "keys"
    keys.write_text(line + "\n")
    assert Keys.read(keys).namespace(secret) == "team"
    options = ("--no-store", "--keys", str(keys), "--in-process")
    with serving(zoo_path("llama"), *options) as running, running.client() as client:
        assert running.screen["keys"] == "1, of team"
        assert client.post(CHAT, json=hello()).status_code == 401
        headers = {"authorization": f"Bearer {secret}"}
        assert client.post(CHAT, json=hello(), headers=headers).status_code == 200


@pytest.mark.extension("keys")
def test_a_hang_up_has_the_keys_read_again_and_costs_no_request(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """By a real signal to all processes of the server, the engine's too, as `systemctl kill` sends it."""
    keys = tmp_path / "keys"
    first = run("keys", "add", "one", "--keys", str(keys)).stdout.strip()
    options = ("--no-store", "--keys", str(keys), "--ctx", "4096")
    with serving(zoo_path("llama"), *options, start_new_session=True) as running, running.client() as client:
        known = {"authorization": f"Bearer {first}"}
        body = hello(max_tokens=2000, logit_bias={"381": -100, "383": -100}, stream=True)
        with client.stream("POST", CHAT, json=body, headers=known) as response:
            chunks = events(response)
            next(chunks)
            second = run("keys", "add", "two", "--keys", str(keys)).stdout.strip()
            new = {"authorization": f"Bearer {second}"}
            assert client.get("/v1/models", headers=new).status_code == 401
            os.killpg(running.process.pid, signal.SIGHUP)
            assert running.process.stderr is not None
            told = next(line for line in running.process.stderr if "read again" in line)
            assert "the keys were read again: 2" in told
            assert client.get("/v1/models", headers=new).status_code == 200
            *_, last, done = chunks
        assert done == "[DONE]"
        assert isinstance(last, dict)
        assert last["choices"][0]["finish_reason"] == "length"
        assert client.get("/ready").json()["restarts"] == 0


def test_a_hang_up_has_the_settings_read_again_and_costs_no_request(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """What can change while it runs does, options of the command line stay, and what needs a restart is named
    in one line. A file that is wrong changes nothing."""
    config = tmp_path / "config.toml"
    config.write_text("messages = 1\nbody_bytes = 100000\n")
    options = ("--no-store", "--ctx", "4096", "--body-seconds", "50")
    page = "https://chat.example.org"
    with (
        serving(zoo_path("llama"), *options, start_new_session=True, PERDURE_CONFIG=str(config)) as running,
        running.client() as client,
    ):
        assert running.process.stderr is not None
        log = map(json.loads, running.process.stderr)

        def hang_up(until: str) -> str:
            os.killpg(running.process.pid, signal.SIGHUP)
            return str(next(line["event"] for line in log if until in line["event"]))

        def statuses(**more: object) -> list[int]:
            """Of one and two messages, of a page elsewhere, of another name, and of a field nobody knows."""
            one, host = hello(**more), {"host": "chat.example.org"}
            two = {**one, "messages": one["messages"] * 2}
            return [
                client.post(CHAT, json=one).status_code,
                client.post(CHAT, json=two).status_code,
                client.post(CHAT, json=one, headers={"origin": page}).status_code,
                client.post(CHAT, json=one, headers=host).status_code,
                client.post(CHAT, json={**one, "model": "gpt-5"}).status_code,
                client.post(CHAT, json={**one, "colour": "red"}).status_code,
            ]

        body = hello(max_tokens=1000, logit_bias={"381": -100, "383": -100}, stream=True)
        with client.stream("POST", CHAT, json=body) as response:
            chunks = events(response)
            next(chunks)
            assert statuses() == [200, 400, 403, 403, 404, 200]
            config.write_text(
                f'messages = 2\ncors = ["{page}"]\nallow_host = ["chat.example.org"]\nalias = ["gpt-*"]\n'
                'strict = true\nmax_tokens = 3\nbody_seconds = 40\nport = 1\nslots = 2\noverflow = "fold"\n'
            )
            changed = "alias, allow_host, body_bytes, cors, max_tokens, messages, strict"
            assert hang_up("settings") == f"the settings were read again: {changed}"
            assert next(log)["event"] == "slots changed since the start: restart the server for that"
            assert statuses() == [200, 200, 200, 200, 200, 400]
            asked = {name: value for name, value in hello().items() if name != "max_tokens"}
            allowed = client.post(CHAT, json=asked, headers={"origin": page})
            assert allowed.headers["access-control-allow-origin"] == page
            assert allowed.json()["usage"]["completion_tokens"] == 3
            for wrong, why in (
                ("messages = 0", "Invalid value for '--messages'"),
                ('cors = ["*"]', "--cors '*' lets every page"),
                ("temperature = -1.0", "temperature is a number from 0"),
                ("max_tokens = 0", "max_tokens is None or a whole number from 1"),
                ("messages = ", "is not TOML"),
            ):
                config.write_text(f"{wrong}\n")
                assert why in hang_up("as they were")
            assert statuses() == [200, 200, 200, 200, 200, 400]
            config.write_text('log_level = "error"\n')
            assert "log_level" in hang_up("settings")
            assert statuses() == [200, 200, 403, 403, 404, 200]
            *_, last, done = chunks
        assert done == "[DONE]"
        assert isinstance(last, dict)
        assert last["choices"][0]["finish_reason"] == "length"
        assert client.get("/ready").json()["restarts"] == 0
        os.killpg(running.process.pid, signal.SIGTERM)
        running.process.wait(PATIENCE)
        assert list(log) == []


def test_a_server_ends_with_the_terminal_that_it_was_started_in(zoo_path: Callable[[str], Path]) -> None:
    with terminal(
        {**os.environ, "OMP_NUM_THREADS": "1"}, "serve", str(zoo_path("llama")), "--port", "0", "--no-store"
    ) as user:
        told = user.until("Ctrl-C stops it.")
        # Once it answers, it hears signals.
        [address] = re.findall(r"^address +(\S+)", told, re.MULTILINE)
        assert httpx.get(f"{address}/health", timeout=PATIENCE, trust_env=False).status_code == 200
        user.hang_up()
        assert user.process.wait(PATIENCE) == 0


def test_help_needs_no_engine() -> None:
    done = run("serve", "--help")
    assert done.returncode == 0
    assert "--store" in done.stdout


def test_page_serves_and_opens_the_page_in_a_browser(zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    os.mkfifo(shown)
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >"{shown}"\n')
    browser.chmod(0o755)
    options = ("--no-store", "--in-process", "--ctx", "256")
    with (
        serving(zoo_path("llama"), *options, command="page", BROWSER=f"{browser} %s") as running,
        running.client() as client,
    ):
        assert shown.read_text().strip() == running.screen["address"]
        assert "<title>perdure</title>" in client.get("/", headers={"accept": "text/html"}).text
    refused = run("serve", "--open", "--no-page", "--port", "0")
    assert (refused.returncode, "--open needs the page" in refused.stderr) == (2, True)


def test_with_ollama_it_listens_where_ollamas_clients_look(zoo_path: Callable[[str], Path]) -> None:
    ollama = "http://127.0.0.1:11434"
    # There is one such port for all that are tested on this machine at the same time.
    with FileLock(Path(tempfile.gettempdir()) / "perdure-tests-ollama.lock"):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 11434)) == 0:
                pytest.skip("somebody listens on Ollama's port of this machine")
        with serving(zoo_path("llama"), "--no-store", "--ollama") as running, running.client() as client:
            there = httpx.get(f"{ollama}/api/tags", trust_env=False, timeout=PATIENCE)
            assert there.json() == client.get("/api/tags").json()
            said = httpx.get(f"{ollama}/", trust_env=False, timeout=PATIENCE).text
            assert said == "Ollama is running"


def test_a_folder_with_a_damaged_file_is_served_without_it_y17(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(zoo_path("llama"), folder / "good.gguf")
    (folder / "damaged.gguf").write_bytes(zoo_path("llama").read_bytes()[:5000])
    options = ("--model", str(folder), "--store", str(tmp_path / "store"))
    with serving(zoo_path("gemma3"), *options) as running, running.client() as client:
        names = [each["id"] for each in client.get("/v1/models").json()["data"]]
        assert names[1:] == ["good"]
        assert client.post(CHAT, json=hello(model="good")).status_code == 200
        running.process.send_signal(signal.SIGTERM)
        _, said = running.process.communicate(timeout=PATIENCE)
        assert "damaged.gguf is left out: " in said
