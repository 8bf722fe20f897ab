"""`perdure launch`: the settings of every known client, in its environment and arguments only."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from cli.pty_user import piped
from decode.observed import open_toy
from homes import new_home
from perdure.cli.app import app
from perdure.ext.agents import agent_process
from perdure.ext.agents.agent_process import ReadingInTitle
from perdure.ext.agents.launch import CLIENTS
from server.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with open_toy(n_ctx=65_536, slots=2) as rt, live_server(rt) as server:
        yield server


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "perdure"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("client", CLIENTS)
def test_the_settings_of_a_client_name_the_server_and_the_true_context(
    client: str, server: LiveServer, home: Path
) -> None:
    shown = CliRunner().invoke(app, ["launch", client, "--print", "--url", server.url])
    assert shown.exit_code == 0, shown.exception
    assert server.url in shown.stdout
    if client != "openwebui":
        assert ("57344" if client == "copilot" else "65536") in shown.stdout
    assert files(home) == [], "nothing is written by showing"


def test_claude_codes_prompt_is_kept_stable(server: LiveServer, home: Path) -> None:
    shown = CliRunner().invoke(app, ["launch", "claude", "--print", "--url", server.url, "--key", "secret"])
    lines = shown.stdout.splitlines()
    assert "export CLAUDE_CODE_TOTAL_TOKENS_REMINDER=off" in lines
    assert "export CLAUDE_CODE_ATTRIBUTION_HEADER=0" in lines
    assert "export CLAUDE_CODE_AUTO_COMPACT_WINDOW=65536" in lines
    assert "export ANTHROPIC_AUTH_TOKEN=secret" in lines
    assert lines[-1] == "claude"


def program(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name which writes down what it was started with, and ends with 3."""
    out = folder / "started.json"
    path = folder / "bin" / name
    path.parent.mkdir()
    path.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\n"
        f"json.dump([sys.argv[1:], dict(os.environ)], open({str(out)!r}, 'w'))\nsys.exit(3)\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")
    return out


