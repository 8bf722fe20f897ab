"""What is said when something is wrong outside of the request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.pty_user import COMMAND, PATIENCE, piped
from homes import new_home
from perdure.cli.peer_options import advice_for, plain_options


@pytest.fixture
def environment(zoo_path: Callable[[str], Path], tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PERDURE_HOME": str(new_home(tmp_path / "home")),
        "PERDURE_MODEL": str(zoo_path("llama")),
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "hello", "-n", "2"),
        ("chat", "--session", "a"),
        ("config", "set", "ctx", "9"),
        ("sessions", "ls"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_home_that_cannot_be_written_is_told_with_its_path(
    environment: dict[str, str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """A file where the folder should be: root may write everywhere else."""
    (tmp_path / "file").write_text("")
    home = str(tmp_path / "file" / "home")
    done = piped({**environment, "PERDURE_HOME": home}, "hello\n", *arguments)
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    assert done.stderr.startswith("perdure: ")
    assert home in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told(environment: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "run", "hello", "-n", "2"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "full: make room and try again" in done.stderr


STARTED = """
import sys
wanted = sys.argv[1]
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            print("now", flush=True)
            import threading
            threading.Event().wait(60)
sys.meta_path.insert(0, Watch())
sys.argv = ["perdure", "run", "hello"]
from perdure.cli import main
main()
"""


@pytest.mark.parametrize("module", ["perdure.cli.app", "perdure.runtime", "numpy", "perdure.engine"])
def test_ctrl_c_during_the_start_leaves_without_a_traceback(environment: dict[str, str], module: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTED, module],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == b"now\n"
        running.send_signal(signal.SIGINT)
        assert running.wait(PATIENCE) == 130
        assert running.stderr.read() == b""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--temp", "0", "hello"], "--temp is called --temperature here"),
        (["run", "--ctx-size=99", "hello"], "--ctx-size is called --ctx here"),
        (["run", "-p", "hello"], '-p: the prompt needs no option: perdure run "PROMPT"'),
        (["chat", "-ngl", "99"], "-ngl is called --gpu-layers here"),
        (["serve", "-np", "4"], "-np is called --slots here"),
        (["start", "-np", "4"], "-np is called --slots here"),
    ],
)
def test_options_of_other_programs_are_answered_with_ours(
    environment: dict[str, str], arguments: list[str], said: str
) -> None:
    done = piped(environment, "", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"perdure: {said}")


def test_underscores_in_options_are_dashes_and_texts_stay_as_they_are() -> None:
    words = ["run", "--max_tokens=3", "--top_k", "1", "a_b", "--", "--x_y"]
    assert plain_options(words) == ["run", "--max-tokens=3", "--top-k", "1", "a_b", "--", "--x_y"]
    assert advice_for(["--", "--temp"], frozenset()) is None
    assert advice_for(["-p", "80"], frozenset({"-p"})) is None


def test_no_option_of_ours_is_taken_for_one_of_others() -> None:
    import typer

    from perdure.cli.app import app

    def check(command: object) -> None:
        options = [name for option in getattr(command, "params", ()) for name in option.opts]
        assert advice_for(options, frozenset(options)) is None
        for each in getattr(command, "commands", {}).values():
            check(each)

    check(typer.main.get_command(app))
