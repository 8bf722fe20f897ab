"""`perdure models` and `perdure inspect`, as a user runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import gguf_bytes as g
from cli.pty_user import piped
from perdure.sessions.sessions import Sessions
from serving import put_repo, site

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        home = {"PERDURE_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1", "COLUMNS": "200"}
        return piped({**os.environ, **home, **environment}, None, *arguments)

    return start


@pytest.fixture
def fetched(tmp_path: Path) -> Path:
    """A model that looks fetched from a hub."""
    path = tmp_path / "models" / "hub" / "me" / "it" / "a.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(g.tiny())
    return path


def test_the_version_is_shown(run: Run) -> None:
    assert run("--version").stdout == "perdure 0.1.0\n"


def test_help_lists_the_commands(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    shown = set(re.findall(r"^\W*(\w+)  ", done.stdout, re.MULTILINE))
    assert shown >= {"run", "chat", "serve", "pull", "ls", "show", "rm", "sessions", "config"}


@pytest.mark.parametrize("arguments", [["nonsense"], ["models", "rm"], ["inspect", "--nonsense", "x"]])
def test_wrong_usage_exits_with_2(arguments: list[str], run: Run) -> None:
    assert run(*arguments).returncode == 2


def test_what_cannot_be_done_exits_with_1_and_says_why(run: Run, tmp_path: Path) -> None:
    done = run("inspect", str(tmp_path / "none.gguf"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"perdure: there is no file {tmp_path / 'none.gguf'}\n"


HEAVY = {"llama_cpp", "huggingface_hub", "fastapi", "jinja2", "perdure.backend"}
SMALL = {
    "['--help']": {"numpy", *HEAVY},
    "['sessions', 'ls']": {"numpy", *HEAVY},
    "['models', 'list']": HEAVY,
    "['inspect', sys.argv[1]]": HEAVY,
}
"""What commands do without."""


@pytest.mark.parametrize("arguments", SMALL)
def test_the_engine_is_not_loaded_for_small_commands(arguments: str, tmp_path: Path, fetched: Path) -> None:
    with Sessions(tmp_path / "store"):
        pass
    code = f"""
import sys
arguments = {arguments}
sys.argv = ["perdure", *arguments]
from perdure.cli import main
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
heavy = {SMALL[arguments]} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run(
        [sys.executable, "-c", code, str(fetched)],
        env={**os.environ, "PERDURE_HOME": str(tmp_path)},
        check=True,
        stdout=subprocess.DEVNULL,
    )


def test_the_list_shows_what_is_here_and_what_could_be(run: Run, fetched: Path) -> None:
    shown = run("models", "list").stdout
    assert "smollm2-135m-instruct (default, smollm2)" in shown
    assert "98.4 MB" in shown
    assert str(fetched) in shown
    entries = json.loads(run("models", "list", "--json").stdout)
    assert [(entry["name"], entry["present"]) for entry in entries] == [
        ("smollm2-135m-instruct", False),
        ("hf:me/it/a.gguf", True),
    ]
    assert entries[1]["bytes"] == fetched.stat().st_size


def test_a_name_from_the_list_can_be_inspected(run: Run, fetched: Path) -> None:
    assert json.loads(run("inspect", "hf:me/it/a.gguf", "--json").stdout)["path"] == str(fetched)


HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31mred"


def test_no_model_file_sends_a_terminal_anything_to_obey(run: Run, tmp_path: Path) -> None:
    """Its name, its metadata and its template are somebody else's."""
    path = tmp_path / "hostile.gguf"
    extra = [g.text("a.text", HOSTILE), g.text("tokenizer.chat_template", f"{HOSTILE}{{{{ messages }}}}")]
    path.write_bytes(g.tiny(extra).replace(g.string("Tiny"), g.string("T\x1b[H")))
    for arguments in (["inspect", str(path)], ["inspect", str(path), "--metadata"]):
        done = run(*arguments)
        assert done.returncode == 0
        assert "31mred" in done.stdout
        assert not set("\x1b\x07\x9b") & set(done.stdout)


def test_no_error_sends_a_terminal_anything_to_obey(run: Run) -> None:
    done = run("inspect", f"no{HOSTILE}.gguf")
    assert done.returncode == 1
    assert "31mred" in done.stderr
    assert not set("\x1b\x07\x9b") & set(done.stderr)