def test_a_client_is_started_with_its_settings_and_what_stands_behind_the_dashes(
    server: LiveServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = program(home, "codex", monkeypatch)
    ended = CliRunner().invoke(app, ["launch", "codex", "--url", server.url, "--", "exec", "--json", "Hi"])
    assert ended.exit_code == 3, "the exit code is the client's"
    arguments, environment = json.loads(out.read_text())
    assert arguments[-3:] == ["exec", "--json", "Hi"]
    assert f'model_providers.perdure.base_url="{server.url}/v1"' in arguments
    assert "model_context_window=65536" in arguments
    assert environment["PERDURE_KEY"] == "none"


def test_a_client_that_reads_files_gets_one_in_a_folder_of_our_own_and_it_can_be_deleted(
    server: LiveServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = program(home, "pi", monkeypatch)
    CliRunner().invoke(app, ["launch", "pi", "--url", server.url])
    _, environment = json.loads(out.read_text())
    written = Path(environment["PI_CODING_AGENT_DIR"]) / "models.json"
    assert written == home / "perdure" / "launch" / "pi" / "models.json"
    [model] = json.loads(written.read_text())["providers"]["perdure"]["models"]
    assert model["contextWindow"] == 65_536
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert CliRunner().invoke(app, ["launch", "pi", "--undo"]).exit_code == 0
    assert not written.exists()
    assert "nothing was written" in CliRunner().invoke(app, ["launch", "pi", "--undo"]).stdout


def test_cline_keeps_its_settings_and_its_history_apart(
    server: LiveServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = program(home, "cline", monkeypatch)
    CliRunner().invoke(app, ["launch", "cline", "--url", server.url, "--key", "secret", "--", "Fix it"])
    arguments, _ = json.loads(out.read_text())
    assert arguments[-1] == "Fix it"
    folder = Path(arguments[arguments.index("--data-dir") + 1])
    stored = json.loads((folder / "settings" / "providers.json").read_text())
    settings = stored["providers"][stored["lastUsedProvider"]]["settings"]
    assert (settings["baseUrl"], settings["contextWindow"]) == (f"{server.url}/v1", 65_536)
    assert settings["apiKey"] == "secret"
    assert files(home) == [
        "bin/cline",
        "perdure/launch/cline/settings/providers.json",
        "started.json",
    ]


def test_a_server_is_started_if_none_runs(
    zoo_path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And serves the next client too."""
    out = program(tmp_path, "codex", monkeypatch)
    environment = {
        **os.environ,
        "PERDURE_HOME": str(new_home(tmp_path / "home")),
        "PERDURE_PORT": "0",
        "PERDURE_CTX": "512",
        "OMP_NUM_THREADS": "1",
    }
    try:
        started = piped(
            environment, "", "launch", "codex", "--anyway", "--model", str(zoo_path("llama")), "--", "Hi"
        )
        assert started.returncode == 3, started.stderr
        server = json.loads(piped(environment, "", "ps", "--json").stdout)["server"]
        first, _ = json.loads(out.read_text())
        assert first[-1] == "Hi"
        assert f'model_providers.perdure.base_url="{server["address"]}/v1"' in first
        out.unlink()
        assert piped(environment, "", "launch", "codex", "--anyway").returncode == 3
        second, _ = json.loads(out.read_text())
        assert second == first[:-1]
    finally:
        piped(environment, "", "stop")


def test_open_webui_is_started_beside_the_server_and_leaves_nothing_where_it_was_called(
    server: LiveServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port would be the server's own, and its key lies in the folder where it is started."""
    out = program(home, "open-webui", monkeypatch)
    script = home / "bin" / "open-webui"
    script.write_text(script.read_text().replace("sys.argv[1:]", "[os.getcwd(), *sys.argv[1:]]"))
    CliRunner().invoke(app, ["launch", "openwebui", "--url", server.url, "--", "--port", "3100"])
    arguments, environment = json.loads(out.read_text())
    assert Path(arguments[0]) == home / "perdure" / "launch" / "openwebui"
    assert arguments[1:] == ["serve", "--host", "127.0.0.1", "--port", "3000", "--port", "3100"]
    assert environment["OPENAI_API_BASE_URL"] == f"{server.url}/v1"
    assert environment["ENABLE_PERSISTENT_CONFIG"] == "false"


def test_opencode_is_given_its_configuration_in_the_environment(server: LiveServer, home: Path) -> None:
    shown = CliRunner().invoke(app, ["launch", "opencode", "--print", "--url", server.url]).stdout
    line = next(line for line in shown.splitlines() if "OPENCODE_CONFIG_CONTENT" in line)
    config = json.loads(shlex.split(line)[1].partition("=")[2])
    [model] = config["provider"]["perdure"]["models"].values()
    assert model["limit"] == {"context": 65_536, "output": 8192}
    assert config["provider"]["perdure"]["options"]["baseURL"] == f"{server.url}/v1"


def test_what_is_missing_is_said(server: LiveServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = CliRunner().invoke(app, ["launch", "nobody", "--url", server.url])
    assert "is not known here" in str(unknown.exception)
    monkeypatch.setenv("PATH", str(home))
    absent = CliRunner().invoke(app, ["launch", "claude", "--url", server.url])
    assert "claude is not installed: `npm install -g @anthropic-ai/claude-code`" in str(absent.exception)
    monkeypatch.undo()
    monkeypatch.setenv("PERDURE_HOME", str(home / "perdure"))
    nobody = CliRunner().invoke(app, ["launch", "claude", "--print"])
    assert "no server runs" in str(nobody.exception)


def test_a_client_whose_first_prompt_does_not_fit_is_not_started(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would compact in circles."""
    out = program(home, "opencode", monkeypatch)
    with open_toy(n_ctx=2048, slots=2) as rt, live_server(rt) as small:
        refused = CliRunner().invoke(app, ["launch", "opencode", "--url", small.url])
        assert "21,516 tokens" in str(refused.exception)
        assert "a context of 2,048" in str(refused.exception)
        assert "--ctx 22028" in str(refused.exception)
        assert not out.exists()
        assert CliRunner().invoke(app, ["launch", "opencode", "--url", small.url, "--anyway"]).exit_code == 3
        assert out.exists()


_WITH_A_CHILD = """#!/usr/bin/env python3
import os, signal, subprocess, sys, time
if {deaf}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
with open({out!r} + ".new", "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
os.rename({out!r} + ".new", {out!r})
child.wait()
time.sleep(120)
"""


def _wait(until: Callable[[], bool], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("deaf", [False, True], ids=["hearing", "deaf"])
def test_an_agent_and_what_it_started_end_with_launch(
    deaf: bool, server: LiveServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = home / "pids"
    script = program(home, "codex", monkeypatch).parent / "bin" / "codex"
    script.write_text(_WITH_A_CHILD.format(out=str(out), deaf=deaf))
    command = [sys.executable, "-m", "perdure.cli", "launch", "codex", "--url", server.url]
    running = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    _wait(out.exists, seconds=60)
    pids = [int(pid) for pid in out.read_text().split()]
    running.terminate()
    assert running.wait(30) != 0
    _wait(lambda: not any(psutil.pid_exists(pid) for pid in pids), seconds=10)


def test_the_title_of_the_terminal_says_how_much_of_the_first_prompt_is_read() -> None:
    """Bytes that a terminal takes as its title, and shows nowhere else."""
    counts = iter([None, 1024, 3072])
    drained = threading.Event()

    def tokens_read() -> int | None:
        count = next(counts, None)
        if count == 3072:
            drained.set()
        return count

    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent_process, "_LOOK", 0.01)
        patch.setattr(sys, "stderr", file)
        with ReadingInTitle("codex", 26_315, tokens_read):
            assert drained.wait(10)
            time.sleep(0.1)
    written = os.read(controller, 4096).decode()
    os.close(controller)
    titles = re.findall("\x1b\\]2;(.*?)\x07", written)
    assert titles == [
        "codex: 1,024 of about 26,315 tokens read",
        "codex: 3,072 of about 26,315 tokens read",
        "",
    ]
