"""What is said when something is wrong outside of the request."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import perdure
from cli.pty_user import COMMAND, PATIENCE, piped
from homes import new_home
from perdure import engine
from perdure.cli.advice import in_options, with_options
from perdure.cli.app import advice_for, plain_options


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
    """A file where the folder should be: root may write everywhere else. A question needs no folder, if the
    library of another package is here."""
    (tmp_path / "file").write_text("")
    home = str(tmp_path / "file" / "home")
    done = piped({**environment, "PERDURE_HOME": home}, "hello\n", *arguments)
    assert "Traceback" not in done.stderr
    assert done.returncode == (0 if done.stdout and arguments[0] == "run" else 1)
    assert done.stderr.startswith("perdure: ")
    assert home in done.stderr


@pytest.mark.parametrize(
    ("arguments", "advised"),
    [
        (("sessions", "show", "a"), "`perdure chat --session NAME --store STORE` starts one"),
        (("run", "-c", "hello"), "`perdure run PROMPT --store STORE` starts one"),
        pytest.param(
            *(("cache", "stats"), "`perdure cache warm --store STORE` makes one"),
            marks=pytest.mark.extension("upkeep"),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_is_advised_is_for_the_store_in_use(
    environment: dict[str, str], tmp_path: Path, arguments: tuple[str, ...], advised: str
) -> None:
    store = str(tmp_path / "my sessions")
    done = piped(environment, "", *arguments, "--store", store)
    assert done.returncode == 1
    assert advised.replace("STORE", f"'{store}'") in done.stderr
    assert "--store" not in piped(environment, "", *arguments).stderr


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


def test_a_context_beyond_what_the_model_was_trained_on_is_told_by_our_option(
    environment: dict[str, str],
) -> None:
    done = piped(environment, "", "run", "hello", "-n", "2", "--ctx", "100000")
    assert done.returncode == 0
    assert re.fullmatch(
        r"perdure: llama\.gguf was trained on texts of up to \d+ tokens, and --ctx is 100000: .*\n",
        done.stderr,
    )


PLACE = """
mount -t tmpfs -o size=4m perdure-test "$HOME_HERE" || exit 99
cp -a "$SEED/." "$HOME_HERE/"
case "$KIND" in
    full) dd if=/dev/zero of="$HOME_HERE/filled" bs=4k 2>/dev/null; true;;
    read-only) mount -o remount,ro "$HOME_HERE";;
esac
exec "$@"
"""
"""A home on a separate disk, in a mount namespace of its own."""


def on_a_disk(
    kind: str, environment: dict[str, str], tmp_path: Path, text: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    home = tmp_path / "disk"
    home.mkdir(exist_ok=True)
    places = {"HOME_HERE": str(home), "SEED": environment["PERDURE_HOME"], "KIND": kind}
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", PLACE, "sh", *COMMAND, *arguments],
        env={**environment, **places, "PERDURE_HOME": str(home)},
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("this user may not mount a separate disk")
    return done


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs mount namespaces")
@pytest.mark.parametrize("kind", ["full", "read-only"])
@pytest.mark.parametrize(
    ("arguments", "answers"),
    [
        (("run", "hello", "-n", "2", "--temperature", "0"), True),
        (("chat", "--session", "a", "-n", "2"), False),
        (("config", "set", "ctx", "999"), False),
        pytest.param(("keys", "add", "team"), False, marks=pytest.mark.extension("keys")),
        (("start", "--port", "0"), False),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_a_disk_that_is_full_or_read_only_is_told_in_a_sentence(
    environment: dict[str, str], tmp_path: Path, arguments: tuple[str, ...], answers: bool, kind: str
) -> None:
    """What needs no disk works all the same."""
    done = on_a_disk(kind, environment, tmp_path, "hello\n", *arguments)
    assert "Traceback" not in done.stderr
    assert done.returncode == (0 if answers else 1), done.stderr
    if answers:
        assert done.stdout.strip()
    else:
        *_, last = done.stderr.splitlines()
        assert last.startswith("perdure: ")
        assert str(tmp_path / "disk") in last


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


LEAVING = """
import atexit, sys, threading, weakref
where = sys.argv[1]
def wait(word):
    print(word, flush=True)
    # In short waits: Python does not see a signal that comes just before one begins.
    for _ in range(1200):
        threading.Event().wait(0.05)
class Thing: pass
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            if where == "callback":
                thing = Thing()
                # Python's own locks of imports have such callbacks, in which nothing can be raised.
                callback = weakref.ref(thing, lambda _: wait("now"))
                del thing
            wait("now" if where == "exit" else "later")
sys.meta_path.insert(0, Watch())
if where == "exit":
    atexit.register(wait, "later")
