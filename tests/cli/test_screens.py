"""`perdure chat` and `run` on screens of 80×24 and 120×40, as somebody sees them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.pty_user import terminal, terminal_environment
from cli.screens import screen

SIZES = pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40)])
TESTS = Path(__file__).parent.parent
TEXT = (
    "The sky is blue, since air scatters short waves **most of all**; at sunset light has a long way to go, "
    "and what is left of it is `red`."
)


@pytest.fixture
def environment(zoo_path: Callable[[str], Path], tmp_path: Path) -> dict[str, str]:
    return terminal_environment(zoo_path("llama"), tmp_path / "home", term="xterm-256color")


@pytest.fixture
def told(tmp_path: Path) -> tuple[str, ...]:
    """Options that make every reply the text above, in quotes."""
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"const": TEXT}))
    return "--schema", str(path), "--ctx", "1024", "-t", "0"


def plain_words() -> list[str]:
    return f'"{TEXT}"'.replace("**", "").replace("`", "").split()


def words_of(lines: list[str]) -> list[str]:
    return [word for line in lines for word in line.split()]


@SIZES
def test_a_chat_from_its_greeting_to_its_end(
    environment: dict[str, str], told: tuple[str, ...], columns: int, rows: int
) -> None:
    with terminal(environment, "chat", *told, columns=columns, rows=rows) as user:
        user.until("> ")
        lines = screen(user, columns, rows)
        assert lines[0] == "llama.gguf. /help lists what else can be typed, Ctrl-D leaves."
        assert lines[1] == "This conversation is not kept; /keep NAME keeps it."
        user.type("Why is the sky blue?\r")
        user.until("red.*\n.*> ")
        lines = screen(user, columns, rows)
        asked = lines.index("> Why is the sky blue?")
        # Each word is whole: none is cut where a line ends.
        assert words_of(lines[asked + 1 : -1]) == plain_words()
        assert all(len(line) <= columns for line in lines)
        assert lines[-1] == ">"
        user.type("/quit\r")
        user.until("to discard: ")
        last = screen(user, columns, rows)[-1]
        assert last == "This conversation (1 turn) is not saved. Name to save it under, or n to discard:"
        user.type("n\r")
        assert user.leaves() == 0


@SIZES
def test_a_kept_chat_with_help_several_lines_a_search_and_keys_pressed_early(
    environment: dict[str, str], told: tuple[str, ...], columns: int, rows: int
) -> None:
    with terminal(environment, "chat", *told, "--session", "s", columns=columns, rows=rows) as user:
        user.until("s> ")
        user.type("/help\r")
        user.until("Alt-Enter.*s> ")
        check_table(screen(user, columns, rows))
        # Typed line by line.
        user.type("one\x1b\r")
        user.until("… ")
        user.type("two\r")
        user.until("red.*\n.*s> ")
        lines = screen(user, columns, rows)
        at = lines.index("… two")
        assert lines[at - 1] == "s> one\\"
        assert words_of(lines[at + 1 : -1]) == plain_words()
        # Pasted: nothing is sent before Enter.
        user.paste("three\n  four\nfive")
        user.wait_for(lambda: screen(user, columns, rows)[-3:] == ["s> three", "  four", "five"])
        user.type("\r")
        user.until("sky")
        # Typed while a reply is shown: it comes after it.
        user.type("a needle in here\r")
        user.until("red.*a needle.*red.*\n.*s> ")
        lines = screen(user, columns, rows)
        pasted, early = lines.index("five"), lines.index("s> a needle in here")
        assert words_of(lines[pasted + 1 : early]) == plain_words()
        assert words_of(lines[early + 1 : -1]) == plain_words()
        user.type("/history\r")
        user.until("3  assistant.*s> ")
        lines = screen(user, columns, rows)
        at = lines.index("2  user: three")
        assert lines[at + 1 : at + 3] == ["      four", "    five"]
        assert all(len(line) <= columns for line in lines)
        # Searched for.
        user.type("\x12need")
        found = "(reverse-i-search)`need': a needle in here"
        user.wait_for(lambda: screen(user, columns, rows)[-1] == found)
        user.type("\r")
        user.until("red.*\n.*s> ")
        assert screen(user, columns, rows).count("s> a needle in here") == 2
        user.type("\x04")
        assert user.leaves() == 0


def check_table(lines: list[str]) -> None:
    """Two columns, whose second breaks between words and stays one."""
    table = lines[lines.index("s> /help") + 1 : -1]
    [second] = {line.index(line.split("  ", 1)[1].lstrip()) for line in table if not line.startswith(" ")}
    for line in table:
        assert line.startswith((" " * second, "/", "Ctrl", "Alt"))
        assert not line[second - 2 : second].strip()


@SIZES
def test_tables_and_errors_break_between_words(environment: dict[str, str], columns: int, rows: int) -> None:
    """Paths, which people copy, stay whole; second columns stay columns."""
    model = environment.pop("PERDURE_MODEL")
    environment["PERDURE_STORE"] = "/somewhere"
    lines = (
        f"'{sys.executable}' -m perdure.cli config show; '{sys.executable}' -m perdure.cli show '{model}x'"
    )
    with terminal(environment, command=["sh", "-c", lines], columns=columns, rows=rows) as user:
        assert user.leaves() == 1
    settings, _, error = "\n".join(screen(user, columns, rows)).partition("perdure: ")
    for line in settings.splitlines():
        assert len(line) < columns
        assert re.match(r"[a-z_]+ +(?<=.{20})\S| {20}\S", line), line
    assert "  (default; divides the logits;" in settings
    assert f"{model}x" in error.split()


READING = """
import sys
import perdure
from decode.observed import Turnstile
from perdure.cli.output import progress, terminal
from perdure.testing.toy import Faults, ToyModel

gate = Turnstile()
with perdure.open(ToyModel(faults=Faults(gate=gate)), n_ctx=4096, n_batch=512, slots=1, stall=0) as rt:
    job = rt.submit([65] * 3000, max_tokens=1, ignore_eos=True)
    with terminal.keys_held_back(), progress.reading(job) as begun:
        for tokens in (1100, 10_000):
            sys.stdin.readline()
            gate.admit(tokens)
        job.reply()
        begun()
print("answered", flush=True)
"""


@SIZES
def test_a_long_prompt_is_counted_while_it_is_read(
    environment: dict[str, str], columns: int, rows: int
) -> None:
    command = [sys.executable, "-c", READING]
    within = {**environment, "PYTHONPATH": str(TESTS)}
    with terminal(within, command=command, columns=columns, rows=rows) as user:
        user.until("Reading the prompt: 3,000 tokens")
        user.type("\n")
        user.until("1,024 of 3,000 tokens")
        [line] = [line for line in screen(user, columns, rows) if "Reading" in line]
        assert "Reading the prompt: 1,024 of 3,000 tokens 0:00:" in line
        user.type("\n")
        user.until("answered")
        # What is no longer true is gone from the screen.
        assert screen(user, columns, rows)[-1] == "answered"
        assert not any("Reading" in line for line in screen(user, columns, rows))
        assert user.leaves() == 0
