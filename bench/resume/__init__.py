"""The resume guarantee: agents work for several turns, everything is killed, and they go on.

Claude Code, Codex and opencode (the npm packages) talk to `perdure serve` for some turns. Then the server and
its engine are killed with SIGKILL, the server is started again, and the agent goes on with
`--resume`. The figure is how many tokens of that prompt were computed, against those that are new in it: what
comes behind the last prompt and its reply. State is written as soon as the engine has nothing to do: the kill
comes when that is done, or after five seconds, and how long it took is told. Beside it, llama-server is sent
the same requests, and is killed and started at the same place.

The model is a toy (`tests/zoo`, `llama-brief`) that says one word and ends: what counts are tokens, as the
server's own list of requests has them. An agent that is not installed is fetched with npm.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from bench.child import Child, PeerMissingError
from bench.harness import Bench, Figure, Gauge, Pairs, Run, at_least, at_most
from bench.machine import Watch

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = (
    "Read the notes of the harbour and tell me what the weather was.",
    "And what was it on the day before?",
    "Which ships came in that week?",
    "Who wrote these notes, and for whom?",
    "What would you look at next?",
)
_CTX, _SLOTS = 196_608, 2
_PATIENCE = 1200.0
_WRITTEN = 5.0
"""Seconds that a server is given to write state down before it is killed."""
_HIDDEN = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}


@dataclass
class Asked:
    """A request that an agent sent."""

    path: str
    headers: dict[str, str]
    body: bytes


class Recorder(ThreadingHTTPServer):
    """Stands between an agent and the server, and notes what the agent asks for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = ""
        self.asked: list[Asked] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Recorder

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HIDDEN}
        if self.command == "POST":
            self.server.asked.append(Asked(self.path, headers, body))
        with (
            httpx.Client(timeout=_PATIENCE, trust_env=False) as client,
            client.stream(
                self.command, self.server.target + self.path, content=body, headers=headers
            ) as answer,
        ):
            self.send_response(answer.status_code)
            for name, value in answer.headers.items():
                if name.lower() not in _HIDDEN:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            # An agent that has what it wants may leave.
            with suppress(OSError):
                for piece in answer.iter_raw():
                    self.wfile.write(piece)
                    self.wfile.flush()

    do_GET = _pass_on  # noqa: N815
    do_POST = _pass_on  # noqa: N815
    do_HEAD = _pass_on  # noqa: N815

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        pass


