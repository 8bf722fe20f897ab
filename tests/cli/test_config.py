"""Settings: the config file, the environment, options, and where files are."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.pty_user import piped
from homes import new_home
from perdure.config import SETTINGS, choices, config_file, settings
from perdure.errors import InvalidInputError
from perdure.sessions.sessions import Sessions


@pytest.fixture
def environment(zoo_path: Callable[[str], Path], tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PERDURE_HOME": str(new_home(tmp_path)),
        "PERDURE_MODEL": str(zoo_path("llama")),
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
    }


def test_a_setting_is_an_option_else_the_environment_else_the_file(
    environment: dict[str, str], tmp_path: Path
) -> None:
    assert piped(environment, "", "config", "path").stdout == f"{tmp_path / 'config.toml'}\n"
    done = piped(environment, "", "config", "set", "max_tokens", "5")
    assert (done.returncode, done.stdout) == (0, f"max_tokens is 5 from now on, by {tmp_path}/config.toml\n")

    def written(*options: str, **variables: str) -> int:
        done = piped(environment | variables, "", "run", "hello", "--json", "--temperature", "0", *options)
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["usage"]["completion_tokens"])

    assert written() == 5
    assert written(PERDURE_MAX_TOKENS="4") == 4
    assert written("-n", "3", PERDURE_MAX_TOKENS="4") == 3


def test_show_says_where_each_setting_came_from(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("# mine\ntemperature = 0.5\nport = 9000\n")
    environment["PERDURE_PORT"] = "9001"
    shown = piped(environment, "", "config", "show").stdout
    assert f"temperature         0.5  (from {tmp_path}/config.toml)\n" in shown
    assert "port                9001  (from PERDURE_PORT)\n" in shown
    assert (
        "ctx                 4096  (default; context size: tokens of prompt and reply together; auto: as "
        "many as fit; PERDURE_CTX)\n" in shown
    )
    assert "strict              false  (default; " in shown
    assert piped(environment, "", "config", "get", "seed").stdout.startswith(
        "seed                a new one each time"
    )
    facts = json.loads(piped(environment, "", "config", "show", "--json").stdout)
    assert facts["port"] == {"value": 9001, "origin": "PERDURE_PORT"}
    assert piped(environment, "", "config", "unset", "temperature").returncode == 0
    assert (tmp_path / "config.toml").read_text() == "# mine\nport = 9000\n"
    assert piped(environment, "", "config", "unset", "temperature").returncode == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temprature = 1", "there is no setting 'temprature'; did you mean temperature?"),
        ("ctx = 'many'", "ctx is a whole number or auto, got 'many'"),
        ("ctx = 1.5", "ctx is a whole number or auto, got 1.5"),
        ("seed = true", "seed is a whole number, got True"),
        ("strict = 1", "strict is true or false, got 1"),
        ("cors = [1]", "cors is a list of texts, got [1]"),
        ("ctx = ", "is not TOML"),
    ],
)
def test_a_wrong_file_is_told_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(InvalidInputError) as raised:
        choices()
    assert said in str(raised.value)
    assert str(tmp_path / "config.toml") in str(raised.value)


def test_texts_of_the_environment_stand_for_every_kind_of_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text('cors = ["https://a.example"]\nstrict = true\ngpu_layers = 20\n')
    found = {name: choice.value for name, choice in choices().items()}
    assert (found["cors"], found["strict"], found["gpu_layers"]) == (["https://a.example"], True, 20)
    monkeypatch.setenv("PERDURE_CORS", "https://a.example, https://b.example")
    monkeypatch.setenv("PERDURE_STRICT", "off")
    found = {name: choice.value for name, choice in choices().items()}
    assert (found["cors"], found["strict"]) == (["https://a.example", "https://b.example"], False)


def test_a_wrong_file_stops_commands_and_can_still_be_found(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text("ctx = ")
    done = piped(environment, "", "run", "hello")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"perdure: the config file {tmp_path}/config.toml is not TOML")
    assert piped(environment, "", "config", "path").returncode == 0


def test_the_store_and_the_model_of_the_file_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PERDURE_MODEL", raising=False)
    monkeypatch.setenv("PERDURE_CONFIG", str(tmp_path / "mine.toml"))
    assert config_file() == tmp_path / "mine.toml"
    (tmp_path / "mine.toml").write_text('model = "me/it"\nstore = "/somewhere"\n')
    assert (settings().model, settings().store) == ("me/it", Path("/somewhere"))


def test_without_a_home_the_file_is_where_others_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PERDURE_HOME", "PERDURE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert config_file() == tmp_path / "perdure" / "config.toml"


def test_every_setting_is_an_option_of_some_command() -> None:
    """A setting that no command has would be obeyed by nobody."""
    import typer

    from perdure.cli.app import app

    def options(command: object) -> set[str]:
        own = {str(option.name) for option in getattr(command, "params", ())}
        return own.union(*(options(each) for each in getattr(command, "commands", {}).values()))

    # `engine` is read when a library is first fetched (tests/engine/test_source.py).
    assert {setting.name for setting in SETTINGS} - {"engine"} <= options(typer.main.get_command(app))


def test_paths_lists_what_is_where(environment: dict[str, str], tmp_path: Path) -> None:
    facts = json.loads(piped(environment, "", "paths", "--json").stdout)
    assert facts["store"] == str(tmp_path / "store")
    assert set(facts) == {"config", "home", "models", "engines", "store", "history"}
    assert f"models   {tmp_path}/models  (not there yet)\n" in piped(environment, "", "paths").stdout


def test_models_are_pulled_listed_shown_and_removed_by_short_names(environment: dict[str, str]) -> None:
    path = environment["PERDURE_MODEL"]
    assert piped(environment, "", "pull").stdout == f"{path}\n"
    assert "smollm2-135m-instruct" in piped(environment, "", "ls").stdout
    assert "architecture" in piped(environment, "", "show", path).stdout
    done = piped(environment, "", "rm", path, "--yes")
    assert done.returncode == 1
    assert "was not fetched by perdure" in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_complete_commands(environment: dict[str, str], shell: str) -> None:
    done = piped({**environment, "_PERDURE_COMPLETE": f"source_{shell}"}, "")
    assert done.returncode == 0, done.stderr
    assert "_PERDURE_COMPLETE" in done.stdout


def test_a_shell_is_told_the_commands_that_begin_with_a_word(environment: dict[str, str]) -> None:
    asked = {"_PERDURE_COMPLETE": "complete_bash", "COMP_WORDS": "perdure se", "COMP_CWORD": "1"}
    assert piped(environment | asked, "").stdout.split() == ["serve", "sessions"]


PRESSED = """
eval "$SCRIPT"
COMP_WORDS=({words} {begun})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
COMP_LINE="${{COMP_WORDS[*]}}"
COMP_POINT=${{#COMP_LINE}}
found=$(complete -p perdure | sed -E 's/.* -F ([^ ]+) .*/\\1/')
$found perdure {begun} perdure
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_the_names_of_sessions_and_models(environment: dict[str, str], tmp_path: Path) -> None:
    """As the shell does it when Tab is pressed, by the script that `perdure` gives it."""
    for folder, names in ((tmp_path / "store", ("work", "wood", "two words")), (tmp_path / "b", ("web",))):
        with Sessions(folder) as sessions:
            for name in names:
                sessions.open(name)
    command = tmp_path / "bin" / "perdure"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m perdure.cli "$@"\n')
    command.chmod(0o755)
    script = piped({**environment, "_PERDURE_COMPLETE": "source_bash"}, "").stdout
    shell = {**environment, "PATH": f"{command.parent}:{environment['PATH']}", "SCRIPT": script}

    def pressed(words: str, begun: str) -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", PRESSED.format(words=words, begun=begun)],
            env=shell,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    assert pressed("perdure chat --session", "wo") == ["wood", "work"]
    assert pressed(f"perdure run --store {tmp_path / 'b'} --session", "w") == ["web"]
    assert pressed("perdure sessions rm work", "w") == ["wood"]
    assert pressed("perdure run", "smollm2-135m-i") == ["smollm2-135m-instruct"]
    assert pressed("perdure run hello", "smol") == []
    # A store that cannot be read is no reason to write over the prompt.
    (tmp_path / "store" / "sessions.sqlite").write_text("nonsense")
    assert pressed("perdure chat --session", "wo") == []


def test_help_shows_the_defaults_of_sampling(environment: dict[str, str]) -> None:
    for command in ("run", "chat"):
        shown = piped(environment, "", command, "--help").stdout
        for option, default in (("--temperature", "0.8"), ("--top-k", "40"), ("--min-p", "0.05")):
            # Long texts go on in the next lines, which are indented.
            [text] = re.findall(rf"^  (?:-\w, )?{option} .*\n(?: {{10,}}.*\n)*", shown, re.MULTILINE)
            assert f"[default: {default}]" in " ".join(text.split())