sys.argv = ["perdure", "run", "hello"]
from perdure.cli import main
main()
"""


@pytest.mark.parametrize("where", ["exit", "callback"])
def test_y24_a_second_ctrl_c_during_the_start_leaves_without_a_traceback(
    environment: dict[str, str], where: str
) -> None:
    """Y24: while Python ends, and where the first one struck in a place that cannot raise."""
    with subprocess.Popen(
        [sys.executable, "-c", LEAVING, where],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == b"now\n"
        running.send_signal(signal.SIGINT)
        if where == "exit":
            assert running.stdout.readline() == b"later\n"
            running.send_signal(signal.SIGINT)
        assert running.wait(PATIENCE) == 130
        assert running.stderr.read() == b""


HELD = """
import sys, threading
wanted, part, *arguments = sys.argv[1:]
def hold(event, details):
    global wanted
    if event == wanted and part in str(details[0]):
        wanted = None
        print("now", flush=True)
        threading.Event().wait(60)
sys.addaudithook(hold)
sys.argv = ["perdure", *arguments]
from perdure.cli import main
main()
"""
MODEL_OPENED, LIBRARY_LOADED, CHILD_STARTED = (
    ("open", "llama.gguf"),
    ("ctypes.dlopen", "libllama"),
    ("subprocess.Popen", ""),
)


@pytest.mark.parametrize(
    ("moment", "arguments"),
    [
        (MODEL_OPENED, ("run", "hello", "--session", "a")),
        (MODEL_OPENED, ("chat", "--session", "a")),
        (MODEL_OPENED, ("serve", "--port", "0")),
        (CHILD_STARTED, ("start", "--port", "0")),
        pytest.param(LIBRARY_LOADED, ("doctor",), marks=pytest.mark.extension("machine")),
        pytest.param(
            *(("os.rename", ""), ("engine", "install", "--from", "LIBRARY")),
            marks=pytest.mark.extension("machine"),
        ),
    ],
    ids=lambda value: "-".join(word for word in value if not word.startswith("-")).replace("/", ""),
)
def test_ctrl_c_while_a_model_or_a_library_is_made_ready_leaves_nothing_half_done(
    environment: dict[str, str], tmp_path: Path, moment: tuple[str, str], arguments: tuple[str, ...]
) -> None:
    """Sent to all processes of the command, as a terminal does."""
    from perdure.engine.llama.native import library

    arguments = tuple(word.replace("LIBRARY", str(library.loaded().source.folder)) for word in arguments)
    if arguments[0] == "engine":
        environment["PERDURE_HOME"] = str(tmp_path / "bare")
    home = Path(environment["PERDURE_HOME"])
    with subprocess.Popen(
        [sys.executable, "-c", HELD, *moment, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        try:
            assert any(line == "now\n" for line in running.stdout)
            os.killpg(running.pid, signal.SIGINT)
            assert running.wait(PATIENCE) == 130
        finally:
            running.kill()
        assert [line for line in running.stderr if not line.startswith("Starting; ")] == []
    left = {file.name for file in home.rglob("*") if not file.is_dir() and file.suffix != ".lock"}
    # What was known before, who had the store, and what a server in the background said.
    assert left <= {"probes.json", "digests.json", "sessions.holder", "server.log"}


def test_nothing_slow_is_imported_before_the_command_hears_ctrl_c() -> None:
    """Until `main` runs, Python ends in a separate traceback. Modules that Python itself starts with cost
    nothing."""
    source = Path(perdure.__path__[0]).parent
    told = (
        f"import sys; sys.path.append({str(source)!r}); had = set(sys.modules); import perdure.cli; "
        "print(*sorted(set(sys.modules) - had))"
    )
    done = subprocess.run(
        # Without what the packages of this machine import at every start.
        [sys.executable, "-I", "-S", "-c", told],
        capture_output=True,
        text=True,
        check=True,
    )
    slow = {"typing", "re", "pathlib", "typer", "numpy"}
    assert not slow & set(done.stdout.split())


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


def test_advice_of_the_library_names_options_of_the_command() -> None:
    text = "33 layers take 20 GiB: choose gpu_layers=19, a smaller n_ctx, or kv_offload=False; my_n_ctx stays"
    assert with_options(text, []) == (
        "33 layers take 20 GiB: choose --gpu-layers=19, a smaller --ctx, or --no-kv-offload; my_n_ctx stays"
    )
    assert with_options("`perdure sessions ls`", ["--store", "x"]) == "`perdure sessions ls --store x`"


def test_what_the_engine_advises_is_told_in_options_of_the_command() -> None:
    """Every error and warning of the engine, as a command shows it: without a keyword of the library that an
    option has another name for."""
    names = "n_ctx|n_seq|[kv]_type|kv_type|gpu_layers|cpu_experts|tensor_split|force_kv"
    keyword = re.compile(rf"(?<![\w-])(?:{names})(?!\w)")
    told = 0
    for path in sorted(Path(engine.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) or (isinstance(node, ast.Attribute) and node.attr == "warning"):
                words = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                text = "".join(word for word in words if isinstance(word, str))
                told += bool(keyword.search(text))
                assert not keyword.search(in_options(text)), f"{path}:{node.lineno}"
    assert told > 5