# Agents.


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A client with its package, and the commands of its first and its later turns."""

    name: str
    package: str
    program: Callable[[Path], Path]
    command: Callable[[str, bool, str], Sequence[str]]
    """By the prompt, whether it goes on, and an id."""
    environment: Callable[[str], Mapping[str, str]] = lambda url: {}
    files: Callable[[str], Mapping[str, str]] = lambda url: {}
    """In the folder that it works in."""


def _codex_options(url: str) -> list[str]:
    provider = f'{{name="perdure",base_url="{url}/v1",wire_api="responses"}}'
    settings = {
        "model_provider": '"perdure"',
        "model_providers.perdure": provider,
        "model_context_window": str(_CTX),
    }
    return [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]


def _codex(prompt: str, resumes: bool, _: str) -> list[str]:
    safe = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "toy"]
    return ["exec", *safe, "$OPTIONS", *(["resume", "--last"] if resumes else []), prompt]


def _opencode_file(url: str) -> Mapping[str, str]:
    model = {"name": "toy", "limit": {"context": _CTX, "output": 4096}, "tool_call": True}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "perdure",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"toy": model},
    }
    config = {
        "provider": {"perdure": provider},
        "model": "perdure/toy",
        "small_model": "perdure/toy",
        "autoupdate": False,
        "share": "disabled",
    }
    return {"opencode.json": json.dumps(config)}


AGENTS = (
    Agent(
        name="Codex",
        package="@openai/codex",
        program=lambda modules: modules / ".bin" / "codex",
        command=_codex,
    ),
    Agent(
        name="Claude Code",
        package="@anthropic-ai/claude-code",
        program=lambda modules: modules / ".bin" / "claude",
        command=lambda prompt, resumes, name: [
            "-p",
            prompt,
            *(("--resume", name) if resumes else ("--session-id", name)),
        ],
        environment=lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_API_KEY": "",
            "ANTHROPIC_MODEL": "claude-sonnet-local",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "API_TIMEOUT_MS": "3600000",
        },
    ),
    Agent(
        name="opencode",
        package="opencode-ai",
        program=lambda modules: modules / ".bin" / "opencode",
        command=lambda prompt, resumes, _: [
            "run",
            "-m",
            "perdure/toy",
            *(("--continue",) if resumes else ()),
            prompt,
        ],
        files=_opencode_file,
    ),
)
_SCRIPTS = {"@anthropic-ai/claude-code": "install.cjs", "opencode-ai": "postinstall.mjs"}
"""What a package runs after it was installed, which npm may not do by itself."""


def modules_of(agent: Agent) -> Path:
    """The folder of npm packages that has an agent's: `PERDURE_AGENTS`, or one of the build's own."""
    given = os.environ.get("PERDURE_AGENTS")
    folder = Path(given) if given else ROOT / "build" / "agents" / agent.name.split()[0].lower()
    modules = folder / "node_modules"
    if not (modules / agent.package).exists():
        if (npm := shutil.which("npm")) is None:
            raise PeerMissingError(f"there is no npm to fetch {agent.package} with")
        folder.mkdir(parents=True, exist_ok=True)
        fetch = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), agent.package]
        done = subprocess.run(fetch, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerMissingError(f"npm could not install {agent.package}: {done.stderr[-300:]}")
        if script := _SCRIPTS.get(agent.package):
            subprocess.run(["node", script], cwd=modules / agent.package, capture_output=True, check=False)
    return modules


# Servers.


@dataclass
class Ours:
    """`perdure serve` on a folder, started and killed."""

    model: str
    store: Path
    process: subprocess.Popen[str] | None = field(default=None)
    url: str = ""

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "perdure.cli", "serve", self.model, "--port", "0"),
                *("--ctx", str(_CTX), "--slots", str(_SLOTS), "--store", str(self.store)),
                *("--alias", "*", "--no-page"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("address"):
                self.url = line.split()[1]
                return
        raise RuntimeError("perdure serve did not start")

    def kill(self) -> None:
        """SIGKILL to the server and all that it started."""
        if self.process is None:
            return
        for each in [*_descendants(self.process.pid), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self.process.communicate()
        self.process = None

    def until_written(self, session: str) -> float:
        """Seconds until the state of a session is on the disk; of five at most."""
        began = time.perf_counter()
        path = f"{self.url}/v1/sessions/{quote(session, safe='')}/state"
        while (waited := time.perf_counter() - began) < _WRITTEN:
            state = httpx.get(path, trust_env=False, timeout=60).raise_for_status().json()
            # The last token of a reply is not computed before something follows it.
            if state["tiers"].get("disk", {"tokens": 0})["tokens"] >= state["tokens"] - 1:
                break
            time.sleep(0.02)
        return waited

    def requests(self) -> list[dict[str, Any]]:
        """Those of this process, in their order."""
        answer = httpx.get(f"{self.url}/v1/requests", params={"limit": 200}, trust_env=False, timeout=60)
        found: list[dict[str, Any]] = answer.raise_for_status().json()["data"]
        return found[::-1]


def _descendants(process: int) -> list[int]:
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    parents = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    found, todo = [], [process]
    while todo:
        above = todo.pop()
        below = [pid for pid, parent in parents if parent == above]
        found += below
        todo += below
    return found


class LlamaServer:
    """llama-server out of `xllamacpp`, in the child that a benchmark kills."""

    def open(self, path: str) -> str:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx, params.n_parallel = _CTX * _SLOTS, _SLOTS
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
        params.endpoint_metrics = True
        self._server = xllamacpp.Server(params)
        return str(self._server.listening_address)


def _read_by_peer(url: str) -> int:
    """Prompt tokens that a llama-server has computed since its start."""
    text = httpx.get(f"{url}/metrics", trust_env=False, timeout=60).raise_for_status().text
    lines = [line for line in text.splitlines() if line.startswith("llamacpp:prompt_tokens_total")]
    return int(float(lines[0].split()[-1]))


# The measurement.


@dataclass(frozen=True)
class Resumed:
    """What the prompt after the kill took."""

    prompt: int
    new: int
    computed: int
    turns: int
    waited: float
    """Seconds after the agent's last turn until its state was on the disk."""


