"""Several programs on one store: each a real process (S1, W≡C, D1, C1)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import perdure
from ext.workers.programs import Program, hold_file, program
from perdure import EngineError, PerdureError, StoreLockedError
from perdure.events.background import FAILURES
from perdure.ext.workers import attached
from perdure.testing.toy import ToyModel


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    )
    return tmp_path / "store"


def alone(tmp_path: Path, *said: str) -> str:
    """What a program that shares with nobody answers to the last of these."""
    with program(tmp_path / "alone") as fresh:
        for text in said[:-1]:
            fresh.ask("say", "s", text)
        answer: str = fresh.ask("say", "s", said[-1])["text"]
        return answer


def test_a_second_program_uses_the_engine_of_the_first(store: Path, tmp_path: Path) -> None:
    """W≡C: its answers are those that it would have given alone."""
    with program(store) as first, program(store) as second:
        assert first.ask("holder") is None
        assert second.ask("holder") == first.process.pid
        assert second.ask("generate", "once upon") == first.ask("generate", "once upon")
        assert second.ask("say", "s", "hello")["kept"]
        # The other one goes on in the same conversation, and finds what was said.
        assert first.ask("turns", "s") == ["hello"]
        answer = first.ask("say", "s", "again")
        assert answer["kept"]
        assert answer["cached"] > 0
        assert second.ask("turns", "s") == ["hello", "again"]
    assert answer["text"] == alone(tmp_path, "hello", "again")


def test_a_second_program_is_told_how_far_its_prompt_is_read(store: Path) -> None:
    with program(store, pace=0.002, n_ctx=2048) as first, program(store) as second:
        assert second.ask("holder") == first.process.pid
        assert 0 < second.ask("progress", 1500) < 1500


def test_two_programs_do_not_answer_in_one_session_at_once(store: Path) -> None:
    with program(store, pace=0.02) as first, program(store) as second:
        first.tell("begin", "s", "long", 100)
        assert first.hear() == {"begun": True}
        hold_file(store).touch()
        refused = second.ask("say", "s", "me too")
        assert refused["error"] == "SessionBusyError"
        assert "in another program" in refused["message"]
        assert second.ask("rewind", "s")["error"] == "SessionBusyError"
        assert second.ask("delete", "s")["error"] == "SessionBusyError"
        hold_file(store).unlink()
        assert second.ask("say", "other", "hello")["kept"]
        assert first.hear()["kept"]
        assert second.ask("say", "s", "now")["kept"]
        assert first.ask("turns", "s") == ["long", "now"]


def test_a_turn_of_a_program_that_was_killed_frees_its_session(store: Path) -> None:
    with program(store, pace=0.02) as first, program(store) as second:
        second.tell("begin", "s", "long", 1000)
        assert second.hear() == {"begun": True}
        second.kill()
        assert first.ask("say", "s", "hello")["kept"]
        assert first.ask("turns", "s") == ["long", "hello"], "what was asked is kept as a cancelled turn"


def test_what_another_program_deleted_is_gone_here_too(store: Path) -> None:
    """D1, I5: a handle never reaches a session that was made anew under its name."""
    with program(store) as first, program(store) as second:
        first.ask("say", "s", "hello")
        assert second.ask("delete", "s") is True
        assert first.ask("turns", "s")["error"] == "SessionNotFoundError"
        second.ask("say", "s", "anew")
        assert first.ask("turns", "s") == ["anew"]


def test_when_the_first_leaves_the_second_runs_the_engine(store: Path, tmp_path: Path) -> None:
    with program(store) as second_first:
        second_first.ask("say", "s", "hello")
        with program(store) as second, program(store) as third:
            assert second_first.ask("close") == {"closed": True}
            answers = second.ask("say", "s", "again"), third.ask("generate", "once upon")
            holders = {second.ask("holder"), third.ask("holder")}
            assert None in holders
            assert holders <= {None, second.process.pid, third.process.pid}
            assert third.ask("turns", "s") == ["hello", "again"]
    assert answers[0]["text"] == alone(tmp_path, "hello", "again")


def test_a_reply_of_another_program_is_finished_before_the_engine_goes(store: Path) -> None:
    with program(store, pace=0.02) as first, program(store) as second:
        second.tell("begin", "s", "long", 60)
        assert second.hear() == {"begun": True}
        first.tell("close")
        answer = second.hear()
        assert answer["kept"]
        assert answer["end"] == "length"
        assert len(answer["text"]) > 0
        assert first.hear() == {"closed": True}


@pytest.mark.parametrize("others", [1, 2])
def test_when_the_first_is_killed_the_others_go_on(store: Path, tmp_path: Path, others: int) -> None:
    """S1: what was kept is there; a reply that was cut is told as an error, and its question stays."""
    with program(store, pace=0.02) as first:
        assert first.ask("say", "s", "hello")["kept"]
        with program(store) as second, program(store) as third:
            second.tell("begin", "s", "long", 1000)
            assert second.hear() == {"begun": True}
            first.kill()
            cut = second.hear()
            assert cut["error"] == "EngineDiedError"
            assert f"process {first.process.pid}" in cut["message"]
            for one in (second, third)[:others]:
                assert one.ask("say", "s", f"again {others}")["kept"]
            assert third.ask("turns", "s") == ["hello", "long"] + [f"again {others}"] * others
            assert [second.ask("holder"), third.ask("holder")].count(None) == 1


def test_a_request_that_waits_while_the_first_is_killed_is_answered(store: Path) -> None:
    with program(store, pace=0.05, slots=1) as first, program(store) as second, program(store) as third:
        second.tell("begin", "long", "long", 2000)
        assert second.hear() == {"begun": True}
        third.tell("generate", "once upon")
        first.kill()
        assert isinstance(third.hear(), str)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_ctx": 8192}, "with a context of 4096 tokens, and this asks for 8192"),
        ({"exact": True}, "with the default exact, and this asks for exact=True"),
        ({"swa_full": True}, "with the default swa_full, and this asks for swa_full=True"),
    ],
)
def test_who_asks_for_another_engine_is_told_who_has_the_store(
    store: Path, options: dict[str, object], words: str
) -> None:
    with program(store) as first:
        second = Program(store, **options)
        told = second.hear()
        second.process.communicate()
        assert told["error"] == "StoreLockedError"
        assert words in told["message"]
        assert f"(process {first.process.pid}, since" in told["message"]
        assert "choose another store" in told["message"]


def test_the_socket_is_for_its_owner_alone(store: Path) -> None:
    with program(store):
        assert (store / "sessions.socket").stat().st_mode & 0o777 == 0o600
    long = store.parent / ("x" * 90) / "store"
    long.parent.mkdir()
    (long.parent / "chat.jinja").write_text((store.parent / "chat.jinja").read_text())
    # A path that is too long for a socket: it is elsewhere then.
    with program(long) as first, program(long) as second:
        assert second.ask("holder") == first.process.pid


ANOTHER_USER = """
import os, socket, sys
os.chdir(sys.argv[1])
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as end:
    end.connect("sessions.socket")
    print(len(end.recv(1)))
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be another user")
def test_a_process_of_another_user_gets_nothing_of_the_engine(store: Path) -> None:
    """Also where the socket was made open to all."""
    with program(store) as first:
        store.chmod(0o711)
        (store / "sessions.socket").chmod(0o666)
        for user, greeted in ((0, "1"), (65534, "0")):
            command = [sys.executable, "-c", ANOTHER_USER, str(store), str(user)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            assert done.stdout.strip() == greeted
        assert first.ask("say", "s", "hello")["kept"]


def test_a_program_that_is_stopped_keeps_nobody_waiting_for_its_tokenizer(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP of the one that has the engine: others are told, who comes anew too, and after SIGCONT all goes
    on."""
    monkeypatch.setattr(attached, "_SILENT", 1.0)
    template = store.parent / "chat.jinja"
    with (
        program(store) as first,
        perdure.open(ToyModel(), store=store, template=template) as second,
    ):
        assert second.backend.holder.pid == first.process.pid  # type: ignore[attr-defined]
        os.kill(first.process.pid, signal.SIGSTOP)
        try:
            # A thread on another core may still answer the first ones.
            with pytest.raises(EngineError, match="stopped or hangs"):
                list(map(second.model.tokenize, map(str, range(1000))))
            with pytest.raises(StoreLockedError, match="stopped or hangs"):
                perdure.open(ToyModel(), store=store, template=template)
        finally:
            os.kill(first.process.pid, signal.SIGCONT)
        assert second.session("s").say("Hello", max_tokens=2).kept
        assert first.ask("turns", "s") == ["Hello"]


def test_a_second_program_that_is_stopped_holds_up_nobody(store: Path) -> None:
    """SIGSTOP of one whose reply is being written: the engine goes on, and so does it after SIGCONT."""
    with program(store, pace=0.001) as first, program(store) as second:
        second.tell("begin", "s", "long", 100)
        assert second.hear() == {"begun": True}
        os.kill(second.process.pid, signal.SIGSTOP)
        try:
            assert first.ask("say", "t", "hello")["kept"]
        finally:
            os.kill(second.process.pid, signal.SIGCONT)
        assert second.hear()["kept"]
        assert first.ask("turns", "s") == ["long"]


def test_programs_that_start_at_once_share(store: Path) -> None:
    programs = [Program(store) for _ in range(4)]
    try:
        assert all(each.hear()["open"] for each in programs)
        assert [each.ask("holder") for each in programs].count(None) == 1
        for number, each in enumerate(programs):
            assert each.ask("say", "s", f"hello {number}")["kept"]
        assert programs[0].ask("turns", "s") == [f"hello {number}" for number in range(4)]
    finally:
        for each in programs:
            each.process.kill()
            each.process.communicate()


def test_whoever_waits_for_an_engine_hears_that_none_comes(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that was to find the next engine failed: it says so, and nobody waits for it."""
    template = store.parent / "chat.jinja"
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with (
        program(store, pace=0.05) as first,
        perdure.open(ToyModel(), store=store, template=template) as second,
    ):

        def fail() -> None:
            raise SystemExit(1)

        monkeypatch.setattr(second.backend, "_move", fail)
        before = FAILURES["perdure-attached"]
        stream = second.submit("Hello", max_tokens=500)
        first.kill()
        with pytest.raises(PerdureError):
            stream.reply()
        with pytest.raises(PerdureError):
            second.generate("Hello", max_tokens=1)
        assert FAILURES["perdure-attached"] == before + 1
        FAILURES["perdure-attached"] = before