def test_pull_fetches_and_prints_the_path(run: Run, tmp_path: Path) -> None:
    with site() as hub:
        put_repo(hub, "me/it", {"a.gguf": g.tiny(data=bytes(500_000))})
        done = run("models", "pull", "me/it", HF_ENDPOINT=hub.url)
    path = tmp_path / "models" / "hub" / "me" / "it" / "a.gguf"
    assert (done.returncode, done.stdout) == (0, f"{path}\n")
    lines = done.stderr.splitlines()
    assert lines[0] == f"Fetching me/it: 0 bytes of {path.stat().st_size / 1000:.1f} kB"
    assert 2 <= len(lines) <= 12
    assert "\x1b" not in done.stderr


def test_ctrl_c_during_a_pull_exits_with_130_and_keeps_the_part(tmp_path: Path) -> None:
    with site() as hub:
        put_repo(hub, "me/it", {"a.gguf": g.tiny(data=bytes(500_000))})
        hub.pages["/me/it/resolve/main/a.gguf"].hold = threading.Event()
        with subprocess.Popen(
            [sys.executable, "-m", "perdure.cli", "models", "pull", "me/it"],
            env={
                **os.environ,
                "PERDURE_HOME": str(tmp_path),
                "NO_PROXY": "127.0.0.1",
                "HF_ENDPOINT": hub.url,
            },
            stderr=subprocess.PIPE,
            text=True,
        ) as pulling:
            assert pulling.stderr is not None
            for line in pulling.stderr:
                if line.startswith("Fetching me/it: 2"):
                    break
            pulling.send_signal(signal.SIGINT)
            assert pulling.wait(30) == 130
            assert "Traceback" not in pulling.stderr.read()
    (part,) = tmp_path.rglob("a.gguf.part")
    assert part.stat().st_size > 200_000


def test_pull_of_something_that_is_no_model_fails(run: Run) -> None:
    with site() as hub:
        put_repo(hub, "me/it", {"a.gguf": b"<html>"})
        done = run("models", "pull", "me/it", HF_ENDPOINT=hub.url)
    assert done.returncode == 1
    assert "begins with b'<htm'" in done.stderr


def test_rm_asks_first(run: Run, fetched: Path) -> None:
    assert run("models", "rm", "hf:me/it/a.gguf").returncode == 1
    assert fetched.exists()
    done = run("models", "rm", "hf:me/it/a.gguf", "--yes")
    assert done.returncode == 0
    assert str(fetched) in done.stdout
    assert not fetched.parent.exists()


def test_rm_leaves_the_users_own_files_alone(run: Run, fetched: Path) -> None:
    done = run("models", "rm", str(fetched), "--yes")
    assert done.returncode == 1
    assert "delete the file yourself" in done.stderr
    assert fetched.exists()


def test_rm_of_what_is_not_here_says_so(run: Run) -> None:
    done = run("models", "rm", "default", "--yes")
    assert done.returncode == 1
    assert "nothing to remove" in done.stderr


def test_inspect_shows_the_figures(run: Run, fetched: Path) -> None:
    fetched.write_bytes(g.tiny([g.text("tokenizer.chat_template", "[bold]{{ messages }}[/bold]")]))
    shown = run("inspect", str(fetched)).stdout
    for expected in (
        "llama",
        "Tiny",
        "128 tokens",
        "4 (2 for K/V)",
        "full",
        "64 bytes a token",
        "F32",
        "100.0%",
    ):
        assert expected in shown
    assert "[bold]{{ messages }}[/bold]" in shown
    assert "a.u16 = 60000" in run("inspect", str(fetched), "--metadata").stdout


def test_inspect_as_json_has_all_metadata(run: Run, fetched: Path) -> None:
    fetched.write_bytes(g.tiny([g.strings("long", ["x"] * 100), g.number("nan", g.F32, float("nan"))]))
    shown = json.loads(run("inspect", str(fetched), "--json").stdout)
    assert shown["memory"] == "full"
    assert shown["types"] == [{"type": "F32", "tensors": 2, "elements": 64, "bytes": 256}]
    assert shown["metadata"]["a.u64"] == 2**63
    assert shown["metadata"]["tokenizer.ggml.tokens"] == ["<s>", "", "é🙂"]
    assert shown["metadata"]["long"] == {"length": 100, "first": ["x"] * 8}
    assert shown["metadata"]["nan"] == "nan"
