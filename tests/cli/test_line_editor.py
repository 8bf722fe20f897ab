"""Keys and signals at a prompt."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cli.pty_user import plain, terminal

UNNOTICED = """
import signal, sys, threading
from pathlib import Path
from perdure.cli.line_editor import LineEditor

def strike():
    # In another thread: the wait for a key goes on, as it does when a signal comes just before it begins.
    signal.raise_signal(signal.SIGINT)

def prompt():
    threading.Timer(0.2, strike).start()
    return "> "

for message in LineEditor(Path(sys.argv[1]), []).messages(prompt):
    print("had", message)
"""


def test_a_ctrl_c_that_the_wait_for_a_key_does_not_notice_is_heard_without_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNNOTICED, str(tmp_path / "history")]
    with terminal(dict(os.environ), command=command) as user:
        for _ in range(3):
            user.until("> \nCtrl-D or /quit leaves.\n")


BUSY = """
import select, sys
from pathlib import Path
from perdure.cli.line_editor import LineEditor

for message in LineEditor(Path(sys.argv[1]), []).messages(lambda: "> "):
    print("had", message, flush=True)
    # Until there is something to read, which is left for the next prompt.
    select.select([0], [], [])
    print("done", flush=True)
"""


def test_keys_pressed_between_two_prompts_are_shown_after_the_second_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUSY, str(tmp_path / "history")]
    with terminal(dict(os.environ), command=command) as user:
        user.until("> ")
        user.type("one\r")
        user.until("had one\n")
        user.type("two\r")
        assert plain(user.until("had two\n")) == "done\n> two\nhad two\n"
        user.type("\x04")
        user.until("done\n> ")
        assert user.leaves() == 0
