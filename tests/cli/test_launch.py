"""`perdure launch`: the settings of every known client, in its environment and arguments only."""

from __future__ import annotations

import json
import os
import shlex
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.pty_user import piped
from decode.observed import open_toy
from homes import new_home
from perdure.cli.app import app
from perdure.cli.commands.agents.launch import CLIENTS
from server.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with open_toy(n_ctx=4096, slots=2) as rt, live_server(rt) as server:
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
        assert ("3072" if client == "copilot" else "4096") in shown.stdout
    assert files(home) == [], "nothing is written by showing"


def test_claude_codes_prompt_is_kept_stable(server: LiveServer, home: Path) -> None:
    shown = CliRunner().invoke(app, ["launch", "claude", "--print", "--url", server.url, "--key", "secret"])
    lines = shown.stdout.splitlines()
    assert "export CLAUDE_CODE_TOTAL_TOKENS_REMINDER=off" in lines
    assert "export CLAUDE_CODE_ATTRIBUTION_HEADER=0" in lines
    assert "export CLAUDE_CODE_AUTO_COMPACT_WINDOW=4096" in lines
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
    assert "model_context_window=4096" in arguments
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
    assert model["contextWindow"] == 4096
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
    assert (settings["baseUrl"], settings["contextWindow"]) == (f"{server.url}/v1", 4096)
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
        started = piped(environment, "", "launch", "codex", "--model", str(zoo_path("llama")), "--", "Hi")
        assert started.returncode == 3, started.stderr
        server = json.loads(piped(environment, "", "ps", "--json").stdout)["server"]
        first, _ = json.loads(out.read_text())
        assert first[-1] == "Hi"
        assert f'model_providers.perdure.base_url="{server["address"]}/v1"' in first
        out.unlink()
        assert piped(environment, "", "launch", "codex").returncode == 3
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
    assert model["limit"] == {"context": 4096, "output": 1024}
    assert config["provider"]["perdure"]["options"]["baseURL"] == f"{server.url}/v1"


def test_what_is_missing_is_said(server: LiveServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = CliRunner().invoke(app, ["launch", "nobody", "--url", server.url])
    assert "is not known here" in str(unknown.exception)
    monkeypatch.setenv("PATH", str(home))
    absent = CliRunner().invoke(app, ["launch", "claude", "--url", server.url])
    assert "claude is not installed" in str(absent.exception)
    monkeypatch.undo()
    monkeypatch.setenv("PERDURE_HOME", str(home / "perdure"))
    nobody = CliRunner().invoke(app, ["launch", "claude", "--print"])
    assert "no server runs" in str(nobody.exception)