def work(agent: Agent, model: str, folder: Path, turns: int) -> tuple[Resumed, list[list[Asked]]]:
    """Have an agent work, kill everything, and have it go on: what that took, and what it asked, by turn."""
    home, place = folder / "home", folder / "work"
    for each in (home, place):
        each.mkdir(parents=True)
    (place / "notes.txt").write_text("Monday: rain. Tuesday: fog. Wednesday: the ferry came late.\n")
    recorder, server = Recorder(), Ours(model, folder / "store")
    modules = modules_of(agent)
    for name, text in agent.files(recorder.url).items():
        (place / name).write_text(text)
    conversation, asked = str(uuid.uuid4()), []

    def turn(number: int) -> None:
        recorder.target, before = server.url, len(recorder.asked)
        words = agent.command(PROMPTS[number % len(PROMPTS)], number > 0, conversation)
        options = _codex_options(recorder.url) if agent.package == "@openai/codex" else []
        arguments = [each for word in words for each in (options if word == "$OPTIONS" else [word])]
        done = subprocess.run(
            [str(agent.program(modules)), *arguments],
            cwd=place,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "NO_PROXY": "127.0.0.1",
                **agent.environment(recorder.url),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
        if done.returncode:
            said = (done.stdout + done.stderr)[-2000:]
            raise RuntimeError(f"{agent.name} ended by {done.returncode}: {said}")
        asked.append(recorder.asked[before:])

    try:
        server.start()
        for number in range(turns):
            turn(number)
        last = _longest(server.requests())
        waited = server.until_written(last["session"])
        server.kill()
        server.start()
        turn(turns)
        now = _longest(server.requests())
    finally:
        server.kill()
        recorder.shutdown()
    usage = last["usage"]
    known = usage["prompt_tokens"] + usage["completion_tokens"]
    prompt = now["usage"]["prompt_tokens"]
    return Resumed(prompt, prompt - known, now["reuse"]["computed"], turns, waited), asked


def _longest(requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last request of the conversation: titles and the like are shorter."""
    most = max(each["usage"]["prompt_tokens"] for each in requests)
    return next(each for each in reversed(requests) if each["usage"]["prompt_tokens"] * 2 > most)


def replay(model: str, asked: Sequence[Sequence[Asked]]) -> int:
    """The prompt tokens that llama-server computes for the last turn, killed and started before it."""
    computed = 0
    for part in (asked[:-1], asked[-1:]):
        with Child("bench.resume", "llama-server") as child:
            url = str(child.ask("open", path=model))
            for each in (each for turn in part for each in turn):
                if "count_tokens" in each.path:
                    continue
                body = json.loads(each.body)
                # A reply is one word here; llama-server has no such limit where a client gives a large one.
                body.update({"stream": False})
                httpx.post(
                    url + each.path.partition("?")[0],
                    json=body,
                    headers={"authorization": "Bearer none"},
                    trust_env=False,
                    timeout=_PATIENCE,
                ).raise_for_status()
            computed = _read_by_peer(url)
    return computed


def resume(run: Run) -> Iterator[Figure]:
    """Tokens computed after a kill, against those that are new; and llama-server's on the same requests."""
    for agent in AGENTS:
        yield from _figures(agent, run)


def _figures(agent: Agent, run: Run) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as temporary, Watch() as watch:
        folder = Path(temporary)
        model = str(_toy(folder))
        found, asked = work(agent, model, folder, run.pick(4, 2))
    new, computed = float(found.new), float(found.computed)
    yield Figure(
        name=f"{agent.name}: tokens computed after a kill, {found.turns} turns, {found.prompt:,} tokens, "
        f"written after {found.waited:.2f} s",
        against="tokens that are new",
        unit="tokens",
        gauge=Gauge.GROWTH,
        pairs=Pairs((computed,), (new,)),
        target=at_most(1.05),
        machine=watch.machine,
    )
    with tempfile.TemporaryDirectory() as temporary, Watch() as watch:
        peer = float(replay(str(_toy(Path(temporary))), asked))
    yield Figure(
        name=f"{agent.name}: tokens computed after a kill",
        against="llama-server",
        unit="tokens",
        gauge=Gauge.COST,
        pairs=Pairs((computed,), (peer,)),
        target=at_least(1),
        machine=watch.machine,
    )


def _toy(folder: Path) -> Path:
    """The model, said to be trained on a context as long as agents need: llama-server allows no more."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.append(str(ROOT / "tests"))
    try:
        zoo = importlib.import_module("zoo")
    except ImportError as error:
        raise PeerMissingError(f"the toy models of tests/zoo are not here: {error}") from None
    path = Path(zoo.write("llama-brief", folder))
    data, name = bytearray(path.read_bytes()), b"llama.context_length"
    # A name, the type of a whole number, and the number.
    at = data.index(name) + len(name) + 4
    data[at : at + 4] = struct.pack("<I", _CTX)
    path.write_bytes(data)
    return path


main = Bench("resume", (resume,))
